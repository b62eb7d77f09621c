"""One step for all ranks to save at: real pages of memory, ranks that count, nodes that answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterrun.node.link import questions as questions_module
from clusterrun.node.link.questions import Questions, answer
from clusterrun.node.watch.interruption import Saving, decide, hold
from clusterrun.shared.control_page import ControlPage

RANKS = 2


class SavingNode:
    """A node's page with ranks that call as CallCounter does, one call a turn."""

    def __init__(self, path: Path) -> None:
        self.control = ControlPage(path, RANKS)
        self.calls = [0] * RANKS
        self.saved: list[tuple[int, int]] = []

    def turn(self, rank: int) -> None:
        """Make a call, unless the last one still waits."""
        held, decision = self.control.held, self.control.save_point
        if self.calls[rank] and held > decision.request:
            return
        self._end_call(rank)
        self.calls[rank] += 1
        self.control.count(rank, self.calls[rank])
        if self.control.held <= self.control.save_point.request:
            self._end_call(rank)

    def _end_call(self, rank: int) -> None:
        decision = self.control.save_point
        found = (rank, self.calls[rank])
        if decision.at and self.calls[rank] == decision.at and found not in self.saved:
            self.saved.append(found)


class SavingNodes:
    """The conductor's questions, and nodes that hear of them after a moment of their own."""

    def __init__(self, root: Path, nodes: int) -> None:
        self.nodes = [SavingNode(root / f"control{n}") for n in range(nodes)]
        self.silent: set[int] = set()
        self.present = set(range(nodes))
        self.questions = Questions(self._send, lambda: self.present)
        self.saving = Saving(self.questions)
        self._tasks: list[asyncio.Task[None]] = []

    def _send(self, kind: str, **fields: Any) -> None:
        for member in self.present - self.silent:
            self._tasks.append(asyncio.ensure_future(self._answer(member, fields)))

    async def _answer(self, member: int, message: dict[str, Any]) -> None:
        page = self.nodes[member].control

        def send(kind: str, **fields: Any) -> None:
            self.questions.take(member, fields)

        await answer(message, {"hold": partial(hold, page), "decide": partial(decide, page)}, send)

    def leave(self, member: int) -> None:
        self.present.discard(member)
        self.questions.look_around()

    async def train_while(self, work: Any, order: Callable[[], int], extra: int = 40) -> Any:
        """Let ranks call in an order that `order` chooses, until the work is done and beyond."""
        task = asyncio.ensure_future(work)
        while not task.done():
            self._turn(order())
            await asyncio.sleep(0.0005)
        for _ in range(extra):
            for which in range(len(self.nodes) * RANKS):
                self._turn(which)
        return await task

    def _turn(self, which: int) -> None:
        node, rank = divmod(which % (len(self.nodes) * RANKS), RANKS)
        self.nodes[node].turn(rank)

    def saves(self) -> list[tuple[int, int]]:
        return [save for node in self.nodes for save in sorted(node.saved)]


def in_turn() -> Callable[[], int]:
    numbers = iter(range(10**9))
    return lambda: next(numbers)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_all_ranks_save_at_the_same_call_in_whatever_order_they_run(
    tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    async def scene() -> tuple[int, list[tuple[int, int]]]:
        cluster = SavingNodes(tmp_path_factory.mktemp("nodes"), 3)
        turns = iter(order * 1000)
        at = await cluster.train_while(cluster.saving.agree(), lambda: next(turns, 0), extra=1000)
        return at, cluster.saves()

    at, saves = asyncio.run(scene())
    assert at > 0
    assert saves == [(rank, at) for _ in range(3) for rank in range(RANKS)]


async def test_where_a_node_is_silent_nobody_saves_and_all_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions_module, "ANSWER_S", 0.1)
    cluster = SavingNodes(tmp_path, 3)
    cluster.silent.add(2)
    order = in_turn()
    at = await cluster.train_while(cluster.saving.agree(), order)
    assert (at, cluster.saves()) == (0, [])
    assert all(calls > 20 for node in cluster.nodes for calls in node.calls)
    cluster.silent.clear()
    at = await cluster.train_while(cluster.saving.agree(), order)
    assert cluster.saves() == [(rank, at) for _ in range(3) for rank in range(RANKS)]


async def test_a_node_that_leaves_meanwhile_does_not_hold_the_others(tmp_path: Path) -> None:
    cluster = SavingNodes(tmp_path, 3)
    cluster.silent.add(2)
    asyncio.get_running_loop().call_later(0.05, cluster.leave, 2)
    order = in_turn()
    at = await cluster.train_while(cluster.saving.agree(), order)
    saved = cluster.nodes[1].saved
    assert sorted(saved) == [(rank, at) for rank in range(RANKS)]


def test_a_page_that_no_rank_uses_says_so(tmp_path: Path) -> None:
    node = SavingNode(tmp_path / "control")
    page = node.control
    assert (page.is_used, page.calls(1), page.has_stopped(1)) == (False, 0, False)
    node.turn(1)
    page.shielded(1)
    page.stopping(1)
    assert (page.is_used, page.calls(1), page.has_stopped(1)) == (True, 1, True)
    assert [page.is_shielded(rank) for rank in page.ranks] == [False, True]
