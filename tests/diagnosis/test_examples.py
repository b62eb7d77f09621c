"""Each cause is found by each of its signs, and no look-alike is taken for it.

`examples/*.yaml` are lists of `{cause, log}`: the verdict on `log` is `cause`; null is none.
`not` names causes that the log tempts to name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusterrun.diagnosis.lines import read_line
from clusterrun.diagnosis.scan import Scanner
from clusterrun.diagnosis.table import CAUSAL, Sign, built_in
from clusterrun.diagnosis.weigh import verdict_of

DIRECTORY = Path(__file__).parent / "examples"


def examples() -> Iterator[Any]:
    """Yield each example with a name."""
    for file in sorted(DIRECTORY.glob("*.yaml")):
        for number, example in enumerate(yaml.safe_load(file.read_text()) or []):
            yield pytest.param(example, id=f"{file.stem}-{number}-{example['cause']}")


def scanned(log: str) -> Scanner:
    """Feed a log."""
    scanner = Scanner(table=built_in())
    for number, text in enumerate(log.splitlines(), 1):
        scanner.feed(read_line(text, number=number, file=""))
    return scanner


@pytest.mark.parametrize("example", examples())
def test_the_cause_of_an_example_is_found(example: dict[str, Any]) -> None:
    verdict = verdict_of(scanned(example["log"]))
    assert (verdict.cause.id if verdict else None) == example["cause"]


@pytest.mark.parametrize("example", [e for e in examples() if e.values[0].get("not")])
def test_a_look_alike_really_tempts(example: dict[str, Any]) -> None:
    texts = [sign.text for name in example["not"] for sign in built_in()[name].signs]
    assert any(text.search(line) for text in texts for line in example["log"].splitlines())


def _signs() -> Iterator[Any]:
    for cause in built_in().values():
        for number, sign in enumerate(cause.signs):
            if sign.role in CAUSAL:
                yield pytest.param(cause.id, sign, id=f"{cause.id}-{number}")


@pytest.mark.parametrize(("cause", "sign"), _signs())
def test_each_sign_has_an_example(cause: str, sign: Sign) -> None:
    logs = [each.values[0]["log"] for each in examples() if each.values[0]["cause"] == cause]
    lines = [read_line(text, number=0, file="").text for log in logs for text in log.splitlines()]
    assert any(sign.text.search(line) for line in lines)


def test_every_cause_tells_what_it_means_and_what_to_do() -> None:
    for cause in built_in().values():
        if any(sign.role in CAUSAL for sign in cause.signs):
            assert cause.means.endswith("."), cause.id
            assert cause.do, cause.id


def test_what_a_cause_explains_exists() -> None:
    known = {*built_in(), "everything", "later"}
    assert {name for cause in built_in().values() for name in cause.explains} <= known
