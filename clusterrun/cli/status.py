"""`status`: say how one job stands, and what an answer about a job looks like in JSON."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from clusterrun.cli import output
from clusterrun.cli.attempts import attempt_lines, attempt_object
from clusterrun.cli.times import SECONDS_A_DAY, clock, timestamp
from clusterrun.config.spec import Cluster
from clusterrun.errors import Exit, UsageError
from clusterrun.rundir.outcome import Cause
from clusterrun.shared.hostlist import fold_hosts, parse_hostlist
from clusterrun.shared.state import JobState
from clusterrun.shared.wording import count

if TYPE_CHECKING:
    from clusterrun.backends.evidence import TrainingProgress
    from clusterrun.backends.status import JobStatus
    from clusterrun.rundir.outcome import Outcome
    from clusterrun.rundir.record import JobRecord

SILENCE_S = 10.0  # a script that reports its steps does so each second
SILENT_STEPS = 3  # or less often, if they take longer


@click.command()
@click.argument("job", required=False)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option("--exit-status", is_flag=True, help="exit 3 when the job ended and did not complete")
@click.option("--wait", "waiting", is_flag=True, help="wait until the job has ended")
@click.pass_context
def command(
    ctx: click.Context, job: str | None, *, as_json: bool, exit_status: bool, waiting: bool
) -> None:
    """Say how one job is doing.

    JOB is a job id, the name of a run or its directory; without it the newest run is taken.

    \b
    clusterrun status
    clusterrun status 4711 --wait --exit-status && echo trained
    """
    from clusterrun.verbs import api
    from clusterrun.verbs.release import is_held

    output.expect_json(as_json)
    record = find_announced(job)
    seen = api.wait(record, released=say_released) if waiting else api.status(record)
    if as_json:
        output.answer_json({"schema": "clusterrun.status/1", **job_object(seen)})
    else:
        for label, text in _lines(seen):
            output.answer(f"{label:<11}{text}")
    for text in seen.notes:
        output.note(text)
    if is_held(seen):
        output.note(f"'clusterrun status --wait {seen.record.job_id}' has Slurm start it now")
    ctx.exit(_exit_code(seen, exit_status=exit_status))


def say_released(seen: JobStatus) -> None:
    """Print that a requeued job need not wait."""
    output.say(released(f"job {seen.record.job_id}"))


def released(title: str) -> str:
    """Say that a requeued job need not wait."""
    return f"{title} was requeued; Slurm was asked to start it now, not in two minutes"


def find_announced(job: str | None) -> JobRecord:
    """Find a job; say which one was taken where none was named."""
    from clusterrun.verbs import api

    record = api.find_record(job)
    if job is None:
        where = os.path.relpath(record.runs_dir.root)
        output.say(f"using job {record.job_id} ({record.name}, newest run in {where})")
    return record


def _exit_code(seen: JobStatus, *, exit_status: bool) -> int:
    if seen.error is not None:
        # The answer above is what the files say; stdout holds it already.
        output.print_error(seen.error, output.Session(color=output.current_session().color))
        return seen.error.exit_code
    if exit_status and seen.state.is_terminal and not seen.state.is_success:
        return Exit.NO
    return Exit.OK


# For people


def _lines(seen: JobStatus) -> Iterator[tuple[str, str]]:
    record = seen.record
    yield "job", f"{record.job_id or '-'}  {record.name}"
    yield "state", _state(seen)
    if why := where_or_why(seen):
        yield ("waits" if seen.pending else "nodes"), why
    yield "world", _world(seen)
    if seen.progress.step is not None:
        yield "step", _progress(seen)
    if newest := _checkpoint(seen):
        yield "checkpoint", newest
    if seen.failure:
        yield "failed", failure_text(seen.failure)
    yield from attempt_lines(seen.attempts, is_over=seen.state.is_terminal)
    if record.chained_job_ids and not seen.state.is_terminal:
        yield "chain", f"{', '.join(record.chained_job_ids)} go on after it"
    yield "run dir", record.run_dir
    job = record.job_id or record.run_dir
    yield "logs", f"clusterrun logs {job}"
    if seen.state.is_terminal and not seen.state.is_success and newest:
        yield "go on", f"clusterrun resume {job}"


def _checkpoint(seen: JobStatus) -> str:
    """Name the newest checkpoint; an earlier attempt's by its step."""
    if seen.checkpoint:
        return seen.checkpoint
    for attempt in reversed(seen.attempts):
        if attempt.outcome and attempt.outcome.checkpoint is not None:
            return f"step {attempt.outcome.checkpoint}, of attempt {attempt.number} or before"
    return ""


def _state(seen: JobStatus) -> str:
    parts = [output.painted_state(seen.state.value)]
    if seen.state.is_terminal and (code := _how_it_ended(seen)):
        parts.append(code)
    if seen.elapsed_s is not None:
        parts.append(times(seen))
    if seen.attempt > 1:
        parts.append(f"attempt {seen.attempt}")
    if seen.reason:
        parts.append(f"({seen.reason})")
    return "  ".join(parts)


def _how_it_ended(seen: JobStatus) -> str:
    if seen.exit_signal:
        return f"signal {seen.exit_signal}"
    # A job that was cancelled before it ran has status 0 to Slurm; that would read as success.
    says = bool(seen.exit_code) or (seen.exit_code == 0 and seen.state.is_success)
    return f"exit {seen.exit_code}" if says else ""


