"""`await-end`: what `submit --wait` and `--follow` run on the host that has the run directory."""

from __future__ import annotations

import click

from clusterrun.cli.shared import output
from clusterrun.cli.shared.waiting import await_end
from clusterrun.verbs.find import find_record


@click.command()
@click.option("--follow", is_flag=True)
@click.option("--json", "as_json", is_flag=True)
@click.pass_context
def command(ctx: click.Context, *, follow: bool, as_json: bool) -> None:
    """Follow or wait for the forwarded run, and exit with its status."""
    output.expect_json(as_json)
    await_end(ctx, find_record(), {}, as_json=as_json, follow=follow)
