"""What the head asks the other nodes: who answers, who is silent, who leaves meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterrun.cli.diagnose import _hang_lines
from clusterrun.errors import ClusterrunError
from clusterrun.node.base.tasks import SharedDisk
from clusterrun.node.link import head as module
from clusterrun.node.link.head import Questions
from clusterrun.node.watch import hangs as hangs_module
from clusterrun.node.watch.hangs import RankPlace, answer_looks, from_data, to_data
from clusterrun.rundir.end import answer_path, request_look, requests
from clusterrun.shared.files import read_json
from clusterrun.verbs import hangs
from tests.patience import patience

ANSWER_S = 0.2


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPLY_S", ANSWER_S)
    monkeypatch.setattr(hangs_module, "REQUESTS_S", 0.01)


class Members:
    """Nodes that answer what `given` has for a question; of the others, the silent ones stay."""

    def __init__(
        self, given: Mapping[str, Mapping[int, Any]], silent: tuple[int, ...] = ()
    ) -> None:
        self.given, self.silent, self.present = given, silent, {0, 1, 2}
        self.asked: list[dict[str, Any]] = []
        self.questions = Questions(self.send, lambda: self.present)

    def send(self, kind: str, **fields: Any) -> None:
        assert kind == "ask"
        self.asked.append(fields)
        given = self.given[fields["what"]]
        self.present &= {*given, *self.silent}
        for member, message in given.items():
            answer = {**message, "question": fields["question"]}
            asyncio.get_running_loop().call_soon(self.questions.take, member, answer)

    def leave(self, member: int) -> None:
        self.present.discard(member)
        self.questions.drop_gone()

    def look(self, directory: Path) -> None:
        """Let the head answer requests to look where the ranks are."""
        looks = answer_looks(directory, ("n0", "n1", "n2"), self.questions, SharedDisk())
        self.looking = asyncio.ensure_future(looks)


def test_a_node_that_is_silent_does_not_keep_the_others_answers_back() -> None:
    members = Members({"stacks": {0: {"said": "a"}, 2: {"said": "c"}}}, silent=(1,))
    answers = asyncio.run(members.questions.ask("stacks", request=7))
    said = {node: given["said"] for node, given in answers.given.items()}
    assert (said, answers.silent) == ({0: "a", 2: "c"}, {1})
    assert members.asked == [{"question": 1, "what": "stacks", "request": 7}]


async def test_a_node_that_leaves_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPLY_S", 60.0)
    members = Members({"stacks": {0: {}}}, silent=(1,))
    asyncio.get_running_loop().call_later(0.05, members.leave, 1)
    answers = await members.questions.ask("stacks")
    assert (answers.given.keys(), answers.silent) == ({0}, frozenset())


async def test_a_late_answer_is_none_to_the_next_question() -> None:
    members = Members({"hold": {}, "decide": {}}, silent=(1,))
    await members.questions.ask("hold")
    asking = asyncio.ensure_future(members.questions.ask("decide"))
    await asyncio.sleep(0)
    members.questions.take(1, {"question": 1, "said": "to the first"})
    assert (await asking).silent == {1}


# Where the ranks are, for `diagnose --stacks`


def place(rank: int) -> RankPlace:
    return RankPlace(rank=rank, node=f"n{rank}", where=f"train.py:{rank} in step", is_waiting=False)


async def answered(request: Path) -> dict[str, Any]:
    for _ in range(round(1000 * patience())):
        if answer_path(request).exists():
            found: dict[str, Any] = json.loads(answer_path(request).read_text())
            return found
        await asyncio.sleep(0.01)
    raise AssertionError("no answer")


STACKS = {rank: to_data([place(rank)]) for rank in range(3)}


async def test_stacks_of_all_nodes_are_answered_once(tmp_path: Path) -> None:
    nodes = Members({"stacks": STACKS, "dump": {rank: {} for rank in range(3)}})
    nodes.look(tmp_path)
    (tmp_path / "outcome.json").touch()  # no request
    found = await answered(request_look(tmp_path))
    await answered(request_look(tmp_path))
    assert from_data(found) == [place(0), place(1), place(2)]
    assert (found["dumped"], found["silent"]) == ([], [])
    assert [asked["what"] for asked in nodes.asked] == ["stacks", "dump"] * 2


@pytest.mark.parametrize(
    ("stacks", "dump", "dumped", "silent"),
    [
        (STACKS, {rank: {"dumped": [rank]} for rank in range(3)}, [0, 1, 2], []),
        (STACKS, {0: {"dumped": [0]}, 1: {"dumped": []}, 2: {"dumped": [2]}}, [0, 2], []),
        (STACKS, {0: {"dumped": [0]}, 2: {"dumped": [2]}}, [0, 2], ["n1"]),
        ({1: STACKS[1]}, {1: {"dumped": [1]}}, [1], ["n0", "n2"]),
    ],
)
async def test_who_dumped_and_who_is_silent(
    tmp_path: Path, stacks: Any, dump: Any, dumped: list[int], silent: list[str]
) -> None:
    nodes = Members({"stacks": stacks, "dump": dump})
    nodes.look(tmp_path)
    found = await answered(request_look(tmp_path))
    assert (found["dumped"], found["silent"]) == (dumped, silent)
    assert nodes.asked[-1]["live"] is True
    names = {at.node for at in from_data(found)}
    assert names == {f"n{number}" for number in stacks}


# The other end: a request to show where the ranks are, and its answer


def test_an_answer_is_not_looked_up_before_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS would remember for a minute that it is missing."""
    pauses = []

    def read(path: Path) -> object:
        assert path.exists()
        return read_json(path)

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        (request,) = requests(tmp_path)
        if len(pauses) == 3:
            answer_path(request).write_text('{"silent": ["n2"]}')

    monkeypatch.setattr(hangs, "read_json", read)
    monkeypatch.setattr(hangs.time, "sleep", sleep)
    assert hangs._ask(tmp_path) == {"silent": ["n2"]}
    assert not list(tmp_path.iterdir())


def test_without_dumps_nothing_is_known_of_waits() -> None:
    nothing, one = (hangs.Hang(nodes={0: "n1", 1: "n2"}, dumped=number) for number in (0, 1))
    missing = "left no dump: the flight recorder is off, or hangs"
    assert list(_hang_lines(nothing)) == [f"FR      2 ranks {missing}"]
    assert list(_hang_lines(one)) == [
        "FR      no rank has waited in a collective for 10 s",
        f"        1 rank {missing}",
    ]


def test_agents_that_do_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "ANSWER_S", 0.05)
    with pytest.raises(ClusterrunError, match="did not answer"):
        hangs._ask(tmp_path)
    assert not list(tmp_path.iterdir())
