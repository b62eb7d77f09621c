"""What the head asks the other nodes: who answers, who is silent, who leaves meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from clusterrun.node.link import questions as module
from clusterrun.node.link.questions import Questions

ANSWER_S = 0.2


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", ANSWER_S)


class Members:
    """Nodes that answer what they are asked, but for those that are silent."""

    def __init__(self, count: int, silent: tuple[int, ...] = ()) -> None:
        self.present, self.silent = set(range(1, count + 1)), silent
        self.asked: list[dict[str, Any]] = []
        self.questions = Questions(self.send, lambda: self.present)

    def send(self, kind: str, **fields: Any) -> None:
        assert kind == "ask"
        self.asked.append(fields)
        for member in self.present - set(self.silent):
            message = {"question": fields["question"], "said": f"{member}: {fields['what']}"}
            asyncio.get_running_loop().call_soon(self.questions.take, member, message)

    def leave(self, member: int) -> None:
        self.present.discard(member)
        self.questions.look_around()


def test_a_node_that_is_silent_does_not_keep_the_others_answers_back() -> None:
    members = Members(3, silent=(2,))
    answers = asyncio.run(members.questions.ask("stacks", request=7))
    said = {node: given["said"] for node, given in answers.given.items()}
    assert (said, answers.silent) == ({1: "1: stacks", 3: "3: stacks"}, {2})
    assert members.asked == [{"question": 1, "what": "stacks", "request": 7}]


async def test_a_node_that_leaves_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 60.0)
    members = Members(2, silent=(2,))
    asyncio.get_running_loop().call_later(0.05, members.leave, 2)
    answers = await asyncio.wait_for(members.questions.ask("stacks"), 10)
    assert (answers.given.keys(), answers.silent) == ({1}, frozenset())


async def test_a_late_answer_is_none_to_the_next_question() -> None:
    members = Members(1, silent=(1,))
    await members.questions.ask("hold")
    asking = asyncio.ensure_future(members.questions.ask("decide"))
    await asyncio.sleep(0)
    members.questions.take(1, {"question": 1, "said": "to the first"})
    assert (await asking).silent == {1}
