"""What a job does while a command waits for it, as one line that changes on a terminal."""

from __future__ import annotations

import time

from clusterrun.backends.evidence import TrainingProgress, read_evidence
from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared import output
from clusterrun.cli.shared.job_text import where_or_why
from clusterrun.cli.shared.progress_text import rate, steps_done
from clusterrun.rundir.record import JobRecord
from clusterrun.rundir.startup import Phase
from clusterrun.shared.state import JobState
from clusterrun.shared.wording import count

UNKNOWN = TrainingProgress()
TICK_S = 1.0
READ_S = 2.0  # between two readings of the run's files
_NEXT = {  # what a start does after a phase
    None: "setting up",
    Phase.SETUP: "importing torch",
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
            self.show(job.record, job.state, where_or_why(job) * bool(job.pending), job.progress)
            time.sleep(min(left_s, TICK_S))

    def show(
        self, record: JobRecord, state: JobState, why: str, progress: TrainingProgress = UNKNOWN
    ) -> None:
        """Show it, at most twice a second."""
        now = time.monotonic()
        if now < self._due_at or not output.can_move():
            return
        if now >= self._read_at:
            self._text = activity(record, state, why, progress)
            self._read_at = now + READ_S
        if (doing := self._text.partition(":")[0]) != self._doing:
            self._doing, self._since = doing, now
        self._due_at = now + TICK_S / 2
        output.move(self._text, now - self._since)


def activity(record: JobRecord, state: JobState, why: str, progress: TrainingProgress) -> str:
    """Return what a job does; the files of a run show sooner than its scheduler that it starts."""
    found, paths = read_evidence(record.paths), record.paths
    has_begun = bool(found.attempt) and not paths.outcome(found.attempt).exists()
    may_start = has_begun and state in (JobState.PENDING, JobState.CONFIGURING)
    if not (may_start or state is JobState.RUNNING):
        return ": ".join(filter(None, (state.value.lower(), why)))
    reached = found.reached if has_begun else None
    if reached in _NEXT and progress.step is None and progress.output_at is None:
        ready = min(len([*paths.events_dir.glob("*.jsonl")]), record.nodes)  # agents that started
        return f"starting: {ready} of {count(record.nodes, 'node')}, {_NEXT[reached]}"
    done = ", ".join(filter(None, (steps_done(progress), rate(progress))))
    return f"running: step {done}" if done else "running"
