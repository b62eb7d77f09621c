"""The options of the verbs that make a job, generated from the fields of JobSpec."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar, cast

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from clusterrun.cli.shared.output import CONFIRM_ABOVE_NODES
from clusterrun.config import Given, Resolved
from clusterrun.config.fields import Field, Kind
from clusterrun.config.spec import FIELDS
from clusterrun.errors import ClusterrunError
from clusterrun.estimates.inputs import Setup

_TYPED: Final = "clusterrun.typed"
_HEADINGS: Final = {
    "job": "Job",
    "slurm": "Slurm",
    "launch": "Training",
    "network": "Network",
    "training": "Facts of the training",
    "env": "Environment",
    "config": "Configuration",
}
_METAVARS: Final = {
    Kind.TEXT: "TEXT",
    Kind.PATH: "PATH",
    Kind.COUNT: "N",
    Kind.NUMBER: "N",
    Kind.REAL: "X",
    Kind.BYTES: "SIZE",
    Kind.MINUTES: "TIME",
    Kind.SECONDS: "TIME",
}

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What was typed about a job, not yet interpreted.

    `flags` maps the names of JobSpec's fields to `config.Given`.
    """

    flags: dict[str, Any] = field(default_factory=dict)
    config_file: str | None = None
    profile: str | None = None
    overrides: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def load(self) -> Resolved:
        """Resolve them with this process's environment and working directory.

        Raises UsageError for a value that can't be meant, here or in a file.
        """
        from clusterrun.verbs.config import load_spec

        resolved = load_spec(
            self.flags,
            config_file=self.config_file,
            profile=self.profile,
            overrides=self.overrides,
        )
        return replace(resolved, notes=(*self.notes, *resolved.notes))


yes_option = click.option(
    "-y", "--yes", is_flag=True, help=f"no question above {CONFIRM_ABOVE_NODES} nodes"
)
exclude_bad_option = click.option(
    "--exclude-bad",
    is_flag=True,
    help="leave out nodes that gave no sign of life, or where ranks were stopped or blocked twice",
)


class GroupedOption(click.Option):
    """An option that knows its heading in the help and completes the words of an enum."""

    def __init__(self, *args: Any, heading: str, words: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading
        self.words = tuple(words)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the words of an enum, or what the type offers."""
        if not self.words:
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(word) for word in self.words if word.startswith(incomplete)]


class ProfileOption(GroupedOption):
    """An option that completes the names of the profiles that the files define."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the profiles; files that cannot be read offer none."""
        from clusterrun.backends.machine_facts import working_directory
        from clusterrun.config.document import parse_document
        from clusterrun.config.files import find_files

        try:
            cwd = working_directory(os.environ)
            config_file = ctx.params.get("config_file")
            found = find_files(environ=os.environ, cwd=cwd, config_file=config_file)
        except ClusterrunError:
            return []
        names = {name for each in found.files for name in parse_document(each).profiles}
        return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


class GroupedCommand(click.Command):
    """A verb whose help has headings; options without one, as every verb has, come last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings."""
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in _HEADINGS.values()}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                heading = getattr(parameter, "heading", "Output")
                sections.setdefault(heading, []).append(record)
        for heading, rows in sections.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class JobCommand(GroupedCommand):
    """A verb that takes a job: it remembers what was typed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words as typed: origins name the spelling that was used."""
        ctx.meta[_TYPED] = list(args)
        return super().parse_args(ctx, args)


class ScriptCommand(JobCommand):
    """A verb that takes a script with its arguments: its own options end where they begin."""

    allow_interspersed_args = False


def job_options(
    *,
    script: bool = True,
    files: bool = True,
    training: bool = False,
    without: Collection[str] = (),
) -> Callable[[_Function], _Function]:
    """Give a verb the options of JobSpec; it receives them as `job: JobOptions`.

    With `script` also the arguments `[SCRIPT] [ARGS]...`, for a ScriptCommand; without `files`
    no option names a configuration file or a profile; with `training` also the facts of the
    training have options; the fields `without` have none.
    """
    groups = {x.group for x in FIELDS if training or x.group != "training"}
    declared = [x for x in FIELDS if x.flags and x.group in groups and x.name not in without]

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def command(*args: Any, **kwargs: Any) -> Any:
            job = _collect(click.get_current_context(), kwargs, declared)
            return function(*args, job=job, **kwargs)

        sources = [*_FILE_OPTIONS, _SET_OPTION] if files else [_SET_OPTION]
        for option in reversed([*map(_field_option, declared), *sources]):
            option(command)
        if script:
            _SCRIPT_ARGUMENT(command)
        return cast(_Function, command)

    return decorate


