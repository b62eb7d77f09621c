"""Start the next attempt of a run that has ended, or a new run with its configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from clusterrun.backends import select
from clusterrun.backends.base import PerhapsSubmittedError
from clusterrun.backends.evidence import bad_nodes
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.config.choices import Strategy
from clusterrun.config.load import Given
from clusterrun.config.settings import Resolved
from clusterrun.errors import ClusterrunError, SchedulerUnreachableError, UsageError
from clusterrun.launch.plan import SIZE_FIELDS, Plan
from clusterrun.rendering.bundle import Bundle
from clusterrun.rundir import record as records
from clusterrun.rundir.create import write_config
from clusterrun.rundir.outcome import read_outcome
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.reading import read_plan
from clusterrun.rundir.record import JobRecord
from clusterrun.shared import checkpoint_files, files
from clusterrun.shared.checkpoint_files import ANY, Checkpoint, IncompleteError
from clusterrun.shared.hostlist import fold_hosts, parse_hostlist
from clusterrun.shared.locks import locked
from clusterrun.shared.state import JobState
from clusterrun.verbs.cancel import active_chain
from clusterrun.verbs.find import FORWARDED, Which, configuration, find_record, locate, own_runs
from clusterrun.verbs.render import Prepared, prepare
from clusterrun.verbs.submit import remember, submit_prepared

if TYPE_CHECKING:
    from clusterrun.verbs.job import Job

LATEST, SCRATCH = "latest", "scratch"
_STEP = re.compile(r"(?:step|checkpoint)-0{0,18}([0-9]{1,18})\Z")
_FIXED: Final = ("name", "run_dir")
_ANEW: Final = "start a new run: clusterrun resubmit accepts another name, directory or cluster"
_MOST_RUNS: Final = 20  # runs, for one that failed
_SIZES: Final = tuple(f"launch.{field}" for field in SIZE_FIELDS.values())
_WAITS: Final = ("slurm.dependency", "slurm.begin", "slurm.hold")


class Change(NamedTuple):
    """One setting before and after; None if it is unset."""

    key: str
    old: str | None
    new: str | None


class Changed(NamedTuple):
    """A run's new configuration, and how it differs."""

    resolved: Resolved
    changes: tuple[Change, ...]
    excluded: tuple[str, ...] = ()  # nodes that were found bad


class Resumption(NamedTuple):
    """A run that is ready to be resumed."""

    status: JobStatus
    prepared: Prepared  # without files if none changes
    start: StartPoint
    changed: Changed
    is_complete: bool  # the run is, and no change is requested
    force: bool  # it may seem to be active


def resume(job: Which | None = None, *, start: str = LATEST, **settings: Any) -> Job:
    """Resume a run that has ended; `settings` are fields of JobSpec to change (nodes=4).

    `start` is `latest`, `scratch` or `step-N`. Without changes, a completed run stays as it is.
    """
    from clusterrun.verbs.job import Job  # imports submitit, which most commands never need

    resumption = prepare_resume(job, start=start, flags=settings)
    return Job(resumption.status.record if resumption.is_complete else resume_prepared(resumption))


def prepare_resume(
    job: Which | None = None,
    start: str = LATEST,
    flags: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    exclude_bad: bool = False,
    force: bool = False,
) -> Resumption:
    """Decide how to resume a run; write nothing.

    `start` is `latest`, `scratch` or `step-N`; `force` resumes a run that seems to be active.
    Raises UsageError if that is impossible.
    """
    if not job:  # a forwarded command names its run in FORWARDED
        job = None if FORWARDED else newest_failed()
    record = find_record(job)
    status = _inactive_status(record, force=force)
    changed = changed_settings(record, flags or {}, overrides, exclude_bad=exclude_bad)
    prepared = None if changed.changes else _prepared_as_before(record, changed.resolved)
    prepared = prepared or prepare(changed.resolved, is_again=True)
    fixed = [f"{each.key} ({each.old})" for each in changed.changes if each.key in _FIXED]
    if prepared.plan.cluster is not record.cluster:
        fixed.append(f"cluster ({record.cluster.value})")
    if fixed:
        raise UsageError(f"run {record.run_id} can't change its {fixed[0]}", hint=_ANEW)
    is_complete = status.state.is_success and not changed.changes and start == LATEST
    if is_complete:
        point = StartPoint(checkpoint=checkpoint_files.newest(record.paths.checkpoints_dir)[0])
    else:  # without `trainer_resume`, records of a Trainer's checkpoints do not count
        names = checkpoint_files.ANY if prepared.plan.trainer_resume else checkpoint_files.OWN
        point = choose_start(record.paths, start, names)
        if point.checkpoint is not None:
            refuse_other_world(point.checkpoint, record, prepared.plan, changed.changes)
    return Resumption(status, prepared, point, changed, is_complete, force)


