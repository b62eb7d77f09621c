"""What `diagnose` advises: its commands exist, with the options that they name."""

from __future__ import annotations

import shlex

import click

from clusterrun.cli.main import group
from clusterrun.diagnosis import table


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
