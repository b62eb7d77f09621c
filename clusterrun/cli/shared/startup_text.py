"""Where the start of an attempt spent its time, in words and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clusterrun.backends.status import JobStatus
from clusterrun.rundir.startup import Phase, Startup
from clusterrun.shared.durations import clock

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


def startup_object(startup: Startup | None) -> dict[str, Any] | None:
    """Describe a start for JSON; null is unknown."""
    if startup is None:
        return None
    return {
        "is_restart": startup.is_restart,
        "not_forked": startup.not_forked or None,
        "total_s": round(startup.total_s, 3),
        "phases": [
            {"phase": phase.value, "seconds": round(taken, 3)} for phase, taken in startup.phases
        ],
    }
