"""Read a run's progress and attempts from its files, without asking the scheduler."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from clusterrun.backends.base import SchedulerJob
from clusterrun.logformat.bars import Text, find_bar
from clusterrun.logformat.lines import LINE_BYTES, LogLine, Stream, parse_line
from clusterrun.node.recovery.printed import last_word
from clusterrun.rundir.attempt import read_attempt
from clusterrun.rundir.end import Cause, End
from clusterrun.rundir.events import ENDED_BY, Event, EventType, Phase, Startup, read_ends
from clusterrun.rundir.outcome import Outcome, read_outcome
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import end_of
from clusterrun.shared.finding import Finding
from clusterrun.shared.state import JobState

UNHEARD = "all ranks were asked to save, but none has called runtime.should_checkpoint()"
SAVING = (EventType.CHECKPOINT, EventType.UNSAVED, EventType.INTERRUPTED)
HALTS = 2  # that make a node bad; one may be chance
FEW = 8  # files to read while the first node is unknown


class ProgressSource(str, Enum):
    """Where the steps come from: events of rank 0, or a bar or lines that it printed."""

    REPORTED = "reported"
    OUTPUT = "output"


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """The progress of a training; None and "" are unknown, times are seconds since the epoch."""

    step: float | None = None  # only epochs have a fraction
    total: int | None = None
    rate_per_s: float | None = None
    reported_at: float | None = None  # the time of the newest step
    metrics: Mapping[str, Any] = field(default_factory=dict)  # of the newest step
    source: ProgressSource = ProgressSource.REPORTED
    bar: str = ""  # describes the bar or the lines that count the steps
    unit: str = "step"  # what they count
    output_at: float | None = None  # when a rank of the first node last wrote; of a running job


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the first node recorded about the newest attempt; times are seconds since the epoch."""

    attempt: int
    reached: Phase | None = None  # the newest phase of its start that has ended
    started_at: float | None = None
    hosts: tuple[str, ...] = ()  # those of the events: simulated nodes share one
    nodes: tuple[str, ...] = ()  # those that met
    world_size: int | None = None
    engine: str = ""
    progress: TrainingProgress = TrainingProgress()
    checkpoint: str | None = None
    checkpoint_at: float | None = None
    losses: tuple[float, ...] = ()
    unsaved: str = ""  # why the attempt could not save, unless it has saved since
    is_unheard: bool = False  # no rank has checked for the request to save
    preflight: tuple[Finding, ...] = ()  # the checks that failed before the launch


def read_evidence(paths: RunPaths) -> Evidence:
    """Read the newest attempt's events: of its first node, or of a few nodes if that is unknown."""
    attempt = paths.newest_attempt()
    nodes = read_attempt(paths, attempt).nodes
    files = [paths.events(nodes[0])] if nodes else sorted(paths.events_dir.glob("*.jsonl"))[:FEW]
    unordered = [event for file in files for event in read_ends(file, attempt)]
    events = sorted(unordered, key=lambda event: event.at)
    newest = {event.type: event for event in events}
    starts = [event for event in events if event.type is EventType.STARTED]
    hosts = tuple(event.host for event in starts if event.host)
    ended_phases = [phase for kind, phase in ENDED_BY.items() if kind in newest]  # in order
    world, checkpoint = newest.get(EventType.WORLD_READY), newest.get(EventType.CHECKPOINT)
    engine = newest.get(EventType.ENGINE)
    saving = next((event for event in reversed(events) if event.type in SAVING), None)
    # INTERRUPTED: the ranks were asked to save; `heard`: one checks for that, or handles a signal.
    is_unheard = bool(saving and saving.type is EventType.INTERRUPTED and saving.heard is False)
    unsaved = UNHEARD if is_unheard else ""
    if saving and saving.type is EventType.UNSAVED:
        unsaved = f"step {saving.step} was not saved: {saving.reason}"
    checks = newest.get(EventType.PREFLIGHT)
    preflight: tuple[Finding, ...] = ()
    with contextlib.suppress(AttributeError, ValueError):  # a rank may write any event
        preflight = tuple(map(Finding.from_data, (checks.findings if checks else None) or ()))
    return Evidence(
        attempt=attempt,
        reached=ended_phases[-1] if ended_phases else None,
        started_at=starts[0].at if starts else None,
        hosts=hosts,
        nodes=nodes or hosts,
        world_size=world.world_size if world else None,
        engine=(engine.engine if engine else None) or "",
        progress=_progress([event for event in events if event.type is EventType.STEP]),
        checkpoint=checkpoint.path if checkpoint else None,
        checkpoint_at=checkpoint.at if checkpoint else None,
        losses=tuple(
            value
            for event in events
            for name, value in (event.metrics or {}).items()
            if name in ("loss", "train_loss") and isinstance(value, int | float)
        ),
        unsaved=unsaved,
        is_unheard=is_unheard,
        preflight=preflight,
    )


def _progress(steps: Sequence[Event]) -> TrainingProgress:
    """Return the progress of reported steps, given in order of time; the rate is the average."""
    if not steps:
        return TrainingProgress()
    first, last = steps[0], steps[-1]
    rate = None
    spent_s = last.at - first.at
    if first.step is not None and last.step is not None:
        advanced = last.step - first.step
        rate = advanced / spent_s if advanced > 0 and spent_s > 0 else None
    return TrainingProgress(
        step=last.step,
        total=last.total,
        rate_per_s=rate,
        reported_at=last.at,
        metrics=last.metrics or {},
    )