def changed_settings(
    record: JobRecord, flags: Mapping[str, Any], overrides: Sequence[str], *, exclude_bad: bool
) -> Changed:
    """Change settings; `exclude_bad`: exclude nodes the run blames. Raises ClusterrunError."""
    new = configuration(record, flags, overrides)
    bad = bad_nodes(record.paths) if exclude_bad and record.cluster.scheduler.can_lose_node else ()
    if bad:
        nodes = fold_hosts(parse_hostlist(",".join(filter(None, (new.spec.exclude, *bad)))))
        flags = {**flags, "exclude": Given(value=nodes, flag="--exclude-bad")}
        new = configuration(record, flags, overrides)
    before = {row.key: row.text for row in configuration(record).rows()}
    after = {row.key: row.text for row in new.rows()}
    changes = (Change(key, before.get(key), after.get(key)) for key in {**before, **after})
    return Changed(new, tuple(each for each in changes if each.old != each.new), bad)


def refuse_other_world(
    checkpoint: Checkpoint, record: JobRecord, plan: Plan, changes: Sequence[Change] = ()
) -> None:
    """Refuse shards saved by another world, strategy or parallel size. Raises UsageError."""
    if size := next((change for change in changes if change.key in _SIZES), None):
        saved = f"{checkpoint.path.name} was saved with {size.key} {size.old or 'not set'}"
        text = f"{saved}; its shards can't be read with {size.key} {size.new or 'not set'}"
        raise UsageError(text, hint="keep the parallel sizes, or start over with --from scratch")
    saved_by = str(checkpoint.settings.get("strategy") or record.strategy)
    sharded = {strategy.value for strategy in Strategy if strategy.stage > 0}
    has_shards = sharded & {saved_by, plan.strategy.value}
    is_same_size = checkpoint.world_size in (0, plan.world_size)  # 0: unknown
    if not has_shards or (is_same_size and saved_by == plan.strategy.value):
        return
    saved = f"{checkpoint.path.name} was saved by {checkpoint.world_size} ranks with {saved_by}"
    text = f"{saved}; it can't be read by {plan.world_size} ranks with {plan.strategy.value}"
    raise UsageError(text, hint="keep nodes, ranks and strategy, or start over with --from scratch")


def newest_failed() -> JobRecord | None:
    """Return this project's newest run that ended without completing; None for none."""
    known = records.list_records(own_runs(), _MOST_RUNS, of=lambda record: not record.is_smoke)
    found = statuses([record for record in known if record.job_id], select.backend_of)
    failed = (job.record for job in found if _is_over(job) and not job.state.is_success)
    return next(failed, None)


def _is_over(status: JobStatus) -> bool:
    """Return whether a job has ended, or the scheduler has forgotten it."""
    is_unknown = status.state is JobState.UNKNOWN and bool(status.record.job_id)
    return status.state.is_terminal or (is_unknown and not status.reason)  # with one, it is known


def resume_prepared(resumption: Resumption) -> JobRecord:
    """Start the next attempt; if that is refused, undo all of it. Raises ClusterrunError."""
    paths, plan = resumption.status.record.paths, resumption.prepared.plan
    resumption.prepared.refuse_problem()
    try:  # if two commands resume a run, the second finds an active job
        with locked(paths.resume_lock), ExitStack() as undo:
            record = _inactive_status(records.read(paths), force=resumption.force).record
            _write_files(resumption, undo)
            waits = any(row.key in _WAITS for row in resumption.changed.changes)
            try:  # `waits`: only if a dependency, begin or hold was changed now
                submission = select.backend_of(record).submit_again(plan, record, waits=waits)
            except PerhapsSubmittedError:
                undo.pop_all()  # a queued job needs the files
                raise
            undo.pop_all()  # submitted: keep the files

            def resumed(now: JobRecord) -> JobRecord:
                new = records.continued_by(now, submission.job_id)
                changes = {**records.shape(plan), "chain_length": 0, "resumed_at": time.time()}
                return dataclasses.replace(new, **changes)

            record = remember(paths, submission.job_id, resumed)
    except OSError as error:
        raise ClusterrunError(f"cannot write to {paths.root}", cause=str(error)) from error
    return record


def _inactive_status(record: JobRecord, *, force: bool) -> JobStatus:
    """Return the status of a run that is over. Raises UsageError, SchedulerUnreachableError."""
    chained: list[str] = []
    ignored = [SchedulerUnreachableError] if force else []
    with contextlib.suppress(*ignored):
        if record.job_id:  # files that report an end can't report a requeue
            backend = select.backend_of(record)
            backend.query([record.job_id], since=record.submitted_at, max_age_s=0)  # it may raise
        chained = active_chain(record)
    (status,) = statuses([record], select.backend_of)
    job_id, state = record.job_id, status.state
    if force or (_is_over(status) and not chained):
        return status
    if chained:
        text = f"job {chained[0]} is the next in a chain and will continue the run"
        raise UsageError(text, hint=f"end the chain first: clusterrun cancel {job_id}")
    why = f" ({status.reason})" if status.reason else ""
    hint = f"end it first: clusterrun cancel {job_id}; --force resumes anyway"
    if not job_id:
        hint = "wait for its job id: clusterrun list; --force resumes anyway"
    elif state is JobState.COMPLETING:
        hint = f"wait for its end: clusterrun status {job_id} --wait"
    what = f"job {job_id}" if job_id else f"the submission of run {record.run_id}"
    text = f"{what} is still {state.value}{why}; two jobs would write to one run directory"
    raise UsageError(text, hint=hint)