def _field_option(declared: Field) -> Callable[[Any], Any]:
    words = [str(member.value) for member in declared.choices or ()]
    settings: dict[str, Any] = {
        "cls": GroupedOption,
        "heading": _HEADINGS[declared.group],
        "words": words,
        "default": None,
        "help": declared.help,
    }
    if declared.kind is Kind.FLAG:
        settings["is_flag"] = True
    else:
        settings["metavar"] = declared.metavar or "|".join(words) or _METAVARS.get(declared.kind)
        # Values stay texts: they are parsed with those of files.
        settings["type"] = click.Path() if declared.kind is Kind.PATH else click.UNPROCESSED
        settings["multiple"] = declared.kind in (Kind.TEXTS, Kind.MAPPING)
    return click.option(declared.name, *declared.flags, **settings)


_SCRIPT_ARGUMENT: Final = click.argument(
    "words", metavar="[SCRIPT] [ARGS]...", nargs=-1, type=click.UNPROCESSED
)
_FILE_OPTIONS: Final = (
    click.option(
        "config_file",
        "--config",
        metavar="FILE",
        type=click.Path(),
        cls=GroupedOption,
        heading=_HEADINGS["config"],
        help="a job file; it wins over clusterrun.yaml",
    ),
    click.option(
        "profile",
        "--profile",
        metavar="NAME",
        cls=ProfileOption,
        heading=_HEADINGS["config"],
        help="a profile of the files ('': none)",
    ),
)
_SET_OPTION: Final = click.option(
    "overrides",
    "--set",
    metavar="KEY=VALUE",
    multiple=True,
    type=click.UNPROCESSED,
    cls=GroupedOption,
    heading=_HEADINGS["config"],
    help="any setting by its key in the file, as slurm.nodes=2",
)


def _collect(ctx: click.Context, kwargs: dict[str, Any], fields: Sequence[Field]) -> JobOptions:
    """Take the parameters of the job out of those that click passes to the verb."""
    words = kwargs.pop("words", ())
    flags = {}
    for declared in fields:
        value = kwargs.pop(declared.name)
        if ctx.get_parameter_source(declared.name) is ParameterSource.COMMANDLINE:
            flags[declared.name] = Given(value=value, flag=_typed_as(ctx, declared))
    flags.update(_entry(words, has_module="module" in flags))
    return JobOptions(
        flags=flags,
        config_file=kwargs.pop("config_file", None),
        profile=kwargs.pop("profile", None),
        overrides=kwargs.pop("overrides"),
        notes=tuple(_misplaced(words)),
    )


def _entry(words: Sequence[str], *, has_module: bool) -> dict[str, Any]:
    """Split `[SCRIPT] [ARGS]...`; words that begin with a dash are for the configured script."""
    if not words:
        return {}
    if has_module or words[0].startswith("-"):
        return {"args": Given(value=tuple(words), flag="")}
    return {
        "script": Given(value=words[0], flag=""),
        "args": Given(value=tuple(words[1:]), flag=""),
    }


def _misplaced(words: Sequence[str]) -> Iterator[str]:
    """Warn of Slurm's options after the script: there they are the script's, as with sbatch."""
    spellings = {
        flag
        for declared in FIELDS
        if declared.group == "slurm"
        for flag in declared.flags
        if flag.startswith("--") or flag in ("-N", "-t", "-p", "-A")
    }
    for word in words[1:]:
        if word.partition("=")[0] in spellings:
            yield f"'{word}' stands after the script and is an argument of the script"
            return


def _typed_as(ctx: click.Context, declared: Field) -> str:
    """Return the spelling that was used, or the first one if that is unclear."""
    spellings = [part for flag in declared.flags for part in flag.split("/")]
    for word in ctx.meta.get(_TYPED, ()):
        name = word.partition("=")[0]
        for spelling in spellings:
            short = len(spelling) == 2 and word.startswith(spelling)
            if name == spelling or (short and not word.startswith("--")):
                return spelling
    return spellings[0]


def as_options(setup: Setup) -> str:
    """Write a setup as the options that ask for it."""
    words = [f"--strategy {setup.strategy.value}", f"--micro-batch {setup.micro_batch}"]
    words += [f"--accumulation {setup.accumulation}"]
    return " ".join([*words, "--grad-ckpt"] if setup.grad_ckpt else words)
