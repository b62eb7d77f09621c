"""Read what earlier runs and attempts printed when they went well."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from clusterrun.diagnosis.lines import PrintedLine
from clusterrun.diagnosis.scan import FoundSign, Scanner
from clusterrun.diagnosis.table import Domain, Role
from clusterrun.diagnosis.training import STEPS, TrainingLog
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


_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")

Kind = tuple[str, Role, str]
"""Lines that are the same sign of the same cause, and differ only in numbers."""


def shape_of(text: str, run_id: str = "") -> str:
    """Return what lines of several runs have in common that differ in numbers and the run's id.

    >>> shape_of("pid 905 in /runs/a/1121-103252-k3fq/x", "1121-103252-k3fq")
    'pid 0 in /runs/a/0/x'
    """
    return _NUMBER.sub("0", text.replace(run_id, "0") if run_id else text).strip()


def kind_of(finding: FoundSign, run_id: str) -> Kind:
    """Return the kind of a finding's line."""
    return finding.cause.id, finding.role, shape_of(finding.line.text, run_id)


def doubtful(scanner: Scanner) -> list[FoundSign]:
    """Return the findings that may be usual.

    These are printed lines (the number of a line that agents or Slurm reported is 0), but no
    traceback that ended its process, no fault of the hardware and no decision of the cluster.
    """
    return [
        each
        for each in scanner.causal()
        if each.line.number
        and not (each.cause.lasting or each.cause.blames_node)
        and each.cause.domain is not Domain.POLICY
        and not scanner.is_last_words(each)
    ]


@dataclass(kw_only=True)
class UsualLog:
    """Follows the log of an earlier run or attempt, for lines like those of `findings`.

    A line until `well_until` (epoch seconds) is usual. A later one is usual only if the training
    took steps after it.
    """

    findings: Iterable[FoundSign]
    run_id: str
    other_run_id: str
    well_until: float = math.inf
    usual: set[Kind] = field(default_factory=set)
    _wanted: dict[str, dict[Kind, FoundSign]] = field(default_factory=dict)
    _open: list[tuple[Kind, int]] = field(default_factory=list)
    _training: TrainingLog = field(default_factory=TrainingLog)

    def __post_init__(self) -> None:
        for each in self.findings:
            kind = kind_of(each, self.run_id)
            self._wanted.setdefault(kind[2], {})[kind] = each

    def feed(self, line: PrintedLine) -> None:
        """Take the next line."""
        is_well = line.at is None and self.well_until == math.inf
        is_well = is_well or (line.at is not None and line.at <= self.well_until)
        if not is_well:
            self._training.feed(line)
            while self._open and self._training.steps - self._open[0][1] >= STEPS:
                self.usual.add(self._open.pop(0)[0])  # the training took steps after it
        for kind, finding in self._wanted.get(shape_of(line.text, self.other_run_id), {}).items():
            if not _is_sign(finding, line.text):
                continue
            if is_well:
                self.usual.add(kind)
            else:
                self._open.append((kind, self._training.steps))


def _is_sign(finding: FoundSign, text: str) -> bool:
    """Return whether a line of the same shape is the same sign: its numbers may decide."""
    signs = [sign.text for sign in finding.cause.signs if sign.role is finding.role]
    own = [sign for sign in signs if sign.search(finding.line.text)]
    return not own or any(sign.search(text) for sign in own)
