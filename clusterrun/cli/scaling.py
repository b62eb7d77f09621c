"""`scaling`: measure a script in worlds of several sizes, and read the reports of each run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from clusterrun.advice.question import SCHEMA, measure, script_of, store, to_object
from clusterrun.backends import select
from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared import output, submission
from clusterrun.cli.shared.help import under
from clusterrun.cli.shared.job_view import failure_text
from clusterrun.cli.shared.options import JobOptions, ScriptCommand, job_options, yes_option
from clusterrun.config.choices import Device, OnInterrupt
from clusterrun.config.load import Given
from clusterrun.errors import ClusterrunError, Exit, UsageError
from clusterrun.estimates.speed import Point, Scaling
from clusterrun.launch.make import job_name
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunsDir
from clusterrun.rundir.reading import read_plan
from clusterrun.rundir.record import JobRecord, list_records
from clusterrun.shared.state import JobState
from clusterrun.shared.wording import count
from clusterrun.verbs.render import Prepared, prepare
from clusterrun.verbs.status import wait
from clusterrun.verbs.submit import submit_prepared

HEAD = ("NODES", "RANKS", "STEP", "STEPS/S", "SPEED-UP", "EFFICIENCY", "COMMUNICATION", "JOB")
WARM_UP: Final = 0.2  # share of step reports to skip: compilation, first allocations, first epoch
# A run may reach its time limit: its reports until then are used.
_MEASURED: Final = (JobState.COMPLETED, JobState.TIMEOUT)


@click.command(cls=ScriptCommand)
@job_options(without=("nodes",))
@under("Measurement")(
    "counts",
    "-N",
    "--nodes",
    metavar="N,N,...",
    help="run once for each of these node counts, e.g. 1,2,4",
)
@click.option(
    "--fixed-batch",
    is_flag=True,
    help="assume the same effective batch for all node counts (strong scaling)",
)
@click.option("--collect", is_flag=True, help="submit nothing and report the newest runs")
@output.json_option
@yes_option
def command(
    job: JobOptions,
    *,
    counts: str | None,
    fixed_batch: bool,
    collect: bool,
    as_json: bool,
    yes: bool,
) -> Exit:
    """Measure how a script scales across nodes.

    Submit one short run, named NAME-scaling, for each node count. The script should run for at
    least half a minute and must report its steps with clusterrun.runtime.step; a Trainer reports
    them itself. The first fifth of the reports is ignored. On Slurm, the queued runs may overlap,
    so they must not write to the same directory; on this machine, they run one after another.

    The speed-up compares samples per second with the smallest world; the efficiency is its share of
    the ideal speed-up. Communication is the share of time lost to communication and to waiting for
    the slowest rank. By default, each rank is assumed to keep its batch; pass --fixed-batch if the
    script divides a fixed batch among the ranks.

    clusterrun plan uses the result. Ctrl-C leaves the jobs running; --collect reports them later.

    \b
    clusterrun scaling --nodes 1,2,4 --gpus-per-node 8 --time 30 train.py --max-steps 300
    """
    nodes = node_counts(counts or "")
    worlds = prepare_worlds(job, nodes)
    submission.print_notes(worlds[-1])
    if worlds[-1].plan.cluster.scheduler.is_this_machine:
        output.note("simulated nodes share this machine: the table does not apply to real nodes")
    submission.confirm_size(worlds[-1].plan, yes=yes or collect)
    results = _wait_for_runs(worlds, newest_runs(worlds) if collect else start_runs(worlds))
    scaling = scaling_of(worlds, results, is_fixed_batch=fixed_batch)
    _show(results, scaling, as_json=as_json)
    if scaling is not None and len(scaling.points) > 1:
        path = RunsDir(root=Path(worlds[0].plan.runs_dir)).scaling(worlds[0].plan.name)
        store(path, scaling)  # for `plan`
        output.detail("stored", str(path))
    return Exit.OK if all(result.point for result in results) else Exit.FAILED


def _wait_for_runs(worlds: Sequence[Prepared], runs: Iterable[JobRecord | None]) -> list[Result]:
    """Wait for each run and return the results; without a queue, taking a run starts it."""
    results: list[Result] = []
    try:
        for world, record in zip(worlds, runs, strict=True):
            ended = wait(record) if record else None
            results.append(_result_of(world.plan, ended))
            if ended is not None:
                output.say(f"job {ended.record.job_id} {output.painted_state(ended.state.value)}")
    except KeyboardInterrupt:
        output.say_interrupted("submitted jobs keep running")
        output.say("  run the same command with --collect to wait for them and print the table")
        raise
    return results


class Result(NamedTuple):
    """One world, its run, and its point of the table, or why it has none."""

    plan: Plan
    ended: JobStatus | None
    point: Point | None = None
    why: str = ""


def _result_of(plan: Plan, ended: JobStatus | None) -> Result:
    """Read what the run of a world has measured."""
    if ended is None:
        why = "no run with this script and arguments was found"
        return Result(plan, None, why=f"{why}; run the same command without --collect")
    job, measured = f"job {ended.record.job_id}", measure(ended.record.paths, warm_up=WARM_UP)
    if ended.state not in _MEASURED:
        failure = failure_text(ended.failure) if ended.failure else ended.reason
        why = ": ".join(filter(None, (f"{job} is {ended.state.value}", failure)))
    elif measured.steps is None:
        why = f"{job} reported no steps: call clusterrun.runtime.step(step, total) in the script"
    elif measured.step_s is None:
        why = f"{job} was too short to measure; train longer, e.g. with a higher --max-steps"
    else:
        point = Point(
            nodes=plan.nodes,
            ranks=plan.world_size,
            step_s=measured.step_s,
            steps=measured.timed,
            job_id=ended.record.job_id,
            run_dir=ended.record.run_dir,
        )
        return Result(plan, ended, point)
    return Result(plan, ended, why=why)


def node_counts(text: str) -> tuple[int, ...]:
    """Read `1,2,4`. Raises UsageError unless there are two or more, in ascending order."""
    try:
        counts = tuple(map(int, text.split(",")))
    except ValueError:
        counts = ()
    if len(counts) < 2 or counts[0] < 1 or list(counts) != sorted(set(counts)):
        wrong = f"--nodes: '{text}' is not two or more node counts, the smallest first"
        raise UsageError(wrong, hint="pass --nodes 1,2,4")
    return counts


def prepare_worlds(job: JobOptions, counts: Sequence[int]) -> tuple[Prepared, ...]:
    """Prepare NAME-scaling for each number of nodes; it stops at its limit. Raises UsageError."""
    sizes = [{"nodes": Given(value=str(nodes), flag="--nodes")} for nodes in counts]
    first = job.with_flags(sizes[0]).load()  # for its name
    common = {
        "name": Given(value=f"{job_name(first.spec)}-scaling", flag="clusterrun scaling"),
        "on_interrupt": Given(value=OnInterrupt.STOP.value, flag="clusterrun scaling"),
    }
    return tuple(prepare(job.with_flags(common | size).load()) for size in sizes)


def start_runs(worlds: Sequence[Prepared]) -> Iterator[JobRecord]:
    """Start runs, and yield the record of each. Raises what `submit_prepared` raises.

    On Slurm, all are queued before the first is yielded; if a submission fails, the jobs before it
    are cancelled. On this machine, which the runs share, each starts when it is requested.
    """
    submitted, argv = list[JobRecord](), ("clusterrun", *sys.argv[1:])
    has_queue = worlds[0].plan.cluster.scheduler.has_queue
    try:
        for world in worlds:
            submitted.append(record := submit_prepared(world, argv=argv, is_shared=True))
            ranks = f"{count(record.nodes, 'node')} x {count(record.procs_per_node, 'rank')}"
            output.say(f"Submitted batch job {record.job_id}: {ranks}")
            if not has_queue:
                yield record
    except Exception:  # Ctrl-C leaves queued jobs in the queue
        for record in submitted if has_queue else ():
            with contextlib.suppress(ClusterrunError):
                select.backend_of(record).cancel(record.job_ids)
        raise
    if has_queue:
        yield from submitted


def newest_runs(worlds: Sequence[Prepared]) -> Iterator[JobRecord | None]:
    """Yield the newest run of each world, with the same script and arguments; None without one."""
    records = list_records(RunsDir(root=Path(worlds[0].plan.runs_dir)))
    for world in worlds:
        yield next((record for record in records if _is_run_of(record, world.plan)), None)


def _is_run_of(record: JobRecord, plan: Plan) -> bool:
    """Return whether a run is of this world: its size, script and arguments."""
    ran = (record.name, record.nodes, record.procs_per_node, record.strategy, record.device)
    if ran != (plan.name, plan.nodes, plan.procs_per_node, plan.strategy.value, plan.device.value):
        return False
    try:
        old = read_plan(record.paths)
    except (OSError, ValueError):
        return False
    return (old.workdir, old.entry) == (plan.workdir, plan.entry)


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


def _show(results: Sequence[Result], scaling: Scaling | None, *, as_json: bool) -> None:
    """Print a table or one JSON object; then warn of each world that was not measured."""
    failed: list[dict[str, Any]] = [
        {
            "nodes": result.plan.nodes,
            "ranks": result.plan.world_size,
            "job_id": result.ended.record.job_id if result.ended else None,
            "why": result.why,
        }
        for result in results
        if result.point is None
    ]
    if as_json:
        measured = to_object(scaling) if scaling else {"schema": SCHEMA, "points": []}
        output.answer_json({**measured, "failed": failed})
    elif rows := [_table_row(result, scaling) for result in results if result.ended]:
        output.answer_table(HEAD, rows)
    for each in failed:
        output.warn(f"{count(each['nodes'], 'node')}: {each['why']}")
    if scaling is not None:
        is_fixed, base = scaling.is_fixed_batch, count(scaling.points[0].ranks, "rank")
        batch = "ranks share a fixed batch" if is_fixed else "each rank keeps its batch"
        output.note(f"speed-up is relative to {base}; {batch}; communication is 1 - efficiency")


def _table_row(result: Result, scaling: Scaling | None) -> tuple[str, ...]:
    point, job_id = result.point, result.ended.record.job_id if result.ended else "-"
    measured = ["-"] * 5  # the cells below, if nothing was measured
    if point is not None and scaling is not None:
        gain = scaling.gain(point)
        measured = [f"{point.step_s:.4g} s", f"{1 / point.step_s:.4g}", f"{gain.speedup:.2f}"]
        measured += [f"{100 * share:.0f} %" for share in (gain.efficiency, gain.communication)]
    return (str(result.plan.nodes), str(result.plan.world_size), *measured, job_id)