def _world(seen: JobStatus) -> str:
    record = seen.record
    asked = f"{count(record.nodes, 'node')} x {count(record.procs_per_node, 'rank')}"
    if seen.world_size is None:
        return f"{asked}, not formed yet" if not seen.state.is_terminal else f"{asked}, not formed"
    if seen.world_size != record.world_size:
        return f"{seen.world_size} ranks, but {asked} were asked for"
    return f"{count(seen.world_size, 'rank')} in one world = {asked}"


def _progress(seen: JobStatus) -> str:
    """Write how far a training is: `380/46880  1.2 steps/s, 10:45:00 to go`."""
    progress = seen.progress
    done = str(progress.step) if progress.total is None else f"{progress.step}/{progress.total}"
    rate = progress.rate_per_s
    done += f"  {rate:.3g} steps/s" if rate else ""
    if seen.state is not JobState.RUNNING:
        return done
    left = (progress.total or 0) - (progress.step or 0)
    if silence := _silence(progress):
        return f"{done}, {silence}"
    return f"{done}, {clock(left / rate)} to go" if rate and left > 0 else done


def _silence(progress: TrainingProgress) -> str:
    """Say for how long no step was reported, if that is unusual: the estimate is void then."""
    silent_s = time.time() - (progress.reported_at or 0.0)
    usual_s = 1.0 / progress.rate_per_s if progress.rate_per_s else SILENCE_S
    if silent_s <= max(SILENCE_S, SILENT_STEPS * usual_s) or progress.step == progress.total:
        return ""
    return f"last reported {clock(silent_s)} ago"


def failure_text(failure: Outcome) -> str:
    """Name the failure that ended an attempt, on one line."""
    how = f"exit {failure.code}" if failure.code else ""
    if failure.signal:  # a rank's message names its signal
        how = "" if failure.cause is Cause.SIGNAL else f"killed by signal {failure.signal}"
    who = _who(failure) if failure.message else ""  # else the reason names it
    message = " ".join((failure.message or failure.reason).split())
    return ": ".join(part for part in (who, how, message) if part)


def _who(failure: Outcome) -> str:
    if failure.rank is None:
        return f"node {failure.node}" if failure.node else ""
    return f"rank {failure.rank}" + (f" on {failure.node}" if failure.node else "")


def where_or_why(seen: JobStatus) -> str:
    """Say where a job runs, or why it waits."""
    if seen.pending is None:
        is_local = seen.record.cluster is Cluster.LOCAL
        return (
            f"{nodelist(seen)} (simulated nodes)" if is_local and seen.nodelist else nodelist(seen)
        )
    start = f"; starts about {_local(seen.expected_start)}" if seen.expected_start else ""
    return f"{seen.pending.text}{start}"


def nodelist(seen: JobStatus) -> str:
    """Name the hosts of a job in Slurm's short form, each once: simulated nodes share one."""
    try:
        return fold_hosts(parse_hostlist(seen.nodelist))
    except UsageError:
        return seen.nodelist


def _local(epoch_s: float) -> str:
    then = datetime.fromtimestamp(epoch_s)
    is_near = abs((then - datetime.now()).total_seconds()) < SECONDS_A_DAY / 2
    return f"{then:%H:%M}" if is_near else f"{then:%Y-%m-%d %H:%M}"


def times(seen: JobStatus) -> str:
    """Write the time spent, and the limit where there is one: `05:10:40 / 1-00:00:00`."""
    spent = "-" if seen.elapsed_s is None else clock(seen.elapsed_s)
    return spent if seen.limit_s is None else f"{spent} / {clock(seen.limit_s)}"


# For programs


def job_object(seen: JobStatus) -> dict[str, Any]:
    """Describe a job for JSON; null is what nobody could say."""
    record = seen.record
    return {
        "job_id": record.job_id or None,
        "name": record.name,
        "run_id": record.run_id,
        "run_dir": record.run_dir,
        "backend": record.cluster.value,
        "cluster": record.slurm_cluster,
        "state": seen.state.value,
        "reason": _reason(seen),
        "nodes": record.nodes,
        "nodelist": nodelist(seen) or None,
        "gpus": record.nodes * record.gpus_per_node,
        "world_size": record.world_size,
        "proven_world_size": seen.world_size,
        "attempt": seen.attempt,
        "submitted": timestamp(record.submitted_at),
        "expected_start": timestamp(seen.expected_start),
        "start": timestamp(seen.start),
        "end": timestamp(seen.end),
        "elapsed_s": seen.elapsed_s,
        "limit_s": seen.limit_s,
        "exit": {"code": seen.exit_code, "signal": seen.exit_signal},
        "progress": {
            "step": seen.progress.step,
            "total": seen.progress.total,
            "rate_per_s": seen.progress.rate_per_s,
            "reported": timestamp(seen.progress.reported_at),
        },
        "checkpoint": seen.checkpoint,
        "attempts": [attempt_object(attempt) for attempt in seen.attempts],
        "earlier_job_ids": list(record.earlier_job_ids),
        "chained_job_ids": list(record.chained_job_ids),
        "verdict": _verdict(seen.failure),
        "notes": list(seen.notes),
    }


def _reason(seen: JobStatus) -> dict[str, Any] | None:
    if seen.pending is not None:
        pending = seen.pending
        return {"code": pending.code, "text": pending.text, "can_start": pending.can_start}
    if seen.reason:
        return {"code": seen.reason, "text": seen.reason, "can_start": None}
    return None


def _verdict(failure: Outcome | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {
        "rank": failure.rank,
        "node": failure.node or None,
        "code": failure.code,
        "signal": failure.signal or None,
        "message": failure.message or failure.reason,
    }
