"""`cancel`: end jobs; what has ended already is no mistake."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from clusterrun.cli import output
from clusterrun.cli.status import clock
from clusterrun.errors import UsageError
from clusterrun.wording import count

if TYPE_CHECKING:
    from clusterrun.backends.status import JobStatus


@click.command()
@click.argument("jobs", nargs=-1, metavar="JOB...")
@click.option("-y", "--yes", is_flag=True, help="no question, also for several jobs")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def command(jobs: tuple[str, ...], *, yes: bool, as_json: bool) -> None:
    """End jobs.

    JOB is a job id, the name of a run (its newest) or a run's directory. Several jobs, or one on
    more than 64 nodes, need a yes: -y where nobody can be asked.
    """
    from clusterrun import api

    output.expect_json(as_json)
    seen = api.look_before_cancel(*jobs)
    _confirm([status for status in seen if not status.state.is_terminal], yes=yes)
    api.cancel_seen(seen)
    if as_json:
        told = [_object(before) for before in seen]
        output.answer_json({"schema": "clusterrun.cancel/1", "jobs": told})
        return
    for before in seen:
        _tell(before)


def _confirm(active: list[JobStatus], *, yes: bool) -> None:
    nodes = sum(status.record.nodes for status in active)
    if yes or (len(active) <= 1 and nodes <= output.CONFIRM_ABOVE_NODES):
        return
    what = f"{count(len(active), 'job')} on {count(nodes, 'node')}"
    if not output.is_interactive():
        raise UsageError(
            f"cancelling {what} needs a yes and nobody can be asked", hint="pass -y if you mean it"
        )
    names = ", ".join(f"{status.record.job_id} ({status.record.name})" for status in active)
    output.say(f"  jobs       {names}")
    output.confirm(f"Cancel {what}?", otherwise="nothing was cancelled")


def _tell(before: JobStatus) -> None:
    record, state = before.record, before.state.value
    if before.state.is_terminal:
        output.note(f"job {record.job_id} had ended: {state}")
        return
    spent = "" if before.elapsed_s is None else f" {clock(before.elapsed_s)}"
    output.answer(f"cancelled {record.job_id}  ({record.name}, was {state}{spent})")


def _object(before: JobStatus) -> dict[str, object]:
    return {
        "job_id": before.record.job_id,
        "name": before.record.name,
        "state_before": before.state.value,
        "cancelled": not before.state.is_terminal,
    }
