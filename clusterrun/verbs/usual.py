"""Read what earlier runs and attempts printed when they went well."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

from clusterrun.diagnosis.lines import PrintedLine
from clusterrun.diagnosis.scan import Scanner
from clusterrun.diagnosis.usual import Kind, UsualLog, doubtful, kind_of
from clusterrun.rundir.outcome import Cause, read_end, read_outcome
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord, earlier_namesakes

RUNS: Final = 3  # that completed
ATTEMPTS: Final = 2
_MOST_RECORDS: Final = 50

Printed = Callable[[RunPaths, int], Iterable[PrintedLine]]


def subtract(scanner: Scanner, record: JobRecord, attempt: int, printed: Printed) -> int:
    """Leave out what earlier runs and attempts also printed; return how many kinds of lines.

    Read them only if a finding may be usual, and none that are not needed.
    """
    findings = doubtful(scanner)
    wanted = {kind_of(each, record.run_id) for each in findings}
    usual: set[Kind] = set()
    for paths, number, well_until in _earlier(record, attempt):
        if usual >= wanted:
            break
        log = UsualLog(
            findings=findings,
            run_id=record.run_id,
            other_run_id=paths.root.name,
            well_until=well_until,
        )
        for line in printed(paths, number):
            log.feed(line)
        usual |= log.usual
    scanner.leave_out(each for each in findings if kind_of(each, record.run_id) in usual)
    return len(usual)


def _earlier(record: JobRecord, attempt: int) -> Iterator[tuple[RunPaths, int, float]]:
    """Yield attempts and until when they went well: this run's, then those of completed runs."""
    for number in range(attempt - 1, max(0, attempt - 1 - ATTEMPTS), -1):
        yield record.paths, number, _well_until(record.paths, number)
    namesakes = earlier_namesakes(record, _MOST_RECORDS)
    for paths in islice((each.paths for each in namesakes if _has_completed(each.paths)), RUNS):
        yield paths, paths.newest_attempt(), math.inf


def _has_completed(paths: RunPaths) -> bool:
    """Return whether a run went well: it exited with 0 and seems to have trained."""
    end = read_end(paths)
    if end is None or not end.state.is_success:
        return False
    outcome = read_outcome(paths, paths.newest_attempt())
    return outcome is None or not outcome.suspicions


def _well_until(paths: RunPaths, attempt: int) -> float:
    """Return when an attempt was interrupted that then saved and exited as asked; 0 for others."""
    outcome = read_outcome(paths, attempt)
    if outcome is None or outcome.cause is not Cause.INTERRUPTED:
        return 0.0
    try:
        return paths.request(attempt).stat().st_mtime
    except OSError:
        return 0.0
