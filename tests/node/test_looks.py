"""What is answered when `diagnose --stacks` asks where the ranks are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterrun.node.base.tasks import SharedDisk
from clusterrun.node.link.questions import Questions
from clusterrun.node.watch.looks import Looks
from clusterrun.node.watch.stacks import RankPlace, from_data, to_data
from clusterrun.rundir.request import answer_path, request_look
from tests.patience import patience


def place(rank: int) -> RankPlace:
    return RankPlace(rank=rank, node=f"n{rank}", where=f"train.py:{rank} in step", is_waiting=False)


class Nodes:
    """Three nodes with a rank each; they answer what `given` has for a question."""

    def __init__(self, directory: Path, given: Mapping[str, Mapping[int, Any]]) -> None:
        self._given = given
        self.asked: list[dict[str, Any]] = []
        self.present = {0, 1, 2}
        self.looks = Looks(
            directory=directory,
            nodes=("n0", "n1", "n2"),
            questions=Questions(self._send, lambda: self.present),
            disk=SharedDisk(),
        )

    def _send(self, kind: str, **fields: Any) -> None:
        self.asked.append(fields)
        given = self._given[fields["what"]]
        self.present &= given.keys()  # the others are gone
        for member, message in given.items():
            answer = {**message, "question": fields["question"]}
            asyncio.get_running_loop().call_soon(self.looks.questions.take, member, answer)

    async def answered(self, request: Path) -> dict[str, Any]:
        for _ in range(round(1000 * patience())):
            await self.looks.look()
            if answer_path(request).exists():
                found: dict[str, Any] = json.loads(answer_path(request).read_text())
                return found
            await asyncio.sleep(0.01)
        raise AssertionError("no answer")


STACKS = {rank: to_data([place(rank)]) for rank in range(3)}


async def test_stacks_of_all_nodes_are_answered_once(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, {"stacks": STACKS})
    (tmp_path / "outcome.json").touch()  # no request
    found = await nodes.answered(request_look(tmp_path, with_dumps=False))
    await nodes.looks.look()
    assert from_data(found) == [place(0), place(1), place(2)]
    assert (found["dumped"], found["silent"]) == ([], [])
    assert [asked["what"] for asked in nodes.asked] == ["stacks"]


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
    nodes = Nodes(tmp_path, {"stacks": stacks, "dump": dump})
    found = await nodes.answered(request_look(tmp_path, with_dumps=True))
    assert (found["dumped"], found["silent"]) == (dumped, silent)
    assert nodes.asked[-1]["live"] is True
    names = {at.node for at in from_data(found)}
    assert names == {f"n{number}" for number in stacks}
