"""Parse a point in time: an age, a date, a time of day or a training step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Final

from clusterrun.errors import UsageError
from clusterrun.rundir.events import EventType, read
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.durations import SPAN, parse_seconds

_CLOCK: Final = re.compile(r"[0-2]?[0-9]:[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{1,6})?)?\Z")
_STEP: Final = re.compile(r"step:([0-9]{1,15})\Z")
_HINT: Final = "write 10m, 1h30m, 12:30, 2026-08-01, 2026-08-01T12:30 or step:4000"
Steps = Callable[[int], int]


def parse_moment(text: str, *, now: datetime, find_step: Steps) -> int:
    """Return a moment as epoch µs.

    Times without a zone are in that of `now` (none: this machine's). A time of day is the latest
    one that is not in the future. `find_step` returns the moment of a step. Raises UsageError.
    """
    stripped = text.strip()
    if step := _STEP.match(stripped):
        return find_step(int(step[1]))
    if re.match(SPAN, stripped):
        return (_microseconds(now) or 0) - parse_seconds(stripped) * 1_000_000
    moment = _clock(stripped, now) if _CLOCK.match(stripped) else _date(stripped, now)
    epoch_us = None if moment is None else _microseconds(moment)
    if epoch_us is None:
        raise UsageError(f"'{text}' is not a time", hint=_HINT)
    return epoch_us


def _microseconds(moment: datetime) -> int | None:
    try:
        return int(moment.timestamp()) * 1_000_000 + moment.microsecond
    except (OverflowError, ValueError, OSError):  # a year beyond this machine's zone
        return None


def _clock(text: str, now: datetime) -> datetime | None:
    try:
        hours, minutes, *seconds = text.split(":")
        whole, _, fraction = (seconds[0] if seconds else "0").partition(".")
        moment = now.replace(
            hour=int(hours),
            minute=int(minutes),
            second=int(whole),
            microsecond=int(fraction.ljust(6, "0") or 0),
        )
    except ValueError:
        return None
    return moment if moment <= now else moment - timedelta(days=1)


def _date(text: str, now: datetime) -> datetime | None:
    try:
        # Python 3.10 does not accept the Z.
        moment = datetime.fromisoformat(re.sub(r"[Zz]\Z", "+00:00", text))
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=now.tzinfo)  # None stays None


def step_finder(paths: RunPaths, attempt: int, *, before: bool) -> Steps:
    """Return a function that finds when a step was reached, from the reports of rank 0.

    Rank 0 reports at most one step a second. `before` uses the last report before the step, so that
    all lines of the step come after it. Otherwise use the first report of that step or a later one.
    """

    def find(step: int) -> int:
        last_us, newest = 0, None
        for epoch_us, reported in _reports(paths, attempt):
            if reported >= step:
                return last_us if before else epoch_us
            last_us, newest = epoch_us, reported
        if newest is None:
            raise UsageError(
                f"attempt {attempt} reported no step",
                hint="pass a time instead; a script reports steps with clusterrun.runtime.step()",
            )
        raise UsageError(f"step {step} was not reached; the newest reported step is {newest}")

    return find


def _reports(paths: RunPaths, attempt: int) -> Iterator[tuple[int, int]]:
    """Yield (epoch µs, step) for each report of rank 0 in an attempt, in order."""
    for path in sorted(paths.events_dir.glob("*.jsonl")):
        found = False
        for event in read(path, (EventType.STEP,)):
            if event.attempt == attempt and event.step is not None:
                found = True
                yield round(event.at * 1_000_000), event.step
        if found:
            return  # only rank 0 reports steps, and it is on one node
