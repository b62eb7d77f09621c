"""The frame of the command line: find the verb, run it, and print its errors."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import click
from click.exceptions import Exit as ClickExit
from click.shell_completion import shell_complete

import clusterrun
from clusterrun.cli.shared import output, spellings
from clusterrun.cli.shared.help import HELP_ALL, GroupedCommand, GroupedOption
from clusterrun.errors import ClusterrunError, ElsewhereError, Exit, UsageError

COLOURS: Final = ("auto", "always", "never")
_COMPLETE: Final = "_CLUSTERRUN_COMPLETE"
BROKEN_PIPE: Final = 141  # 128 + SIGPIPE, as if the signal had killed it

EXAMPLES: Final = """\
\b
clusterrun init                                    write a starter clusterrun.yaml
clusterrun submit -N 2 --gpus-per-node 4 train.py  train on 2 nodes x 4 GPUs
clusterrun render -N 2 --gpus-per-node 4 train.py  print the batch script
clusterrun logs -f                                 follow the newest run
clusterrun help exit-codes                         explain the exit statuses"""

EXIT_CODES: Final = """\
0    done, or the answer is yes
1    the operation failed (e.g. sbatch refused the job), or plan has no verdict
2    the command line or the configuration is invalid; nothing was started
3    done, and the answer is no (status --exit-status of a job that did not complete)
4    no such job or run
5    Slurm or a host did not answer; jobs are not affected
130  interrupted by Ctrl-C
141  the reader closed the pipe

submit --wait exits with the status of the job: that of the first rank that failed,
128 + N if signal N killed that rank, or
120  the ranks did not form one world
121  the nodes could not reach each other
122  a node is unfit for training
123  a node was lost
124  the job was cancelled or hit its time limit
125  the ranks saved a checkpoint and exited; the run continues later
126  no step ended within the hang timeout"""


class Verb(NamedTuple):
    """The module that has a command, as `NAME_command` or `command`; its heading and summary."""

    module: str
    heading: str
    summary: str


VERBS: Final[dict[str, Verb]] = {
    "plan": Verb("plan", "Run", "Estimate memory, time and cost before you submit."),
    "scaling": Verb("scaling", "Run", "Measure how a script scales across nodes."),
    "submit": Verb("submit", "Run", "Submit a training script to run on N nodes."),
    "check": Verb("submit", "Run", "Look for pitfalls in a script and its launch."),
    "render": Verb("submit", "Run", "Print the batch script that submit sends."),
    "resume": Verb("resume", "Run", "Continue a run that has ended."),
    "resubmit": Verb("resume", "Run", "Start a new run like an earlier one."),
    "cancel": Verb("cancel", "Run", "Cancel jobs."),
    "prune": Verb("cancel", "Run", "Remove old runs of this project."),
    "status": Verb("status", "Watch", "Show the state of jobs."),
    "top": Verb("status", "Watch", "Show a job while it runs."),
    "list": Verb("status", "Watch", "List jobs and their states."),
    "logs": Verb("logs", "Watch", "Print the output of the ranks."),
    "diagnose": Verb("diagnose", "Watch", "Find the cause of a failure."),
    "explain": Verb("doctor", "Watch", "Explain a cause, a check or a rule."),
    "init": Verb("config", "Set up", "Write a starter clusterrun.yaml."),
    "config": Verb("config", "Set up", "Show and check the configuration."),
    "doctor": Verb("doctor", "Set up", "Check if this machine, Slurm and the nodes can run a job."),
    "completion": Verb("main", "Set up", "Print a completion script for a shell."),
}


_HIDDEN: Final = {"await-end": "shared.closing"}  # for another machine's clusterrun


class LazyGroup(click.Group):
    """The verbs of the table, each imported when it is used; help reads only the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List every verb."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the verb's module and take its command."""
        verb = VERBS.get(cmd_name)
        module = verb.module if verb else _HIDDEN.get(cmd_name)
        if module is None:
            return None
        names = vars(importlib.import_module(f"clusterrun.cli.{module}"))
        found: click.Command = names.get(f"{cmd_name}_command") or names["command"]
        return _with_global_options(found)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb. Raises UsageError, with the nearest name, for an unknown one."""
        name = args[0]
        is_known = name in {*VERBS, *_HIDDEN} or name.startswith("-")
        if not is_known and not ctx.resilient_parsing:
            hint = spellings.hint_for_command(name, args, list(VERBS))
            raise UsageError(f"no command '{name}'", hint=hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table, by heading."""
        for heading in dict.fromkeys(verb.heading for verb in VERBS.values()):
            rows = [(f"{name:<10}", x.summary) for name, x in VERBS.items() if x.heading == heading]
            with formatter.section(heading):
                formatter.write_dl(rows)


def _set(_: click.Context, parameter: click.Parameter, value: str | bool | None) -> None:
    if value and parameter.name:
        setattr(output.session, parameter.name, value)


