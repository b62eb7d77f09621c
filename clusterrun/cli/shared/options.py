"""The options of the verbs that make a job, generated from the fields of JobSpec."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

import click
from click.core import ParameterSource

from clusterrun.cli.shared import output, spellings
from clusterrun.cli.shared.help import HEADINGS, OF_A_JOB, GroupedCommand, GroupedOption, under
from clusterrun.cli.shared.output import CONFIRM_ABOVE_NODES
from clusterrun.config.fields import Field, Kind
from clusterrun.config.load import Given
from clusterrun.config.settings import BUILT_IN, Resolved
from clusterrun.config.spec import FIELDS
from clusterrun.errors import UsageError

if TYPE_CHECKING:
    from clusterrun.estimates.inputs import Setup

_TYPED: Final = "clusterrun.typed"  # all words after the verb
_NEW_ARGS: Final = "clusterrun.replaced"  # the script's new arguments, after `--`
_WIDEST: Final = 30  # characters; longer choices go into the help text
_METAVARS: Final = {
    **{Kind.TEXT: "TEXT", Kind.PATH: "PATH", Kind.REAL: "X", Kind.BYTES: "SIZE"},
    **dict.fromkeys((Kind.COUNT, Kind.NUMBER), "N"),
    **dict.fromkeys((Kind.MINUTES, Kind.SECONDS, Kind.DURATION), "TIME"),
}

_Function = TypeVar("_Function", bound=Callable[..., Any])


class JobOptions(NamedTuple):
    """A job's options as typed: `flags` maps the names of JobSpec's fields to `config.Given`."""

    flags: Mapping[str, Any] = MappingProxyType({})
    config_file: str | None = None
    profile: str | None = None
    overrides: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def with_flags(self, more: Mapping[str, Any]) -> JobOptions:
        """Return them with more flags, or other values."""
        return self._replace(flags={**self.flags, **more})

    def load(self) -> Resolved:
        """Resolve them with this environment and directory. Raises UsageError."""
        from clusterrun.verbs.render import load_spec

        given = self._asdict()
        notes = given.pop("notes")
        resolved = load_spec(**given)
        if output.session.verbose:
            output.detail("files", ", ".join(resolved.files) or "none")
            output.detail("profile", resolved.profile or "none")
            rows = (row for row in resolved.rows() if row.origin != str(BUILT_IN))
            output.detail("settings", *(f"{x.key}: {x.text}  ({x.origin})" for x in rows))
        return resolved._replace(notes=(*notes, *resolved.notes))


submission_option: Final = under(HEADINGS["submission"])

yes_option = submission_option(
    "-y",
    "--yes",
    is_flag=True,
    help=f"do not ask for confirmation above {CONFIRM_ABOVE_NODES} nodes",
)
dry_run_option = submission_option(
    "--dry-run", is_flag=True, help="print what would be submitted without submitting it"
)
wait_option = submission_option(
    "-W", "--wait", is_flag=True, help="wait for the job and exit with its status"
)
follow_option = submission_option(
    "--follow", is_flag=True, help="follow the logs until the job ends, then exit with its status"
)
parsable_option = under("Output", common=False)(
    "--parsable", is_flag=True, help="print only the job id, as sbatch --parsable does"
)


class HowToAnswer(NamedTuple):
    """How a verb that submits a job answers; with `wait` or `follow`, also with the job's end."""

    as_json: bool
    parsable: bool
    yes: bool
    wait: bool
    follow: bool


def answer_options(function: _Function) -> _Function:
    """Add --json, --parsable, -y, --wait and --follow to a verb; it gets `answer: HowToAnswer`."""

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> Any:
        answer = HowToAnswer(*(kwargs.pop(name) for name in HowToAnswer._fields))
        for name in ("parsable", "follow"):
            if answer.as_json and getattr(answer, name):
                raise UsageError(f"--json and --{name} cannot be combined", hint="pass one of them")
        return function(*args, answer=answer, **kwargs)

    for option in (output.json_option, parsable_option, yes_option, wait_option, follow_option):
        option(command)
    return cast(_Function, command)


exclude_bad_option = submission_option(
    "--exclude-bad",
    is_flag=True,
    help="exclude nodes that were lost, unfit or at fault, or on which a rank was stuck twice",
)


class JobCommand(GroupedCommand):
    """A verb that takes the options of a job, and remembers how they were typed."""

    unlisted = OF_A_JOB

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words as typed, for messages, and refuse a launcher as the module."""
        ctx.meta[_TYPED] = list(args)
        spellings.refuse_launcher_module(args, ctx)
        return super().parse_args(ctx, args)


class ContinueCommand(JobCommand):
    """A verb that takes a job and, after `--`, new arguments for its script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take what follows the first `--` for the script."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[_NEW_ARGS] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Add the arguments of the script to the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS...]"]


class ScriptCommand(JobCommand):
    """A verb that takes a script with its arguments; its own options come before the script."""

    allow_interspersed_args = False


class SubmitCommand(ScriptCommand):
    """The verb whose help lists the options of a job."""

    unlisted = frozenset()


def job_options(
    *,
    script: bool = True,
    files: bool = True,
    training: bool = False,
    without: Collection[str] = (),
) -> Callable[[_Function], _Function]:
    """Give a verb the options of JobSpec; it receives them as `job: JobOptions`.

    `script` adds the arguments `[SCRIPT] [ARGS]...`, for a ScriptCommand; `files` adds the options
    for a configuration file and a profile; `training` adds those for the facts of the training. The
    fields in `without` have no options.
    """
    groups = {x.group for x in FIELDS if training or x.group != "training"}
    declared = [x for x in FIELDS if x.flags and x.group in groups and x.name not in without]

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def command(*args: Any, **kwargs: Any) -> Any:
            job = _collect(click.get_current_context(), kwargs, declared)
            return function(*args, job=job, **kwargs)

        sources = [*_FILE_OPTIONS, _SET_OPTION] if files else [_SET_OPTION]
        for option in reversed([*map(_field_option, declared), *sources]):  # click reverses them
            option(command)
        if script:
            _SCRIPT_ARGUMENT(command)
        return cast(_Function, command)

    return decorate


