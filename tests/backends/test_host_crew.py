"""The controller's connection to a courier; a stand-in answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from clusterrun.backends.hosts import crew
from clusterrun.backends.hosts.crew import Link
from clusterrun.backends.hosts.start import Frame
from clusterrun.errors import NodeExit
from tests.patience import wait_for

COURIER = """\
import json, sys
def send(**fields):
    print(json.dumps({**fields, "size": 0}), flush=True)
print("clusterrun-output", flush=True)
for line in sys.stdin:
    kind = json.loads(line)["kind"]
    if kind == "facts":
        send(kind="answer", facts={"time": 0.0})
    elif kind == "alive":
        send(kind="answer", alive=True)
    elif kind == "wrong":
        send(kind="ended")
"""


@pytest.fixture(name="link")
def _link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr(crew, "ALIVE_S", 0.05)
    link = Link(name="h1", host="h1", first="", argv=(sys.executable, "-c", COURIER), script=b"")
    link.open()
    link.is_lost = False
    yield link
    link.close()


def test_a_host_that_sends_nonsense_is_lost(link: Link) -> None:
    link.code = None
    link.send("wrong")
    wait_for(lambda: link.code == NodeExit.NODE_LOST, "the end of the link")
    assert link.is_lost


def test_the_end_of_an_earlier_attempt_does_not_end_this_one(link: Link) -> None:
    link.attempt, link.code = 2, None
    link.take(Frame(kind="ended", fields={"code": 137, "attempt": 1}))
    assert link.code is None
    link.take(Frame(kind="ended", fields={"code": 0, "attempt": 2}))
    assert link.code == 0
