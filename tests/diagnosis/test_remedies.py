"""What `diagnose` advises: its commands exist, with the options that it names."""

from __future__ import annotations

import re

import click
import pytest

from clusterrun.cli.main import group
from clusterrun.diagnosis import table

_COMMAND = re.compile(r"clusterrun ([a-z]+)((?: [^\s,:;()]+)*)")
REMEDIES = [
    (cause.id, verb, words.split())
    for cause in table.built_in().values()
    for text in cause.do
    for verb, words in _COMMAND.findall(text)
]


@pytest.mark.parametrize(("cause", "verb", "words"), REMEDIES)
def test_a_remedy_is_a_command_that_exists(cause: str, verb: str, words: list[str]) -> None:
    context = click.Context(group)
    if verb not in group.list_commands(context):
        assert not words or not words[0].startswith("-"), cause  # prose, not a command
        return
    command = group.get_command(context, verb)
    assert command is not None
    known = {name for param in command.params for name in param.opts}
    assert {word for word in words if word.startswith("--")} <= known, cause


def test_there_are_commands_among_the_remedies() -> None:
    assert {"resume", "logs"} <= {verb for _, verb, _ in REMEDIES}
