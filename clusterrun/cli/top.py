"""`top`: show one job while it runs."""

from __future__ import annotations

import click

from clusterrun.cli.shared import complete, output
from clusterrun.cli.shared.job_text import find_announced
from clusterrun.verbs.status import status


@click.command()
@click.argument("job", required=False, shell_complete=complete.jobs)
@click.pass_context
def command(ctx: click.Context, job: str | None) -> None:
    """Show a job while it runs.

    JOB is a job id, the name of a run or its directory  [default: the newest run]. What is wrong
    comes first, then progress, nodes, GPUs and the last lines. The screen ends with the job; q
    leaves it, and the job continues. Above 32 nodes there is a cell for each node, and a row for
    each of the 20 worst. Without a terminal, the screen is printed once.

    \b
    clusterrun top 4711
    clusterrun top 4711 > now.txt
    """
    record = find_announced(job)
    from clusterrun.cli.shared import screen  # imports rich, the estimate and the logs

    seen = screen.watch(record) or status(record)
    screen.print_screen(seen)
    if seen.error is not None:
        output.print_error_text(seen.error)
        ctx.exit(seen.error.exit_code)
