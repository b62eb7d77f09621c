"""The start of a training, its progress, what it uses, and what it does during a wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from clusterrun.backends.evidence import ProgressSource, TrainingProgress, read_evidence
from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared import output
from clusterrun.cli.shared.job_text import where_or_why
from clusterrun.rundir.startup import Phase
from clusterrun.rundir.usage import percent, share_text
from clusterrun.shared.durations import clock
from clusterrun.shared.state import JobState
from clusterrun.shared.wording import count

SILENCE_S = 10.0  # steps are reported each second
SILENT_STEPS = 3  # or less often, if they take longer


def steps_done(progress: TrainingProgress) -> str:
    """Write `380/46880`, `380` without a total, or "" if nothing is known."""
    if progress.step is None:
        return ""
    return str(progress.step) if progress.total is None else f"{progress.step}/{progress.total}"


def rate(progress: TrainingProgress) -> str:
    """Write `1.2 steps/s`, or in the unit of a progress bar: `1.2 it/s`."""
    unit = "steps" if progress.unit == "step" else progress.unit
    return f"{progress.rate_per_s:.3g} {unit}/s" if progress.rate_per_s else ""


def eta_s(job: JobStatus) -> float | None:
    """Return the seconds left; None if unknown, or if no step has ended for a while."""
    progress = job.progress
    is_known = progress.rate_per_s and progress.total is not None and progress.step is not None
    if not is_known or job.state is not JobState.RUNNING or silence(progress):
        return None
    left = (progress.total or 0) - (progress.step or 0)
    return left / (progress.rate_per_s or 1.0) if left > 0 else None


def silence(progress: TrainingProgress) -> str:
    """Return how long ago the last step ended, if unusually long; the time left is then unknown."""
    silent_s = time.time() - (progress.reported_at or 0.0)
    usual_s = 1.0 / progress.rate_per_s if progress.rate_per_s else SILENCE_S
    if silent_s <= max(SILENCE_S, SILENT_STEPS * usual_s) or progress.step == progress.total:
        return ""
    verb = "moved" if progress.source is ProgressSource.OUTPUT else "reported"
    return f"last {verb} {clock(silent_s)} ago"


def output_age_s(progress: TrainingProgress) -> float | None:
    """Return the seconds since the ranks last printed something."""
    if progress.output_at is None:
        return None
    return max(0.0, time.time() - progress.output_at)  # another machine's clock


def usage_lines(job: JobStatus) -> Iterator[tuple[str, str]]:
    """Yield the label and text of the fullest memories: now, or of an ended job the peaks."""
    hosts, gpus, is_over = [], [], job.state.is_terminal
    for node, each in job.usage.items():
        used = each.host_peak_bytes if is_over else each.host_bytes
        hosts.append((used, each.host_limit_bytes, node))
        for gpu in each.gpus:
            used = gpu.memory_peak_bytes if is_over else gpu.memory_bytes
            gpus.append((used, gpu.memory_total_bytes, f"GPU {gpu.index} of {node}"))
    found = [text for text in (_worst("host", hosts), _worst("GPU", gpus)) if text]
    if found:
        yield "memory", f"{'peaks: ' * is_over}{', '.join(found)}"


def _worst(what: str, rows: list[tuple[int | None, int | None, str]]) -> str:
    known = [row for row in rows if percent(*row[:2]) is not None]
    used, limit, where = max(known, key=lambda row: percent(*row[:2]) or 0, default=(0, 0, ""))
    return f"{what} {share_text(used, limit)}{f' ({where})' * (len(rows) > 1)}" * bool(known)


SHOWN_S = 0.05  # a shorter phase is not named
_UNTIL = {
    Phase.LAUNCHER: "until the ranks started",
    Phase.RENDEZVOUS: "until all ranks joined",
    Phase.FIRST_STEP: "to the first step",
}


def startup_lines(job: JobStatus) -> Iterator[tuple[str, str]]:
    """Yield the label and text of the newest attempt's start: `42 s to the first step: …`."""
    newest = job.attempts[-1] if job.attempts and job.pending is None else None
    startup = newest.startup if newest else None
    if newest is None or startup is None or not startup.phases:
        return
    label, since = "start", ""
    if startup.is_restart:
        event = "failure" if startup.phases[0][0] is Phase.STOP else "end"
        label, since = "restart", f" from the {event} of attempt {newest.number - 1}"
    until = _UNTIL.get(startup.phases[-1][0], "")
    shown = [(phase, taken) for phase, taken in startup.phases if taken >= SHOWN_S]
    phases = ", ".join(f"{phase.text} {seconds(taken)}" for phase, taken in shown)
    yield label, f"{seconds(startup.total_s)}{since} {until}: {phases}"
    if startup.not_forked:
        yield "", startup.not_forked


def seconds(span_s: float) -> str:
    """Format a span of time: `0.4 s`, `42 s`, `00:02:31`."""
    if span_s >= 99.5:
        return clock(span_s + 0.5)
    return f"{span_s:.0f} s" if span_s >= 9.95 else f"{span_s:.1f} s"


TICK_S = 1.0
READ_S = 2.0  # between two readings of the run's files
_NEXT = {  # what a start does after a phase
    None: "setting up",
    Phase.SETUP: "importing torch",
    Phase.PREFLIGHT: "importing torch",
    Phase.FORGE: "waiting for the other nodes",
    Phase.AGENTS: "starting the ranks",
    Phase.LAUNCHER: "the script imports, ranks join",
}


class WaitLine:
    """Shows what a job does, and the seconds since that began; off a terminal it does nothing."""

    def __init__(self) -> None:
        self._text = self._doing = ""
        self._since = self._due_at = self._read_at = time.monotonic()

    def rest(self, job: JobStatus, pause_s: float) -> None:
        """Pause, and meanwhile show what a job does."""
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0:
            self.show(job)
            time.sleep(min(left_s, TICK_S))

    def show(self, job: JobStatus) -> None:
        """Show it, at most twice a second."""
        now = time.monotonic()
        if now < self._due_at or not output.can_move():
            return
        if now >= self._read_at:
            self._text, self._read_at = activity(job), now + READ_S
        if (doing := self._text.partition(":")[0]) != self._doing:
            self._doing, self._since = doing, now
        self._due_at = now + TICK_S / 2
        output.move(self._text, now - self._since)


def activity(job: JobStatus) -> str:
    """Return what a job does; the files of a run show sooner than its scheduler that it starts."""
    record, state, progress = job.record, job.state, job.progress
    found, paths = read_evidence(record.paths), record.paths
    has_begun = bool(found.attempt) and not paths.outcome(found.attempt).exists()
    may_start = has_begun and state in (JobState.PENDING, JobState.CONFIGURING)
    if not (may_start or state is JobState.RUNNING):
        why = where_or_why(job) if job.pending else ""
        return ": ".join(filter(None, (state.value.lower(), why)))
    reached = found.reached if has_begun else None
    if reached in _NEXT and progress.step is None and progress.output_at is None:
        ready = min(len([*paths.events_dir.glob("*.jsonl")]), record.nodes)  # agents that started
        return f"starting: {ready} of {count(record.nodes, 'node')}, {_NEXT[reached]}"
    done = ", ".join(filter(None, (steps_done(progress), rate(progress))))
    return f"running: step {done}" if done else "running"
