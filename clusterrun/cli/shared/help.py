"""Help with headings: the common options, and all of them with --help-all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import click

HELP_ALL: Final = "clusterrun.help_all"
HEADINGS: Final = {
    "job": "Job",
    "hosts": "Hosts",
    "slurm": "Slurm",
    "launch": "Training",
    "network": "Network",
    "training": "Model and data",
    "env": "Environment",
    "config": "Configuration",
    "submission": "Submission",
}
OF_A_JOB: Final = frozenset(HEADINGS.values()) - {HEADINGS["training"], HEADINGS["submission"]}
AS_SUBMIT: Final = ("-N, -t, --set, ...", "the options of a job: see clusterrun submit --help")


class GroupedOption(click.Option):
    """An option with its heading in the help; `common`: the short help shows it."""

    def __init__(self, *args: Any, heading: str, common: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading
        self.common = common


class GroupedCommand(click.Command):
    """A verb whose help has headings; one line stands for the options under `unlisted` headings."""

    unlisted: frozenset[str] = frozenset()

    def listed_options(self, ctx: click.Context) -> Iterator[click.Option]:
        """Yield the options that this verb itself explains."""
        for parameter in self.get_params(ctx):
            is_listed = getattr(parameter, "heading", "") not in self.unlisted
            if isinstance(parameter, click.Option) and is_listed and not parameter.hidden:
                yield parameter

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options under their headings, or all with --help-all."""
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in HEADINGS.values()}
        if self.unlisted:
            sections[HEADINGS["job"]].append(AS_SUBMIT)
        for parameter in self.listed_options(ctx):
            if getattr(parameter, "common", True) or ctx.meta.get(HELP_ALL):
                heading = getattr(parameter, "heading", "Output")
                record = parameter.get_help_record(ctx)
                sections.setdefault(heading, []).append(record or ("", ""))
        for heading, rows in sections.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def under(heading: str, *, common: bool = True) -> Callable[..., Callable[[Any], Any]]:
    """Return `click.option` for options of one heading; the short help leaves out uncommon ones."""
    return functools.partial(click.option, cls=GroupedOption, heading=heading, common=common)


def _explain(ctx: click.Context, _: click.Parameter, name: str | None) -> None:
    """Print the page of --explain, and exit."""
    verbs = ctx.find_root().command
    if name is not None and isinstance(verbs, click.Group):
        if verb := verbs.get_command(ctx, "explain"):
            ctx.invoke(verb, name=name)
        ctx.exit()


explain_option = click.option(
    "--explain",
    metavar="ID",
    help="explain a cause, check or rule, as clusterrun explain does",
    callback=_explain,
    is_eager=True,
    expose_value=False,
)
