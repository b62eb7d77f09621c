"""Measure a script at several world sizes: run each for a short time and read its reports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from clusterrun.advice.measured import Measured, measure, script_of, store
from clusterrun.backends import select
from clusterrun.backends.status import JobStatus
from clusterrun.config import Given, Resolved
from clusterrun.config.spec import Device, OnInterrupt, Strategy
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.estimates.speed import Point, Scaling
from clusterrun.launch.make import job_name
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunsDir
from clusterrun.rundir.plan import read_plan
from clusterrun.rundir.record import JobRecord, list_records
from clusterrun.shared.state import JobState
from clusterrun.verbs.render import Prepared, prepare
from clusterrun.verbs.status import wait
from clusterrun.verbs.submit import submit_prepared

WARM_UP: Final = 0.2  # share of step reports to skip: compilation, first allocations, first epoch
# A run may reach its time limit: its reports until then are used.
_MEASURED: Final = (JobState.COMPLETED, JobState.TIMEOUT)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One world, its run and its measurements; None if it has none."""

    nodes: int
    ranks: int
    ended: JobStatus | None
    measured: Measured | None

    @property
    def point(self) -> Point | None:
        """Return the point of the table; None if the run failed or reported too little."""
        found, ended = self.measured, self.ended
        if ended is None or found is None or found.step_s is None:
            return None
        return Point(
            nodes=self.nodes,
            ranks=self.ranks,
            step_s=found.step_s,
            steps=found.timed,
            job_id=ended.record.job_id,
            run_dir=ended.record.run_dir,
        )


def node_counts(text: str) -> tuple[int, ...]:
    """Read `1,2,4`. Raises UsageError unless there are two or more, in ascending order."""
    try:
        counts = tuple(map(int, text.split(",")))
    except ValueError:
        counts = ()
    if len(counts) < 2 or counts[0] < 1 or list(counts) != sorted(set(counts)):
        raise UsageError(
            f"--nodes: '{text}' is not two or more node counts, the smallest first",
            hint="pass --nodes 1,2,4",
        )
    return counts


def prepare_worlds(
    load: Callable[[Mapping[str, Any]], Resolved], counts: Sequence[int]
) -> tuple[Prepared, ...]:
    """Prepare a run for each number of nodes; `load` resolves a job with more settings.

    Each is called `NAME-scaling`, and stops at its time limit. Raises UsageError if the job can't
    run in one of the worlds.
    """
    each = [{"nodes": Given(value=str(count), flag="--nodes")} for count in counts]
    first = load(each[0])
    if first.spec.strategy is Strategy.NONE:
        raise UsageError(
            "--strategy none runs one process on any number of nodes",
            hint="measure --strategy ddp, or another that spans ranks",
        )
    same = {
        "name": Given(value=f"{job_name(first.spec)}-scaling", flag="clusterrun scaling"),
        "on_interrupt": Given(value=OnInterrupt.STOP.value, flag="clusterrun scaling"),
    }
    return tuple(prepare(load(same | nodes)) for nodes in each)


def started(
    worlds: Sequence[Prepared],
    *,
    argv: Sequence[str] = (),
    submitted: Callable[[JobRecord], None] = lambda _: None,
) -> Iterator[JobRecord]:
    """Yield the record of each run: on Slurm all are queued before the first is yielded.

    On this machine, which they share, each starts when it is requested. `submitted` is called
    for each. If a submission to Slurm fails, the jobs before it are cancelled. Raises what
    `submit_prepared` raises.
    """
    queued: list[JobRecord] = []
    has_queue = worlds[0].plan.cluster.scheduler.has_queue
    try:
        for world in worlds:
            queued.append(record := submit_prepared(world, argv=argv, is_shared=True))
            submitted(record)
            if not has_queue:
                yield record
    except Exception:  # Ctrl-C leaves queued jobs in the queue
        for record in queued if has_queue else ():
            with contextlib.suppress(ClusterrunError):
                select.backend_of(record).cancel(record.job_ids)
        raise
    if has_queue:
        yield from queued


def newest_runs(worlds: Sequence[Prepared]) -> Iterator[JobRecord | None]:
    """Yield the newest run of each world, with the same script and arguments; None without one."""
    records = list_records(_runs_dir(worlds))
    for world in worlds:
        yield next((record for record in records if _is_of(record, world.plan)), None)


def _is_of(record: JobRecord, plan: Plan) -> bool:
    ran = (record.name, record.nodes, record.procs_per_node, record.strategy, record.device)
    if ran != (plan.name, plan.nodes, plan.procs_per_node, plan.strategy.value, plan.device.value):
        return False
    try:
        old = read_plan(record.paths)
    except (OSError, ValueError):
        return False
    return (old.workdir, old.entry) == (plan.workdir, plan.entry)


def result_of(
    world: Prepared, record: JobRecord | None, *, released: Callable[[JobStatus], None]
) -> Result:
    """Wait for the end of a run, and read its reports."""
    ended, measured = None, None
    if record is not None:
        ended = wait(record, released=released)
        if ended.state in _MEASURED:
            measured = measure(ended.record.paths, warm_up=WARM_UP)
    plan = world.plan
    return Result(nodes=plan.nodes, ranks=plan.world_size, ended=ended, measured=measured)


def scaling_of(
    worlds: Sequence[Prepared], results: Sequence[Result], *, is_fixed_batch: bool
) -> Scaling | None:
    """Return the measured worlds, the smallest first; None if none was measured."""
    plan = worlds[0].plan
    points = [point for result in results if (point := result.point) is not None]
    ends = [result.ended.end or 0.0 for result in results if result.ended and result.point]
    if not points:
        return None
    return Scaling(
        script=script_of(worlds[0].resolved),
        strategy=plan.strategy.value,
        is_cpu=plan.device is Device.CPU,
        procs_per_node=plan.procs_per_node,
        is_fixed_batch=is_fixed_batch,
        measured_at=datetime.fromtimestamp(max(ends)).isoformat(timespec="seconds"),
        points=tuple(points),
    )


def stored(worlds: Sequence[Prepared], scaling: Scaling) -> Path:
    """Store a result beside the runs, for `plan`; return its path. Raises ClusterrunError."""
    path = _runs_dir(worlds).scaling(worlds[0].plan.name)
    store(path, scaling)
    return path


def _runs_dir(worlds: Sequence[Prepared]) -> RunsDir:
    return RunsDir(root=Path(worlds[0].plan.runs_dir))
