"""`cancel`: cancel jobs; a job that has already ended is not an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import click

from clusterrun.backends.evidence import read_evidence
from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared import complete, output
from clusterrun.cli.shared.job_text import find_all_announced
from clusterrun.errors import Exit, UsageError
from clusterrun.shared.durations import clock, parse_seconds
from clusterrun.shared.wording import count
from clusterrun.verbs import cancel
from clusterrun.verbs.find import is_elsewhere

DEFAULT: Final = "5m"
LOOK_S: Final = 3.0  # by then the agents have written their reports


@click.command()
@click.argument("jobs", nargs=-1, metavar="JOB...", shell_complete=complete.active_jobs)
@click.option("--checkpoint", is_flag=True, help="let the ranks save a checkpoint first")
@click.option(
    "--timeout",
    metavar="TIME",
    help=f"wait this long for the checkpoint, e.g. 90s or 10m  [default: {DEFAULT}]",
)
@click.option("-y", "--yes", is_flag=True, help="do not ask for confirmation")
@output.json_option
def command(
    jobs: tuple[str, ...],
    *,
    checkpoint: bool,
    timeout: str | None,
    yes: bool,
    as_json: bool,
) -> Exit:
    """Cancel jobs.

    JOB is a job id, the name of a run (the newest of that name) or a run directory. If it is part
    of a chain, cancel the whole chain. Ask before cancelling several jobs, or a job on more than 64
    nodes; pass -y in scripts.

    With --checkpoint, a running job ends when its ranks have saved, or at the timeout. The exit
    status is 3 if a job ended without a checkpoint. Ranks with a signal handler of their own get
    its signal. If no rank has one or calls runtime.should_checkpoint(), the job ends after a
    minute, or after --timeout. Ctrl-C stops waiting; the ranks still save and exit.

    \b
    clusterrun cancel 4711
    clusterrun cancel --checkpoint --timeout 10m 4711
    """
    if timeout is not None and not checkpoint:
        raise UsageError("--timeout requires --checkpoint", hint="pass both, or drop --timeout")
    timeout_s = parse_seconds(timeout or DEFAULT)
    found = cancel.look_before_cancel(*(find_all_announced(jobs) if all(jobs) else jobs))
    _confirm([status for status in found if not status.state.is_terminal], yes=yes)
    unheard_s = timeout_s if timeout else min(cancel.UNHEARD_S, timeout_s)
    saved = _let_leave(found, timeout_s, unheard_s) if checkpoint else {}
    cancel.end_now(found if not saved else cancel.look_before_cancel(*(b.record for b in found)))
    completed = [before for before in found if cancel.has_completed(before.record)]
    if as_json:
        objects = [
            {
                "job_id": before.record.job_id,
                "name": before.record.name,
                "state_before": before.state.value,
                "cancelled": not before.state.is_terminal and before not in completed,
                "chained": before.record.chained_job_ids,
                "saved": saved.get(before.record.job_id) or None,
            }
            for before in found
        ]
        output.answer_json({"schema": "clusterrun.cancel/1", "jobs": objects})
    else:
        for before in found:
            _print_cancelled(before, completed=before in completed)
    return Exit.NO if None in saved.values() else Exit.OK


def _let_leave(found: list[JobStatus], timeout_s: int, unheard_s: float) -> dict[str, str | None]:
    """Let the ranks save and exit, wait for them, and return each job's new checkpoint.

    A job that completed instead is left out.
    """
    asked_at = time.time()
    active = [before for before in found if not before.state.is_terminal]
    asked = [before for before in active if cancel.ask_to_leave(before)]
    try:
        for before in active:
            job = f"job {before.record.job_id}"
            if before in asked:
                output.say(f"asked {job} to save a checkpoint, waiting up to {clock(timeout_s)}")
            else:
                output.note(f"{job} is not running; there is nothing to save")
        watch = _progress(unheard_s)
        cancel.wait_until_left(asked, timeout_s=timeout_s, unheard_s=unheard_s, watch=watch)
    except KeyboardInterrupt:
        names = ", ".join(before.record.job_id for before in asked)
        output.say_interrupted(f"stopped waiting for {names}; the ranks still save and exit")
        raise
    left = (before for before in asked if not cancel.has_completed(before.record))
    return {before.record.job_id: _print_saved(before, asked_at) for before in left}


def _progress(unheard_s: float) -> Callable[[Sequence[JobStatus]], None]:
    """Return what shows that jobs are waited for, and tells once what keeps ranks from saving."""
    begin = time.monotonic()
    warned: set[tuple[str, str]] = set()

    def watch(waiting: Sequence[JobStatus]) -> None:
        spent_s = time.monotonic() - begin
        if waiting:
            names = ", ".join(before.record.job_id for before in waiting)
            output.move(f"waiting for the checkpoint of job {names}", spent_s)
        for before in waiting if spent_s >= LOOK_S else ():
            job_id, found = before.record.job_id, read_evidence(before.record.paths)
            if not found.unsaved or (job_id, found.unsaved) in warned:
                continue
            warned.add((job_id, found.unsaved))
            notes = [f"to end it now, run: clusterrun cancel {job_id}"]
            if found.is_unheard:
                ends = f"without a call, the job ends after {clock(unheard_s)} (--timeout)"
                notes[:0] = ["ranks that are still starting save at their first call", ends]
            output.warn(f"job {job_id}: {found.unsaved}", notes=notes)

    return watch


def _print_saved(before: JobStatus, asked_at: float) -> str | None:
    """Print which checkpoint was written since then, and return its path; "" if unknown."""
    path, at, is_last = cancel.saved_since(before, asked_at)
    job = f"job {before.record.job_id}"
    if path is None and is_last:
        output.say(f"{job} has ended by its script's own signal handler")
        return ""
    if path is None or not is_last:
        what = f"written no new checkpoint; the newest is {path}" if path else "no checkpoint"
        output.warn(f"{job} has {what}")
        return None
    output.say(f"checkpoint {path} written after {clock(at - asked_at)}")
    return str(path)


def _confirm(active: list[JobStatus], *, yes: bool) -> None:
    nodes = sum(status.record.nodes for status in active)
    if yes or (len(active) <= 1 and nodes <= output.CONFIRM_ABOVE_NODES):
        return
    what = f"{count(len(active), 'job')} on {count(nodes, 'node')}"
    names = ", ".join(f"{status.record.job_id} ({status.record.name})" for status in active)
    output.confirm(
        f"  jobs       {names}\nCancel {what}?",
        f"cancelling {what}",
        yes="pass -y to cancel without confirmation",
        otherwise="nothing was cancelled",
    )


def _print_cancelled(before: JobStatus, *, completed: bool) -> None:
    record, state = before.record, before.state.value
    if before.state.is_terminal:
        output.note(f"job {record.job_id} had already ended: {state}")
    elif completed:
        output.note(f"job {record.job_id} completed before it could be cancelled")
    else:
        spent = "" if before.elapsed_s is None else f" {clock(before.elapsed_s)}"
        where = f", in {record.workdir}" if is_elsewhere(record) else ""
        output.answer(f"cancelled {record.job_id}  ({record.name}, was {state}{spent}{where})")
