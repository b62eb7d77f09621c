"""`scaling`: measure a script in worlds of several sizes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

from clusterrun.advice.measured import SCHEMA, to_object
from clusterrun.cli.shared import output, submission
from clusterrun.cli.shared.help import under
from clusterrun.cli.shared.job_text import failure_text, say_released
from clusterrun.cli.shared.options import (
    JobOptions,
    ScriptCommand,
    job_options,
    json_option,
    yes_option,
)
from clusterrun.errors import Exit
from clusterrun.estimates.speed import Scaling
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.wording import count
from clusterrun.verbs.render import Prepared
from clusterrun.verbs.scaling import (
    Result,
    newest_runs,
    node_counts,
    prepare_worlds,
    result_of,
    scaling_of,
    started,
    stored,
)

HEAD = ("NODES", "RANKS", "STEP", "STEPS/S", "SPEED-UP", "EFFICIENCY", "COMMUNICATION", "JOB")


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
    help="assume the same number of samples per step for all node counts",
)
@click.option("--collect", is_flag=True, help="submit nothing and report the newest runs")
@json_option
@yes_option
@click.pass_context
def command(
    ctx: click.Context,
    job: JobOptions,
    *,
    counts: str | None,
    fixed_batch: bool,
    collect: bool,
    as_json: bool,
    yes: bool,
) -> None:
    """Measure how a script scales across nodes.

    Submit one short run, named NAME-scaling, for each node count. The script should run for
    at least half a minute and must report its steps with clusterrun.runtime.step; a Trainer needs
    no change. The first fifth of the reports is discarded. On Slurm all runs are queued together
    and must not write to the same directory; on this machine they run one after another.

    Speed-up compares samples per second with the smallest world; efficiency is its share of the
    ideal. Communication is the share lost to communication and to waiting for the slowest rank.
    The samples per rank are assumed to stay the same; pass --fixed-batch if the script divides a
    fixed batch among the ranks.

    clusterrun plan uses the result. Ctrl-C leaves the jobs running; --collect reports them later.

    \b
    clusterrun scaling --nodes 1,2,4 --gpus-per-node 8 --time 30 train.py --max-steps 300
    """
    output.expect_json(as_json)
    nodes = node_counts(counts or "")
    worlds = prepare_worlds(lambda more: job._replace(flags={**job.flags, **more}).load(), nodes)
    submission.print_notes(worlds[-1])
    if worlds[-1].plan.cluster.scheduler.is_this_machine:
        output.note("simulated nodes share this machine: the table does not apply to real nodes")
    submission.confirm_size(worlds[-1].plan, yes=yes or collect)
    argv = ("clusterrun", *sys.argv[1:])

    def said(record: JobRecord) -> None:
        ranks = f"{count(record.nodes, 'node')} x {count(record.procs_per_node, 'rank')}"
        output.say(f"Submitted batch job {record.job_id}: {ranks}")

    begun = newest_runs(worlds) if collect else started(worlds, argv=argv, submitted=said)
    results = _waited(worlds, begun)
    scaling = scaling_of(worlds, results, is_fixed_batch=fixed_batch)
    _show(results, scaling, as_json=as_json)
    if scaling is not None and len(scaling.points) > 1:
        output.detail("stored", str(stored(worlds, scaling)))
    if any(result.point is None for result in results):
        ctx.exit(Exit.FAILED)


def _waited(worlds: Sequence[Prepared], runs: Iterable[JobRecord | None]) -> list[Result]:
    """Wait for each run, which starts it where there is no queue; Ctrl-C leaves them running."""
    results: list[Result] = []
    try:
        for world, record in zip(worlds, runs, strict=True):
            results.append(found := result_of(world, record, released=say_released))
            if found.ended is not None:
                state = output.painted_state(found.ended.state.value)
                output.say(f"job {found.ended.record.job_id} {state}")
    except KeyboardInterrupt:
        output.say_interrupted("submitted jobs keep running")
        output.say("  run the same command with --collect to wait for them and print the table")
        raise
    return results


# The answer


def _show(results: Sequence[Result], scaling: Scaling | None, *, as_json: bool) -> None:
    failed: list[dict[str, Any]] = [
        {
            "nodes": result.nodes,
            "ranks": result.ranks,
            "job_id": result.ended.record.job_id if result.ended else None,
            "why": _why(result),
        }
        for result in results
        if result.point is None
    ]
    if as_json:
        measured = to_object(scaling) if scaling else {"schema": SCHEMA, "points": []}
        output.answer_json({**measured, "failed": failed})
    elif rows := [_cells(result, scaling) for result in results if result.ended]:
        output.answer_table(HEAD, rows)
    for each in failed:
        output.warn(f"{count(each['nodes'], 'node')}: {each['why']}")
    if scaling is not None:
        is_fixed, base = scaling.is_fixed_batch, count(scaling.points[0].ranks, "rank")
        batch = "ranks share a fixed batch" if is_fixed else "each rank keeps its batch"
        output.note(f"speed-up is relative to {base}; {batch}; communication is 1 - efficiency")


def _cells(result: Result, scaling: Scaling | None) -> tuple[str, ...]:
    point, job_id = result.point, result.ended.record.job_id if result.ended else "-"
    shown = ["-"] * 5
    if point is not None and scaling is not None:
        gain = scaling.gain(point)
        shown = [f"{point.step_s:.4g} s", f"{1 / point.step_s:.4g}", f"{gain.speedup:.2f}"]
        shown += [f"{100 * share:.0f} %" for share in (gain.efficiency, gain.communication)]
    return (str(result.nodes), str(result.ranks), *shown, job_id)


def _why(result: Result) -> str:
    """Return why a world was not measured."""
    ended = result.ended
    if ended is None:
        return (
            "no run with this script and arguments was found; "
            "run the same command without --collect"
        )
    job = f"job {ended.record.job_id}"
    if result.measured is not None and result.measured.steps is None:
        return f"{job} reported no steps: call clusterrun.runtime.step(step, total) after each"
    if result.measured is not None:
        return f"{job} was too short to measure; train longer, e.g. with more --max-steps"
    failure = failure_text(ended.failure) if ended.failure else ended.reason
    return ": ".join(filter(None, (f"{job} is {ended.state.value}", failure)))
