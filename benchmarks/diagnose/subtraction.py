"""Measure what leaving out usual lines changes, on a generated corpus.

A line that is a sign of one cause is put before the log of a failure with another cause, and into
the log of an earlier run that completed. The logs are the examples of the tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks import report
from benchmarks.machine import machine
from benchmarks.report import Section, Value
from clusterrun.diagnosis.lines import PrintedLine, read_line
from clusterrun.diagnosis.scan import Scanner
from clusterrun.diagnosis.table import built_in
from clusterrun.diagnosis.weigh import verdict_of
from clusterrun.verbs.diagnose import doubtful, subtract

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLES: Final = ROOT / "tests" / "diagnosis" / "examples"
RESULTS: Final = ROOT / "benchmarks" / "results" / "subtraction"
OTHERS: Final = 1  # failures that each line is put into
SAMPLED: Final = 3  # of so many examples, one
STEPS: Final = "\n".join(f"step {n} loss 2.{n}" for n in range(1, 9)) + "\nTraining completed\n"


def run(results: Path, *, most: int | None = None) -> None:
    """Measure, print and write the table."""
    examples = [each for each in _examples() if each["cause"]][::SAMPLED][:most]
    cases = list(_cases(examples))
    own = [(each["log"], each["log"] + STEPS, each["cause"]) for each in examples]
    rows = [
        _row("another cause's line, printed by both runs", cases),
        _row(
            "another cause's line, printed by the failed run only",
            [(f, "", c) for f, _, c in cases],
        ),
        _row("the failure's own log, printed by both runs", own),
    ]
    about = (
        f"A generated corpus: the logs of one in {SAMPLED} of the tests' examples. Each line that "
        f"is a sign of a cause was put before {OTHERS} failure with another cause. The shares "
        "show what subtraction changes if a run prints such lines, not how often a run does. The "
        "last row is the price: the earlier run survived what ended this one."
    )
    section = Section(
        title="Lines that were also printed when it went well", about=about, rows=rows
    )
    print("\n".join(report.table(rows)))
    report.write(results, machine(results.parent), [section], of="subtraction")


def _examples() -> list[dict[str, Any]]:
    files = sorted(EXAMPLES.glob("*.yaml"))
    return [each for file in files for each in yaml.load(file.read_text(), yaml.CSafeLoader) or []]


def _cases(examples: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield a failure with a line of another cause, an earlier run with it, and the true cause."""
    for place, example in enumerate(examples):
        lines = dict.fromkeys(each.line.text for each in doubtful(_scanned(example["log"])))
        others = [each for each in examples if each["cause"] != example["cause"]]
        for line in lines:
            for n in range(min(OTHERS, len(others))):
                other = others[(place * 7 + n * 53) % len(others)]
                yield f"{line}\n{other['log']}", f"{line}\n{STEPS}", other["cause"]


def _row(name: str, cases: Sequence[tuple[str, str, str]]) -> dict[str, Value]:
    row: dict[str, Value] = {"case": name, "logs": len(cases)}
    for label, subtracts in (("without", False), ("with", True)):
        found = Counter(
            _judged(failed, earlier if subtracts else "", cause) for failed, earlier, cause in cases
        )
        for kind in ("wrong", "silent"):
            row[f"{kind} {label}"] = f"{found[kind] / max(1, len(cases)):.1%}"
    return row


def _judged(failed: str, earlier: str, cause: str) -> str:
    scanner = _scanned(failed)
    subtract(scanner, "", [("", [PrintedLine(0, text) for text in earlier.splitlines()])])
    verdict = verdict_of(scanner)
    if verdict is None:
        return "silent"
    return "right" if verdict.cause.id == cause else "wrong"


def _scanned(log: str) -> Scanner:
    scanner = Scanner(table=built_in())
    for number, text in enumerate(log.splitlines(), 1):
        scanner.feed(read_line(text, number=number, file=""))
    return scanner
