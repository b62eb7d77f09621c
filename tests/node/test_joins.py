"""Ranks that run and join nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from clusterrun.node.link.questions import Questions
from clusterrun.node.watch import hangs
from clusterrun.shared.control_page import ControlPage, Joining
from clusterrun.shared.joined import HINT, HINT_WAITING, Unjoined


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "JOINING_S", 0)


def found(*given: dict[str, Any]) -> Unjoined | None:
    """Ask nodes that answer so, in this order."""

    def send(kind: str, **fields: Any) -> None:
        for node, answer in enumerate(given):
            message = {"question": fields["question"], **answer}
            asyncio.get_running_loop().call_soon(questions.take, node, message)

    questions = Questions(send, lambda: range(len(given)))
    return asyncio.run(hangs.unjoined(questions))


def test_the_ranks_of_all_nodes_are_counted() -> None:
    first = {"running": 2, "waiting": 0, "joined": 0}
    assert found(first) == Unjoined(running=2, waiting=0)
    other = {"running": 2, "waiting": 1, "joined": 0}
    assert found(first, other, other) == Unjoined(running=6, waiting=2)
    assert found(first, {**other, "joined": 1}) is None  # one rank that has joined is enough


def test_nothing_is_reported_before_a_rank_runs() -> None:
    states = iter([{"running": 0, "waiting": 0, "joined": 0}] * 2)
    last = {"running": 1, "waiting": 1, "joined": 0}

    def send(kind: str, **fields: Any) -> None:
        questions.take(0, {"question": fields["question"], **next(states, last)})

    questions = Questions(send, lambda: [0])
    assert asyncio.run(hangs.unjoined(questions)) == Unjoined(running=1, waiting=1)


def test_a_rank_notes_on_the_page_how_far_it_is(tmp_path: Path) -> None:
    agent = ControlPage(tmp_path / "control", 2)
    rank = ControlPage(tmp_path / "control", 2)
    assert [agent.joining(0), agent.joining(1)] == [Joining.NOT_YET] * 2
    rank.note_joining(1, Joining.WAITS)
    assert [agent.joining(0), agent.joining(1)] == [Joining.NOT_YET, Joining.WAITS]
    rank.note_joining(1, Joining.JOINED)
    rank.note_joining(1, Joining.WAITS)  # a second group
    assert agent.joining(1) is Joining.JOINED


def test_what_people_read() -> None:
    two = Unjoined(running=2, waiting=0)
    assert two.text(2) == "2 of 2 ranks are running and none has joined a process group"
    assert two.hint == HINT
    one = Unjoined(running=1, waiting=1)
    text = "1 of 4 ranks is running and none has joined a process group; 1 in init_process_group()"
    assert one.text(4) == text
    assert one.hint == HINT_WAITING