def _prepared_as_before(record: JobRecord, resolved: Resolved) -> Prepared | None:
    """Return a run with its stored plan; None if this version or these hosts need a new plan."""
    try:
        plan = read_plan(record.paths)
    except OSError as error:
        raise ClusterrunError(f"cannot read {record.paths.plan}", cause=str(error)) from error
    except ValueError:
        return None  # another version of clusterrun has written it
    if not plan.cluster.scheduler.outlives_shell:
        return None  # this allocation has other hosts
    return Prepared(resolved=resolved, plan=plan, bundle=Bundle(files={}))


def _write_files(resumption: Resumption, undo: ExitStack) -> None:
    """Move and write the files of the next attempt; `undo` reverts all of it."""
    paths, last = resumption.status.record.paths, resumption.status.attempt
    paths.attempt(last).mkdir(mode=0o700, parents=True, exist_ok=True)
    if newer := resumption.start.newer:  # the script would resume from one of these
        directory = paths.checkpoints_dir / f"set-aside-{time.strftime('%Y%m%d-%H%M%S')}"
        directory.mkdir(mode=0o700)
        undo.callback(directory.rmdir)
        for path in newer:
            moved = path.rename(directory / path.name)
            undo.callback(moved.rename, path)
    if resumption.prepared.bundle.files:
        _replace_config(paths, resumption.prepared.bundle, last, undo)
    earlier = paths.earlier_end(last)
    if paths.end.exists():
        paths.end.rename(earlier)
        undo.callback(earlier.rename, paths.end)
    elif not earlier.exists():  # the conductor was killed before it wrote the end
        files.create(earlier)  # it also tells that the run was resumed
        undo.callback(earlier.unlink)


def _replace_config(paths: RunPaths, bundle: Bundle, last: int, undo: ExitStack) -> None:
    """Replace the run's files with those of a bundle; store the old ones with their attempt."""
    kept = paths.earlier_config(last)
    kept.mkdir(mode=0o700, exist_ok=True)
    for path in paths.config_files:
        if path.exists():
            text = files.read_whole(path).decode("utf-8", "surrogateescape")
            undo.callback(write_config, path, text)
            if not (kept / path.name).exists():  # else a resume without an attempt did so
                write_config(kept / path.name, text)
        if path.name in bundle.files:
            write_config(path, bundle.files[path.name])
        else:
            path.unlink(missing_ok=True)


class StartPoint(NamedTuple):
    """Where a run is resumed."""

    checkpoint: Checkpoint | None  # complete; None: the run starts from the beginning
    passed_over: tuple[str, ...] = ()  # newer ones that can't be used, each with the reason
    newer: tuple[Path, ...] = ()  # that the training would prefer


def choose_start(paths: RunPaths, text: str, names: re.Pattern[str] = ANY) -> StartPoint:
    """Find the checkpoint `latest` (one of `names`), `scratch` or `step-N`. Raises UsageError."""
    if text == SCRATCH:
        listed = checkpoint_files.listed(paths.checkpoints_dir, ANY)
        return StartPoint(checkpoint=None, newer=tuple(path for _, path in listed))
    if text == LATEST:
        found, notes = checkpoint_files.newest(paths.checkpoints_dir, names)
        last = read_outcome(paths, paths.newest_attempt())
        if found is None and not (last and last.is_handled):  # else the script finds its own
            what = f"there is no complete checkpoint in {paths.checkpoints_dir}"
            hint = "start the script from the beginning with --from scratch"
            raise UsageError(what, cause="\n".join(notes) or None, hint=hint)
        return StartPoint(checkpoint=found, passed_over=tuple(notes))
    if (match := _STEP.match(text)) is None:
        raise UsageError(f"'{text}' is not latest, scratch or step-N", hint="write e.g. step-100")
    step = int(match[1])
    listed = checkpoint_files.listed(paths.checkpoints_dir, names)
    named = next((path for found, path in listed if found == step), None)
    if named is None:
        known = ", ".join(f"step-{found}" for found, _ in listed)
        hint = f"use one of: {known}" if known else "use --from scratch: there is no checkpoint"
        raise UsageError(f"there is no checkpoint of step {step} in this run", hint=hint)
    try:
        checkpoint = checkpoint_files.read(named)
    except IncompleteError as problem:
        raise UsageError(f"checkpoint {named.name} is incomplete", cause=str(problem)) from problem
    newer = tuple(path for found, path in listed if found > step)
    return StartPoint(checkpoint=checkpoint, newer=newer)


def resubmit(job: Which | None = None, **settings: Any) -> Job:
    """Start a new run with the configuration of an earlier one; `settings` as for `resume`."""
    from clusterrun.verbs.job import Job  # imports submitit, which most commands never need

    changed = changed_settings(locate(job), settings, (), exclude_bad=False)
    return Job(submit_prepared(prepare(changed.resolved, is_again=True)))