def _show_help(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = parameter.name == "help_all"
        output.answer(ctx.get_help(), wraps=False)
        ctx.exit()


def _with_global_options(command: click.Command) -> click.Command:
    """Add the options that every command has, to it and to its subcommands."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _with_global_options(inner)
    known = {option for parameter in command.params for option in parameter.opts}
    flag: dict[str, Any] = {"is_flag": True, "expose_value": False, "is_eager": True}
    rare: dict[str, Any] = {"heading": "Output", "common": False, "callback": _set}
    choice = {**flag, "is_flag": False, "type": click.Choice(COLOURS)}
    quiet = "-Q" if "-q" in known else "-q"  # sbatch: -q is --qos, -Q is --quiet
    used, whole = "print the files and settings that are used", "print this help with all options"
    is_short = isinstance(command, GroupedCommand)  # its --help leaves out uncommon options
    options = [
        GroupedOption(["--color"], help="colour the output  [default: auto]", **rare, **choice),
        GroupedOption([quiet, "--quiet"], help="suppress notes", **rare, **flag),
        GroupedOption(["-v", "--verbose"], help=used, **rare, **flag),
        click.Option(["-h", "--help"], help="print this help", callback=_show_help, **flag),
        click.Option(["--help-all"], hidden=not is_short, help=whole, callback=_show_help, **flag),
    ]
    command.params += [each for each in options if each.opts[-1] not in known]
    return command


@click.group(
    cls=LazyGroup,
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "token_normalize_func": spellings.normalized,
    },
    epilog=EXAMPLES,
)
@click.version_option(
    clusterrun.__version__,
    prog_name="clusterrun",
    message="%(prog)s %(version)s",
    help="print the version",
)
@click.pass_context
def group(ctx: click.Context) -> None:
    """Train a PyTorch script on N nodes, and check that its ranks form one world."""
    if ctx.invoked_subcommand is None:
        output.say(ctx.get_help())
        ctx.exit(Exit.USAGE)


_with_global_options(group)


@click.command("completion")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion_command(shell: str) -> None:
    """Print a completion script for a shell.

    To install it, add one line to the shell's startup file and open a new shell:

    \b
    bash  ~/.bashrc                    eval "$(clusterrun completion bash)"
    zsh   ~/.zshrc, after compinit     eval "$(clusterrun completion zsh)"
    fish  ~/.config/fish/config.fish   clusterrun completion fish | source

    TAB then completes commands, options, jobs and files.
    Completion reads files only and never asks Slurm.
    """
    shell_complete(group, {}, "clusterrun", _COMPLETE, f"{shell}_source")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    output.session = output.Session()
    output.keep_bytes()
    try:
        status = _run(args)
    except BrokenPipeError:
        status = BROKEN_PIPE
    if status:  # a write that failed leaves text in a buffer
        _silence_streams()
    return status


def _run(args: list[str]) -> int:
    try:
        return _invoke(args)
    except ClusterrunError as error:
        output.print_error(error)
        return error.exit_code
    except click.UsageError as error:
        _set_output_options(args)
        output.print_error(_from_click(error, args))
        return Exit.USAGE
    except click.ClickException as error:
        output.print_error(ClusterrunError(_sentence(error.format_message())))
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        output.say_interrupted("interrupted")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the user must never see a traceback
        return _report_crash(error)


def _invoke(args: list[str]) -> int:
    """Complete a word, print a page of help, or run a verb where the run directory is."""
    if instruction := os.environ.get(_COMPLETE):
        try:
            return shell_complete(group, {}, "clusterrun", _COMPLETE, instruction)
        except (ClusterrunError, OSError):  # an error would spoil the line being typed
            return Exit.FAILED
    if args == ["help", "exit-codes"]:
        output.answer(EXIT_CODES)
        return Exit.OK
    if args[:1] == ["help"]:
        args = [*args[1:], "--help"]
    if ElsewhereError.VARIABLE in os.environ:  # set by `forward` on another host
        from clusterrun.cli.shared.forward import accept_forwarded

        accept_forwarded()
    try:
        with group.make_context("clusterrun", list(args)) as ctx:
            try:
                result = group.invoke(ctx)
            except ElsewhereError as there:  # the verb runs on the host that has the run
                from clusterrun.cli.shared import forward  # imports what runs commands

                if ctx.invoked_subcommand not in forward.VERBS:  # resubmit would start a run there
                    raise
                result = forward.forward(args, there, ctx.invoked_subcommand)
    except ClickExit as leaving:
        return leaving.exit_code
    return result if isinstance(result, int) else Exit.OK


def _set_output_options(args: list[str]) -> None:
    """Set the output options of a command line that click could not parse, to print its error."""
    own = itertools.takewhile(lambda word: word != "--" and not word.endswith(".py"), args)
    words = " ".join(own).replace("=", " ").split()
    output.session.json = "--json" in words
    for word, following in itertools.pairwise(words):
        if word == "--color" and following in COLOURS:
            output.session.color = following


def _from_click(error: click.UsageError, args: Sequence[str]) -> UsageError:
    """Return our error for an error of click."""
    verb = " ".join(word for word in args[:1] if word in VERBS)
    command = error.ctx.command_path if error.ctx else f"clusterrun {verb}".rstrip()
    fallback = f"run '{command} --help' for the options"
    if isinstance(error, click.NoSuchOption):
        return spellings.no_option(error, args)
    return UsageError(_sentence(error.format_message()), hint=fallback)


def _sentence(text: str) -> str:
    """Rewrite click's sentence in our style: on one line, lower case, no full stop."""
    text = " ".join(text.split()).rstrip(".")
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _report_crash(error: Exception) -> int:
    """Report a bug, with the file that has its traceback; return the exit status."""
    from clusterrun.shared.files import write_crash

    what = f"clusterrun itself failed: {type(error).__name__}: {error}".strip()
    try:
        hint = f"report it with the traceback in {write_crash(error)}"
    except OSError:
        import traceback  # only needed after a crash

        sys.stderr.write("".join(traceback.format_exception(error)))
        hint = "report it with the traceback above"
    output.print_error(ClusterrunError(what, hint=hint))
    return Exit.FAILED


def _silence_streams() -> None:
    """Keep the interpreter's flush at exit from complaining about a closed stream."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