def _field_option(declared: Field) -> Callable[[Any], Any]:
    """Return the option of a field; choices too wide for its metavar are listed in the help."""
    words = [str(member.value) for member in declared.choices or ()]
    shown = "|".join(words)
    is_wide = len(shown) > _WIDEST
    settings: dict[str, Any] = {
        "cls": GroupedOption,
        "heading": HEADINGS[declared.group],
        "common": declared.is_common,
        "default": None,
        "help": declared.help,
        "shell_complete": click.Choice(words).shell_complete if words else None,
    }
    if is_wide:
        what, bracket, default = declared.help.partition("  [")  # the default stays at the end
        settings["help"] = f"{what}: {', '.join(words)}{bracket}{default}"
    if declared.kind is Kind.FLAG:
        settings["is_flag"] = True
    else:
        metavar = "NAME" if is_wide else shown or _METAVARS.get(declared.kind)
        settings["metavar"] = declared.metavar or metavar
        # Values stay texts; the configuration parses them.
        settings["type"] = click.Path() if declared.kind is Kind.PATH else click.UNPROCESSED
        settings["multiple"] = declared.kind in (Kind.TEXTS, Kind.MAPPING)
    return click.option(declared.name, *declared.flags, **settings)


_SCRIPT_ARGUMENT: Final = click.argument(
    "words",
    metavar="[SCRIPT] [ARGS]...",
    nargs=-1,
    type=click.UNPROCESSED,
    shell_complete=click.Path().shell_complete,
)
_config_option: Final = under(HEADINGS["config"])
_FILE_OPTIONS: Final = (
    under(HEADINGS["config"], common=False)(
        *("config_file", "--config"),
        **{"metavar": "FILE", "type": click.Path()},
        help="also read this file; it overrides clusterrun.yaml",
    ),
    _config_option(
        *("profile", "--profile"),
        metavar="NAME",
        help="apply this profile of the configuration ('': none)",
    ),
)
_SET_OPTION: Final = _config_option(
    *("overrides", "--set"),
    **{"metavar": "KEY=VALUE", "multiple": True, "type": click.UNPROCESSED},
    help="set any key of the configuration, e.g. slurm.nodes=2 (repeatable)",
)


def _collect(ctx: click.Context, kwargs: dict[str, Any], fields: Sequence[Field]) -> JobOptions:
    """Take the job's parameters out of those that click passes to the verb."""
    words = kwargs.pop("words", ())
    flags = {}
    for declared in fields:
        value = kwargs.pop(declared.name)
        if ctx.get_parameter_source(declared.name) is ParameterSource.COMMANDLINE:
            long_name = next(flag for flag in declared.flags if flag.startswith("--"))
            on, _, off = long_name.partition("/")  # --grad-ckpt/--no-grad-ckpt, or only --nodes
            flag = off if off and value is False else on
            # Such a value is the next option: click takes it if the text of this one is missing.
            if declared.kind is Kind.TEXT and str(value).startswith("--"):
                hint = f"{', '.join(declared.flags)}: {declared.help}"
                raise UsageError(f"{flag} has no value before {value}", hint=hint)
            flags[declared.name] = Given(value=value, flag=flag)
    notes = _check_words(ctx, words, flags.get("module")) if words else ()
    flags.update(_script_and_args(words, has_module="module" in flags))
    if _NEW_ARGS in ctx.meta:
        flags["args"] = Given(value=ctx.meta[_NEW_ARGS])
    config_file, profile = (kwargs.pop(name, None) for name in ("config_file", "profile"))
    return JobOptions(flags, config_file, profile, kwargs.pop("overrides"), notes)


def _check_words(ctx: click.Context, words: Sequence[str], module: Given | None) -> tuple[str, ...]:
    """Refuse words that belong before the script; return notes on others. Raises UsageError."""
    before = ctx.meta[_TYPED][: -len(words)]  # what was typed before them
    if not module and not words[0].startswith("-"):  # the first word is the script
        own_options = [word for word in before if word != "--"]
        spellings.refuse_other_program(words, ctx.info_name or "", own_options)
    if before[-1:] == ["--"]:  # every word is for the script
        return ()
    if module:  # every word is an argument
        return spellings.refuse_misplaced(ctx, before, str(module.value), words, is_module=True)
    return spellings.refuse_misplaced(ctx, before, words[0], words[1:], is_module=False)


def _script_and_args(words: Sequence[str], *, has_module: bool) -> dict[str, Any]:
    """Split `[SCRIPT] [--] [ARGS]...`; words that begin with a dash go to the configured script."""
    if not words:
        return {}
    if has_module or words[0].startswith("-"):
        return {"args": Given(tuple(words))}
    args = words[2:] if words[1:2] == ("--",) else words[1:]
    return {"script": Given(words[0]), "args": Given(tuple(args))}


def as_options(setup: Setup) -> str:
    """Write a setup as the options that select it."""
    words = [f"--strategy {setup.strategy.value}", f"--micro-batch {setup.micro_batch}"]
    words += [f"--accumulation {setup.accumulation}"]
    return " ".join([*words, "--grad-ckpt"] if setup.grad_ckpt else words)
