"""`prune`: remove the directories of old runs."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from clusterrun.backends import select
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.cli.shared import complete, output
from clusterrun.cli.shared.job_text import local_time, locate_announced
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.health.machine import gib
from clusterrun.rundir.create import remove_old
from clusterrun.rundir.record import JobRecord, list_records, read_again
from clusterrun.shared.checkpoint_files import listed
from clusterrun.shared.durations import parse_seconds
from clusterrun.shared.wording import count
from clusterrun.verbs.cancel import active_jobs
from clusterrun.verbs.find import own_runs

WhyKept = tuple[str, str]
"""Why a run is not removed; what to do."""

BY_HAND = "a link, or of another host, user or project", "remove the directory by hand"
ACTIVE = "perhaps active", "see clusterrun list; if it is over, remove the directory by hand"
SAVED = "with checkpoints", "pass --all to remove such runs too"
YOUNG = "too recent", "drop --older-than"


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=complete.jobs)
@click.option("--older-than", metavar="TIME", help="only runs that ended longer ago, e.g. 30d")
@click.option("-a", "--all", "everything", is_flag=True, help="also runs that saved checkpoints")
@click.option("--dry-run", is_flag=True, help="list the runs and their sizes; remove nothing")
@click.option("-y", "--yes", is_flag=True, help="do not ask for confirmation")
def command(
    jobs: tuple[str, ...], *, older_than: str | None, everything: bool, dry_run: bool, yes: bool
) -> None:
    """Remove old runs of this project.

    Remove the run directories, with logs and checkpoints, of the given runs, or of all that have
    ended. Keep runs that saved checkpoints: they can be resumed, or have the final weights. Files
    outside the run directory stay. Ask first; pass -y in scripts.

    JOB is a job id, the name of a run (the newest of that name) or a run directory.

    \b
    clusterrun prune --older-than 30d --dry-run
    """
    if (older_than or "").isdecimal():
        raise UsageError(f"--older-than {older_than} has no unit", hint=f"write {older_than}d")
    until = time.time() - (parse_seconds(older_than) if older_than else 0)
    records = [locate_announced(job) for job in jobs]
    records = records or list_records(own_runs(), with_damaged=True)
    found = _look(records, until, everything=everything)
    _report_kept(found, are_named=bool(jobs))
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
            deed, hint = f"removing {what}", "pass -y to remove without confirmation"
            output.confirm(f"Remove {what}?", deed, yes=hint, otherwise="nothing was removed")
    try:
        if not dry_run:  # a run may have been resumed while sizes were read
            again = _look([job.record for job in old], until, everything=everything)
            _report_kept(again, are_named=True)
            remove_old(own_runs(), [job.record.paths for job, _ in again])
    except OSError as error:
        hint = "correct this, and run clusterrun prune again"
        raise ClusterrunError("cannot remove all runs", cause=str(error), hint=hint) from error
    output.answer(f"{'would remove' if dry_run else 'removed'} {what}" if old else "no old runs")


def _look(
    found: Sequence[JobRecord], until: float, *, everything: bool
) -> list[tuple[JobStatus, WhyKept | None]]:
    """Return the status of runs, and why to keep them. Raises SchedulerUnreachableError."""
    known = {each.run_dir: read_again(each) for each in found if os.path.lexists(each.run_dir)}
    records = [*known.values()]
    active = active_jobs([each for each in records if each.job_id and not each.home])
    return [
        (job, _why_kept(job, active, until, everything=everything))
        for job in statuses(records, select.backend_of)
    ]


def _why_kept(
    job: JobStatus, active: set[str], until: float, *, everything: bool
) -> WhyKept | None:
    record, root, runs = job.record, job.record.paths.root, own_runs().root.resolve()
    is_there = root.resolve() == runs.joinpath(*root.absolute().parts[-2:])
    if record.home or not is_there or root.lstat().st_uid != os.getuid():
        return BY_HAND
    if record.is_damaged or not job.state.is_terminal or active.intersection(record.job_ids):
        return ACTIVE
    if _ended(job) > until:
        return YOUNG
    has_saved = job.has_checkpoint or any(record.paths.checkpoints_dir.glob("*"))
    has_saved |= job.failure is not None and job.failure.is_handled
    return SAVED if has_saved and not everything else None


def _report_kept(found: list[tuple[JobStatus, WhyKept | None]], *, are_named: bool) -> None:
    """Print which runs are kept, and why. Raises UsageError if the user has named one of them."""
    for job, kept in found if are_named else ():
        if kept:
            name = job.record.job_id or job.record.run_dir
            what = f"job {name} ({job.record.name}, {job.state.value})"
            hint = f"{kept[1]}; nothing is removed"
            raise UsageError(f"{what} is kept ({kept[0]})", hint=hint)
    reasons = Counter(kept for _, kept in found if kept and kept is not YOUNG)
    for kept, number in reasons.items():
        output.note(f"kept {count(number, 'run')} ({kept[0]}): {kept[1]}")


def _disk_bytes(root: Path) -> int:
    used = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                used += Path(folder, name).lstat().st_blocks * 512
    return used


def _ended(job: JobStatus) -> float:
    return job.end or job.record.age_key[0]