def newest_failure(
    paths: RunPaths, end: End | None, newest: Outcome | None, job: SchedulerJob
) -> Outcome | None:
    """Return the failure that ended the newest attempt; None if it was cancelled or interrupted.

    `end` is that of the job and `newest` that of the attempt, if they are recorded. `job` is the
    scheduler's answer, for a job that ended before it could write anything.
    """
    if newest is not None:
        return newest if newest.code and newest.cause.is_failure else None
    attempt = paths.newest_attempt()
    if end is None and not attempt:
        end = End(state=job.state, exit_code=job.exit_code, ended_at=job.end)
    if end is None or end.state is not JobState.FAILED:
        return None
    # Until an attempt has begun, any line of the batch output may tell why.
    reason = last_word(paths.batch_output, or_any=not attempt)
    if not reason:
        return None
    return Outcome(
        attempt=attempt,
        job_id="",
        started_at=0.0,
        ended_at=end.ended_at or 0.0,
        nodes=(),
        code=end.exit_code or 1,
        cause=Cause.LAUNCHER,
        reason=reason,
    )


LAST_BYTES = 2 * LINE_BYTES  # always contains the start of a line


def with_output(paths: RunPaths, evidence: Evidence) -> TrainingProgress:
    """Add the time of the newest output to the progress, and printed steps if it has no others."""
    progress = evidence.progress
    if not evidence.nodes:
        return progress
    node = evidence.nodes[0]
    texts = end_of(paths.log(evidence.attempt, node), LAST_BYTES).split(b"\n")[:-1]  # whole lines
    parsed = (parse_line(text, node=node, offset=0, near_us=0) for text in texts)  # 0: not used
    outputs = (Stream.OUT, Stream.ERR)
    lines = [line for line in parsed if line.rank is not None and line.stream in outputs]
    if lines:
        progress = replace(progress, output_at=lines[-1].epoch_us / 1e6)
    if progress.step is not None:
        return progress
    return _with_printed_steps(progress, [line for line in lines if line.rank == 0])


def _with_printed_steps(progress: TrainingProgress, lines: Sequence[LogLine]) -> TrainingProgress:
    """Set the steps from a progress bar, or from lines that count steps, in either stream."""
    texts = (_joined_texts(lines, stream) for stream in (Stream.ERR, Stream.OUT))
    bar = find_bar(heapq.merge(*texts))
    if bar is None:
        return progress
    return replace(
        progress,
        step=bar.count,
        total=bar.total,
        rate_per_s=bar.rate_per_s,
        reported_at=bar.moved_at,
        source=ProgressSource.OUTPUT,
        bar=bar.description,
        unit=bar.unit,
    )


def _joined_texts(lines: Sequence[LogLine], stream: Stream) -> list[Text]:
    """Return a stream's lines; where the log cut a bar in two, the next text has all of it."""
    texts: list[Text] = []
    bar_part = ""
    for line in lines:
        if line.stream is stream:
            text = bar_part + line.text.decode("utf-8", "replace")
            texts.append(Text(line.epoch_us / 1e6, text))
            bar_part = text.rpartition("\r")[2] if line.partial else ""  # a bar begins with \r
    return texts


# Attempts: how each ended, and how much of its work had to be repeated


@dataclass(frozen=True, kw_only=True)
class AttemptSummary:
    """One attempt of a run."""

    number: int
    nodes: tuple[str, ...]
    outcome: Outcome | None  # None while it runs, and if no node could write it
    lost_steps: int | None = None  # those that a later attempt repeated
    lost_s: float | None = None  # the estimated time that these had taken
    startup: Startup | None = None  # set by `with_startups`


def read_attempts(paths: RunPaths, newest: int | None = None) -> tuple[AttemptSummary, ...]:
    """Read all attempts of a run, in order, up to the `newest` if it is known."""
    numbers = [number for number in paths.attempts() if newest is None or number <= newest]
    outcomes = {number: read_outcome(paths, number) for number in numbers}
    return tuple(_summary(paths, number, outcomes) for number in numbers)


def bad_nodes(paths: RunPaths) -> tuple[str, ...]:
    """Return the nodes that outcomes exclude, and those on which ranks halted several times."""
    outcomes = [attempt.outcome for attempt in read_attempts(paths) if attempt.outcome]
    excluded = [node for outcome in outcomes for node in outcome.exclude]
    halts = [outcome.node for outcome in outcomes if outcome.cause is Cause.HALTED]
    halting = [node for node in halts if node and halts.count(node) >= HALTS]
    return tuple(dict.fromkeys((*excluded, *halting)))


def _summary(paths: RunPaths, number: int, outcomes: dict[int, Outcome | None]) -> AttemptSummary:
    """Sum up an attempt: the steps after the one that the next attempt resumed from are lost."""
    outcome = outcomes[number]
    nodes = outcome.nodes if outcome else read_attempt(paths, number).nodes
    summary = AttemptSummary(number=number, nodes=nodes, outcome=outcome)
    if outcome is None or outcome.step is None or outcome.cause is Cause.COMPLETED:
        return summary
    # If no save was reported, only the next attempt's resumed step shows whether there was one.
    if outcome.checkpoint is None and number + 1 not in outcomes:
        return summary
    done = outcome.step - _resumed_from(paths, number, outcomes)
    lost = max(0, outcome.step - _resumed_from(paths, number + 1, outcomes))
    took_s = outcome.ended_at - outcome.started_at
    lost_s = took_s * min(1.0, lost / done) if done > 0 else None  # if all steps take equally long
    return replace(summary, lost_steps=lost, lost_s=lost_s)


def _resumed_from(paths: RunPaths, number: int, outcomes: dict[int, Outcome | None]) -> int:
    """Return the step from which an attempt resumed; if unknown, that of the last checkpoint."""
    if (step := read_attempt(paths, number).resumed) is not None:
        return step
    before = outcomes.get(number - 1)
    return (before.checkpoint if before else None) or 0  # its step
