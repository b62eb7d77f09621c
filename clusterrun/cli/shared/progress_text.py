"""The progress of a training, for people."""

from __future__ import annotations

import time

from clusterrun.backends.evidence import ProgressSource, TrainingProgress
from clusterrun.backends.status import JobStatus
from clusterrun.shared.durations import clock
from clusterrun.shared.state import JobState

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
