"""Recognize what runs also print when they go well: it is not the cause of a failure now."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from clusterrun.diagnosis.lines import PrintedLine
from clusterrun.diagnosis.scan import FoundSign, Scanner
from clusterrun.diagnosis.table import Domain, Role
from clusterrun.diagnosis.training import STEPS, TrainingLog

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
            self._pass()
        for kind, finding in self._wanted.get(shape_of(line.text, self.other_run_id), {}).items():
            if not _is_sign(finding, line.text):
                continue
            if is_well:
                self.usual.add(kind)
            else:
                self._open.append((kind, self._training.steps))

    def _pass(self) -> None:
        """Accept the lines after which the training took steps."""
        now = self._training.steps
        while self._open and now - self._open[0][1] >= STEPS:
            self.usual.add(self._open.pop(0)[0])


def _is_sign(finding: FoundSign, text: str) -> bool:
    """Return whether a line of the same shape is the same sign: its numbers may decide."""
    signs = [sign.text for sign in finding.cause.signs if sign.role is finding.role]
    own = [sign for sign in signs if sign.search(finding.line.text)]
    return not own or any(sign.search(text) for sign in own)
