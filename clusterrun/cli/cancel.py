"""`cancel`: cancel jobs; one that has ended is no error. `prune`: remove the files of old runs."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import click

from clusterrun.backends import select
from clusterrun.backends.evidence import read_evidence
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.cli.shared import complete, output
from clusterrun.cli.shared.job_view import find_all_announced, local_time, locate_announced
from clusterrun.errors import ClusterrunError, Exit, UsageError
from clusterrun.rundir.create import remove_old
from clusterrun.rundir.record import JobRecord, list_records, read_again
from clusterrun.shared.amounts import clock, parse_seconds
from clusterrun.shared.checkpoint_files import listed
from clusterrun.shared.wording import count
from clusterrun.verbs import cancel
from clusterrun.verbs.find import is_of_other_project, own_runs

DEFAULT: Final = "5m"
WARN_S: Final = 3.0  # by then the agents have written why ranks do not save


@click.command()
@click.argument("jobs", nargs=-1, metavar="JOB...", shell_complete=complete.jobs)
@click.option("--checkpoint", is_flag=True, help="let the ranks save a checkpoint first")
@click.option(
    "--timeout",
    metavar="TIME",
    help=f"wait this long for the checkpoint, e.g. 90s or 10m  [default: {DEFAULT}]",
)
@click.option("-y", "--yes", is_flag=True, help="do not ask for confirmation")
@output.json_option
def command(
    jobs: tuple[str, ...], *, checkpoint: bool, timeout: str | None, yes: bool, as_json: bool
) -> Exit:
    """Cancel jobs.

    JOB is a job id, the name of a run (the newest of that name) or a run directory. If the job is
    part of a chain, the whole chain is cancelled. cancel asks before it ends several jobs, or a job
    on more than 64 nodes; pass -y in scripts.

    With --checkpoint, a running job ends when its ranks have saved, or at the timeout. The exit
    status is 3 if a job ended without a checkpoint. Ranks that handle SIGTERM, SIGUSR1 or SIGUSR2
    are sent that signal. If no rank does so or calls runtime.should_checkpoint(), the job ends
    after --timeout if given, else a minute. Ctrl-C stops waiting; the ranks still save and exit.

    \b
    clusterrun cancel 4711
    clusterrun cancel --checkpoint --timeout 10m 4711
    """
    if timeout is not None and not checkpoint:
        raise UsageError("--timeout requires --checkpoint", hint="pass both or neither")
    timeout_s = parse_seconds(timeout or DEFAULT)
    # An empty word, as of an unset variable, is refused by `jobs_to_cancel`.
    found = cancel.jobs_to_cancel(*(find_all_announced(jobs) if all(jobs) else jobs))
    _confirm([before for before in found if not before.state.is_terminal], yes=yes)
    # How long to wait for ranks that never called should_checkpoint(): a --timeout also holds here.
    unheard_s = timeout_s if timeout else min(cancel.UNHEARD_S, timeout_s)
    saved = _save_first(found, timeout_s, unheard_s) if checkpoint else {}
    current = cancel.jobs_to_cancel(*(before.record for before in found)) if saved else found
    cancel.end_now(current)
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


def _save_first(found: list[JobStatus], timeout_s: int, unheard_s: float) -> dict[str, str | None]:
    """Let the ranks save and exit, and return the path of the new checkpoint of each job id.

    None: the job saved none. "": the script's own signal handler may have saved one. A job that
    completed instead is left out. `unheard_s` is for ranks that never called should_checkpoint().
    """
    asked_at = time.time()
    active = [before for before in found if not before.state.is_terminal]
    asked = [before for before in active if cancel.ask_to_save_and_exit(before)]
    try:
        for before in active:
            job = f"job {before.record.job_id}"
            if before in asked:
                output.say(f"asked {job} to save a checkpoint, waiting up to {clock(timeout_s)}")
            else:
                output.note(f"{job} is not running; there is nothing to save")
        _wait_and_warn(asked, timeout_s, unheard_s)
    except KeyboardInterrupt:
        names = ", ".join(before.record.job_id for before in asked)
        output.say_interrupted(f"stopped waiting for {names}; the ranks still save and exit")
        raise
    cancelled = (before for before in asked if not cancel.has_completed(before.record))
    return {before.record.job_id: _print_saved(before, asked_at) for before in cancelled}


def _wait_and_warn(asked: Sequence[JobStatus], timeout_s: float, unheard_s: float) -> None:
    """Wait until the ranks of jobs have exited; warn once of each reason why ranks do not save."""
    begin, warned = time.monotonic(), set[tuple[str, str]]()
    for waiting in cancel.await_exits(asked, timeout_s=timeout_s, unheard_s=unheard_s):
        spent_s = time.monotonic() - begin
        names = ", ".join(before.record.job_id for before in waiting)
        output.show_progress(f"waiting for the checkpoint of job {names}", spent_s)
        overdue = waiting if spent_s >= WARN_S else []
        for before in overdue:
            job_id, evidence = before.record.job_id, read_evidence(before.record.paths)
            if not evidence.unsaved or (job_id, evidence.unsaved) in warned:
                continue
            warned.add((job_id, evidence.unsaved))
            notes = [f"to end it now, run: clusterrun cancel {job_id}"]
            if evidence.is_unheard:  # no rank has called should_checkpoint()
                end = f"without such a call, the job ends after {clock(unheard_s)} (--timeout)"
                notes = ["ranks that are still starting save when they first call it", end, *notes]
            output.warn(f"job {job_id}: {evidence.unsaved}", notes=notes)


def _print_saved(before: JobStatus, asked_at: float) -> str | None:
    """Print which checkpoint a job has saved since `asked_at`; return it as `_save_first` does."""
    path, saved_at, has_exited = cancel.newest_checkpoint(before, asked_at)
    job = f"job {before.record.job_id}"
    if path is None and has_exited:
        output.say(f"{job} ended in its script's own signal handler")
        return ""
    if path is None or not has_exited:
        what = f"written no new checkpoint; the newest is {path}" if path else "no checkpoint"
        output.warn(f"{job} has {what}")
        return None
    output.say(f"checkpoint {path} written after {clock(saved_at - asked_at)}")
    return str(path)


def _confirm(active: list[JobStatus], *, yes: bool) -> None:
    """Ask before cancelling several jobs, or any on many nodes."""
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
        where = f", in {record.workdir}" if is_of_other_project(record) else ""
        output.answer(f"cancelled {record.job_id}  ({record.name}, was {state}{spent}{where})")


class WhyKept(NamedTuple):
    """Why a run is not removed, and what to do."""

    reason: str
    advice: str


BY_HAND = WhyKept("a link, or from another host, user or project", "remove the directory by hand")
PERHAPS_ACTIVE = WhyKept(
    "perhaps active", "see clusterrun list; if the run has ended, remove the directory by hand"
)
SAVED = WhyKept("with checkpoints", "pass --all to remove such runs too")
YOUNG = WhyKept("too recent", "leave out --older-than")


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=complete.jobs)
@click.option("--older-than", metavar="TIME", help="remove runs that ended over TIME ago, e.g. 30d")
@click.option("-a", "--all", "everything", is_flag=True, help="also remove runs with checkpoints")
@click.option("--dry-run", is_flag=True, help="list the runs and their sizes, and remove nothing")
@click.option("-y", "--yes", is_flag=True, help="do not ask for confirmation")
def prune_command(
    jobs: tuple[str, ...], *, older_than: str | None, everything: bool, dry_run: bool, yes: bool
) -> None:
    """Remove old runs of this project.

    Remove the run directories of the given runs, or of all runs that have ended. Runs with
    checkpoints are kept unless you pass --all: you may want to resume them or need their final
    weights. Files outside the run directory are kept. prune asks first; pass -y in scripts.

    JOB is a job id, the name of a run (the newest of that name) or a run directory.

    \b
    clusterrun prune --older-than 30d --dry-run
    """
    if (older_than or "").isdecimal():
        raise UsageError(f"--older-than {older_than} has no unit", hint=f"write {older_than}d")
    from clusterrun.health.machine import gib  # imports psutil

    ended_by = time.time() - (parse_seconds(older_than) if older_than else 0)
    records = [locate_announced(job) for job in jobs]
    records = records or list_records(own_runs(), with_damaged=True)
    found = _with_why_kept(records, ended_by, removes_saved=everything)
    _report_kept(found, refuse=bool(jobs))
    old = [job for job, kept in found if kept is None]
    sizes = [_disk_bytes(job.record.paths.root) for job in old]
    what = f"{count(len(old), 'run')}, {gib(sum(sizes))}"
    if old:
        rows = [
            (
                *(job.record.job_id, job.record.name, job.state.value, local_time(_ended(job))),
                *(str(len(listed(job.record.paths.checkpoints_dir)) or "-"), gib(size)),
            )
            for job, size in zip(old, sizes, strict=True)
        ]
        head = ("JOB", "NAME", "STATE", "ENDED", "CHECKPOINTS", "SIZE")
        output.answer_table(head, rows, spare=("ENDED", "CHECKPOINTS", "NAME"))
        if not (dry_run or yes):
            action, hint = f"removing {what}", "pass -y to remove without confirmation"
            output.confirm(f"Remove {what}?", action, yes=hint, otherwise="nothing was removed")
    try:
        if not dry_run:  # a run may have been resumed while sizes were read
            again = _with_why_kept([job.record for job in old], ended_by, removes_saved=everything)
            _report_kept(again, refuse=True)
            remove_old(own_runs(), [job.record.paths for job, _ in again])
    except OSError as error:
        hint = "correct the cause, and run clusterrun prune again"
        raise ClusterrunError("not all runs were removed", cause=str(error), hint=hint) from error
    output.answer(f"{'would remove' if dry_run else 'removed'} {what}" if old else "no old runs")


def _with_why_kept(
    found: Sequence[JobRecord], ended_by: float, *, removes_saved: bool
) -> list[tuple[JobStatus, WhyKept | None]]:
    """Return the status of runs, and why to keep them. Raises SchedulerUnreachableError."""
    existing = {each.run_dir: read_again(each) for each in found if os.path.lexists(each.run_dir)}
    records = [*existing.values()]  # each run once
    # A run of another host is kept in any case; without an id, no scheduler knows a job.
    active = cancel.active_jobs([each for each in records if each.job_id and not each.home])
    return [
        (job, _why_kept(job, active, ended_by, removes_saved=removes_saved))
        for job in statuses(records, select.backend_of)
    ]


def _why_kept(
    job: JobStatus, active: set[str], ended_by: float, *, removes_saved: bool
) -> WhyKept | None:
    """Return why to keep a run; None if it may be removed. `active` has the ids of active jobs."""
    record, root, runs = job.record, job.record.paths.root, own_runs().root.resolve()
    # A run is NAME/RUN_ID in the directory of runs; a link may lead elsewhere.
    is_in_place = root.resolve() == runs.joinpath(*root.absolute().parts[-2:])
    if record.home or not is_in_place or root.lstat().st_uid != os.getuid():  # home: elsewhere
        return BY_HAND
    may_run = not job.state.is_terminal or active.intersection(record.job_ids)  # e.g. requeued
    if record.is_damaged or may_run:  # a damaged record names no jobs, so one may run
        return PERHAPS_ACTIVE
    if _ended(job) > ended_by:
        return YOUNG
    has_saved = job.has_checkpoint or any(record.paths.checkpoints_dir.glob("*"))
    has_saved |= job.failure is not None and job.failure.is_handled  # perhaps by the script itself
    return SAVED if has_saved and not removes_saved else None


def _report_kept(found: list[tuple[JobStatus, WhyKept | None]], *, refuse: bool) -> None:
    """Print how many runs are kept, and why; with `refuse`, raise UsageError for the first."""
    for job, kept in found:
        if kept and refuse:
            name = job.record.job_id or job.record.run_dir
            what = f"job {name} ({job.record.name}, {job.state.value})"
            hint = f"nothing was removed; {kept.advice}"
            raise UsageError(f"{what} is kept ({kept.reason})", hint=hint)
    # YOUNG needs no note: --older-than asked for it.
    reasons = Counter(kept for _, kept in found if kept and kept is not YOUNG)
    for kept, number in reasons.items():
        output.note(f"kept {count(number, 'run')} ({kept.reason}): {kept.advice}")


def _disk_bytes(root: Path) -> int:
    used = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                used += 512 * Path(folder, name).lstat().st_blocks  # as stat() counts them
    return used


def _ended(job: JobStatus) -> float:
    return job.end or job.record.age_key[0]
