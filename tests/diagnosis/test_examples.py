"""Each cause is found by each of its signs, and no look-alike is taken for it.

`examples/*.yaml` are lists of `{cause, log}`: the verdict on `log` is `cause`; null is none.
`not` names causes that the log tempts to name.
"""

from __future__ import annotations

import functools
import shlex
from pathlib import Path
from typing import Any

import click
import yaml

from clusterrun.cli.main import group
from clusterrun.diagnosis import table
from clusterrun.diagnosis.lines import read_line
from clusterrun.diagnosis.scan import Scanner
from clusterrun.diagnosis.table import CAUSAL, built_in
from clusterrun.diagnosis.weigh import verdict_of

DIRECTORY = Path(__file__).parent / "examples"


@functools.cache
def _examples() -> list[dict[str, Any]]:
    """Return the examples, each with its place."""
    return [
        {**example, "place": f"{file.stem} {number}"}
        for file in sorted(DIRECTORY.glob("*.yaml"))
        for number, example in enumerate(yaml.load(file.read_text(), yaml.CSafeLoader) or [])
    ]


def scanned(log: str) -> Scanner:
    """Feed a log."""
    scanner = Scanner(table=built_in())
    for number, text in enumerate(log.splitlines(), 1):
        scanner.feed(read_line(text, number=number, file=""))
    return scanner


def _found(log: str) -> str | None:
    """Return the cause that a log shows."""
    verdict = verdict_of(scanned(log))
    return verdict.cause.id if verdict else None


def test_the_causes_of_the_examples_are_found() -> None:
    found = ((each, _found(each["log"])) for each in _examples())
    assert [(each["place"], name) for each, name in found if name != each["cause"]] == []


def test_look_alikes_really_tempt() -> None:
    for example in _examples():
        texts = [sign.text for name in example.get("not", ()) for sign in built_in()[name].signs]
        lines = example["log"].splitlines()
        is_tempting = any(text.search(line) for text in texts for line in lines)
        assert is_tempting or not texts, example["place"]


def test_each_sign_has_an_example() -> None:
    lines: dict[str, list[str]] = {}
    for each in _examples():
        texts = (read_line(text, number=0, file="").text for text in each["log"].splitlines())
        lines.setdefault(each["cause"], []).extend(texts)
    for cause in built_in().values():
        for sign in (sign for sign in cause.signs if sign.role in CAUSAL):
            assert any(map(sign.text.search, lines[cause.id])), (cause.id, sign.text.written)


def test_every_cause_tells_what_it_means_and_what_to_do() -> None:
    for cause in built_in().values():
        if any(sign.role in CAUSAL for sign in cause.signs):
            assert cause.means.endswith("."), cause.id
            assert cause.do, cause.id


def test_what_a_cause_explains_exists() -> None:
    known = {*built_in(), "everything", "later"}
    assert {name for cause in built_in().values() for name in cause.explains} <= known


# What is advised: its commands exist, with the options that they name


def test_a_remedy_is_a_command_that_exists() -> None:
    context, verbs, wrong = click.Context(group), set(), []
    for cause in table.built_in().values():
        for words in (shlex.split(advice.run) for advice in cause.do):
            if words[:1] != ["clusterrun"]:
                continue
            command = group.get_command(context, words[1])
            known = {name for param in command.params for name in param.opts} if command else set()
            wrong += [(cause.id, w) for w in words[2:] if w.startswith("--") and w not in known]
            wrong += [(cause.id, words[1])] * (command is None)
            verbs.add(words[1])
    assert not wrong
    assert {"resume", "logs"} <= verbs
