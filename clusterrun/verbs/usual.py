"""Read what earlier runs printed when they went well."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from clusterrun.diagnosis.lines import PrintedLine
from clusterrun.diagnosis.scan import FoundSign, Scanner
from clusterrun.diagnosis.table import Domain, Role
from clusterrun.rundir.outcome import read_end, read_outcome
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord, earlier_namesakes

RUNS: Final = 3  # that completed
_MOST_RECORDS: Final = 50
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")

Printed = Callable[[RunPaths, int], Iterable[PrintedLine]]
Kind = tuple[str, Role, str]
"""Lines that are the same sign of the same cause, and differ only in numbers."""


def subtract(scanner: Scanner, record: JobRecord, printed: Printed) -> int:
    """Leave out what earlier runs also printed; return how many kinds of lines.

    Read them only if a finding may be usual, and none that are not needed.
    """
    found = {each: kind_of(each, record.run_id) for each in doubtful(scanner)}
    usual: set[Kind] = set()
    earlier = (each.paths for each in earlier_namesakes(record, _MOST_RECORDS))
    for paths in islice(filter(_went_well, earlier), RUNS if found else 0):
        lines = printed(paths, paths.newest_attempt())
        usual |= usual_among(found, ((line.text, paths.root.name) for line in lines))
        if usual.issuperset(found.values()):
            break
    scanner.leave_out(each for each, kind in found.items() if kind in usual)
    return len(usual)


def _went_well(paths: RunPaths) -> bool:
    """Return whether a run exited with 0 and seems to have trained."""
    end, outcome = read_end(paths), read_outcome(paths, paths.newest_attempt())
    return bool(end and end.state.is_success) and not (outcome and outcome.suspicions)


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


def usual_among(found: dict[FoundSign, Kind], lines: Iterable[tuple[str, str]]) -> set[Kind]:
    """Return the kinds that are among lines of earlier runs, each line with its run's id."""
    wanted: dict[str, list[tuple[Kind, FoundSign]]] = {}
    for finding, kind in found.items():
        wanted.setdefault(kind[2], []).append((kind, finding))
    return {
        kind
        for text, run_id in lines
        for kind, finding in wanted.get(shape_of(text, run_id), ())
        if _is_sign(finding, text)
    }


def _is_sign(finding: FoundSign, text: str) -> bool:
    """Return whether a line of the same shape is the same sign: its numbers may decide."""
    signs = [sign.text for sign in finding.cause.signs if sign.role is finding.role]
    own = [sign for sign in signs if sign.search(finding.line.text)]
    return not own or any(sign.search(text) for sign in own)
