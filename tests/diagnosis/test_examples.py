"""Each cause is found by each of its signs, and no look-alike is taken for it.

`examples/*.yaml` are lists of `{cause, log}`: the verdict on `log` is `cause`; null is none.
`not` names causes that the log tempts to name.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusterrun.diagnosis.lines import read_line
from clusterrun.diagnosis.scan import Scanner
from clusterrun.diagnosis.table import CAUSAL, KnownCause, built_in
from clusterrun.diagnosis.weigh import verdict_of

DIRECTORY = Path(__file__).parent / "examples"


@functools.cache
def _examples() -> tuple[Any, ...]:
    """Return each example with a name."""
    return tuple(
        pytest.param(example, id=f"{file.stem}-{number}-{example['cause']}")
        for file in sorted(DIRECTORY.glob("*.yaml"))
        for number, example in enumerate(yaml.load(file.read_text(), yaml.CSafeLoader) or [])
    )


def scanned(log: str) -> Scanner:
    """Feed a log."""
    scanner = Scanner(table=built_in())
    for number, text in enumerate(log.splitlines(), 1):
        scanner.feed(read_line(text, number=number, file=""))
    return scanner


@pytest.mark.parametrize("example", _examples())
def test_the_cause_of_an_example_is_found(example: dict[str, Any]) -> None:
    verdict = verdict_of(scanned(example["log"]))
    assert (verdict.cause.id if verdict else None) == example["cause"]


@pytest.mark.parametrize("example", [e for e in _examples() if e.values[0].get("not")])
def test_a_look_alike_really_tempts(example: dict[str, Any]) -> None:
    texts = [sign.text for name in example["not"] for sign in built_in()[name].signs]
    assert any(text.search(line) for text in texts for line in example["log"].splitlines())


@functools.cache
def _lines_of(cause: str) -> tuple[str, ...]:
    logs = [each.values[0]["log"] for each in _examples() if each.values[0]["cause"] == cause]
    return tuple(
        read_line(text, number=0, file="").text for log in logs for text in log.splitlines()
    )


@pytest.mark.parametrize("cause", list(built_in().values()), ids=lambda cause: str(cause.id))
def test_each_sign_has_an_example(cause: KnownCause) -> None:
    lines = _lines_of(cause.id)
    for sign in cause.signs:
        if sign.role in CAUSAL:
            assert any(sign.text.search(line) for line in lines), sign.text.pattern


def test_every_cause_tells_what_it_means_and_what_to_do() -> None:
    for cause in built_in().values():
        if any(sign.role in CAUSAL for sign in cause.signs):
            assert cause.means.endswith("."), cause.id
            assert cause.do, cause.id


def test_what_a_cause_explains_exists() -> None:
    known = {*built_in(), "everything", "later"}
    assert {name for cause in built_in().values() for name in cause.explains} <= known
