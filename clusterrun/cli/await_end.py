"""`await-end`: what `submit --wait` and `--follow` run on the host that has the run directory."""

from __future__ import annotations

import json

import click

from clusterrun.cli.shared import output
from clusterrun.cli.shared.waiting import await_end
from clusterrun.verbs.find import find_record


@click.command()
@click.option("--follow", is_flag=True)
@click.option("--json", "submission", help="the object to complete")
@click.pass_context
def command(ctx: click.Context, *, follow: bool, submission: str | None) -> None:
    """Follow or wait for the forwarded run, and exit with its status."""
    output.expect_json(submission is not None)
    await_end(ctx, find_record(), json.loads(submission or "null"), follow=follow)
