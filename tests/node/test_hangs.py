"""A hang is told once, with who is where, whatever the other nodes say."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterrun.errors import NodeExit
from clusterrun.node.base.causes import Failure
from clusterrun.node.forward.spool import Spool
from clusterrun.node.link.questions import Questions
from clusterrun.node.watch import hangs, stacks
from clusterrun.node.watch.hangs import EXTENSIONS, HangWatch
from clusterrun.node.watch.saving import Page
from clusterrun.rundir.outcome import Cause
from clusterrun.shared.control_page import ControlPage

Play = Callable[..., list[Failure]]


class TickingClock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 5.0


def place(rank: int, where: str, *, waits: bool = True) -> stacks.RankPlace:
    node = f"n{1 + rank // 2}"
    return stacks.RankPlace(rank=rank, node=node, where=where, is_waiting=waits)


WAITING = [place(0, "train.py:9 in step"), place(1, "train.py:9 in step")]


class HangingRanks:
    """The head of two nodes; `answer` is what the other says of its ranks."""

    def __init__(
        self, root: Path, clock: TickingClock, answer: dict[str, Any] | None, silence_s: float
    ) -> None:
        self.clock, self.answer = clock, answer
        self.root = root
        self.failures: list[Failure] = []
        self.control = ControlPage(root / "control", 1)
        self.calls = self.signs = self.asked = 0
        self.questions = Questions(self._send, lambda: {1})
        self.watch = HangWatch(
            floor_s=60,
            silence_s=silence_s,
            node="n1",
            spool=Spool(root=root),
            page=Page(self.control, 1),
            questions=self.questions,
            own_places=self._own,
            own_signs=lambda: self.signs,
            failed=self.failures.append,
        )

    def _send(self, kind: str, **fields: Any) -> None:
        self.asked += 1
        if self.answer is not None:
            message = {"question": fields["question"], **self.answer}
            asyncio.get_running_loop().call_soon(self.questions.take, 1, message)

    async def _own(self) -> list[stacks.RankPlace]:
        return WAITING

    async def settle(self) -> None:
        """Let the tasks that were started come to their end."""
        while len(self.watch._tasks):
            await asyncio.wait(self.watch._tasks)

    async def idle(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.now += 1
            self.watch.look()
            await asyncio.sleep(0)

    def call(self) -> None:
        self.calls += 1
        self.control.count(0, self.calls)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    clock = TickingClock()
    monkeypatch.setattr(hangs, "time", clock)
    monkeypatch.setattr(hangs, "AGAIN_S", 0.05)
    monkeypatch.setattr("clusterrun.node.link.questions.ANSWER_S", 0.1)

    def played(
        deed: Any, answer: dict[str, Any] | None = None, *, silence_s: float = 0
    ) -> list[Failure]:
        async def scene() -> list[Failure]:
            scene = HangingRanks(tmp_path, clock, answer, silence_s)
            await deed(scene)
            await scene.settle()
            return scene.failures

        return asyncio.run(scene())

    return played


async def hang(scene: HangingRanks) -> None:
    scene.call()
    await scene.idle(1)
    await scene.idle(300)


def test_the_rank_that_the_others_wait_for_is_named(play: Play) -> None:
    late = [place(2, "train.py:9 in step"), place(3, "data.py:3 in load", waits=False)]
    (failure,) = play(hang, stacks.to_data(late))
    assert (failure.node, failure.rank, failure.where) == ("n2", 3, "data.py:3")
    assert (failure.code, failure.cause.value) == (int(NodeExit.HUNG), "hung")
    assert failure.message == (
        "no step ended for 61 s: 3 ranks (e.g. rank 0) at train.py:9 in step;"
        " rank 3 at data.py:3 in load"
    )


def test_a_rank_that_does_not_run_is_told_from_one_that_waits(play: Play) -> None:
    found = {}
    for state in ("stopped by a signal", "gone", ""):
        there = dataclasses.replace(place(3, "train.py:9 in step"), state=state)
        (failure,) = play(hang, stacks.to_data([there]))
        found[state] = failure.cause
    assert found == {"stopped by a signal": Cause.HALTED, "gone": Cause.HUNG, "": Cause.HUNG}


def test_a_node_that_is_silent_is_said_and_the_others_are_heard(play: Play) -> None:
    (failure,) = play(hang)
    assert failure.message.endswith(
        "2 ranks (e.g. rank 0) at train.py:9 in step; 1 node did not answer"
    )


@pytest.mark.parametrize("sign", ["calls", "steps", "events", "output"])
def test_each_sign_of_life_is_enough(play: Play, sign: str) -> None:
    async def live(scene: HangingRanks) -> None:
        scene.call()
        for number in range(10):
            await scene.idle(50)
            if sign == "calls":
                scene.call()
            elif sign == "steps":
                scene.watch.heard({"type": "step", "step": number, "total": 99})
            elif sign == "events":
                scene.watch.heard({"type": "checkpoint", "step": number})
            else:
                (scene.root / "rank_0.out").write_text("x" * (1 + number))

    assert play(live) == []
    if sign in ("steps", "output"):
        assert play(live, silence_s=90) == []


async def fall_silent(scene: HangingRanks) -> None:
    """Print once, then nothing for a long time."""
    await scene.idle(1000)  # nothing was printed yet: a start may take any time
    (scene.root / "launcher.out").write_text("x")
    await scene.idle(1000)
    (scene.root / "rank_0.out").write_text("x")
    for _ in range(5):
        await scene.idle(100)
        await scene.settle()


def test_silence_is_a_hang_only_where_that_was_asked_for(play: Play) -> None:
    assert play(fall_silent, {"silent_s": 1000.0}) == []
    (failure,) = play(fall_silent, {"silent_s": None}, silence_s=90)
    assert failure.message == (
        "no rank has printed anything for 91 s: 2 ranks (e.g. rank 0) at train.py:9 in step"
    )
    assert (failure.cause, failure.code) == (Cause.HUNG, int(NodeExit.HUNG))


def test_output_on_another_node_is_no_silence(play: Play) -> None:
    async def live(scene: HangingRanks) -> None:
        await fall_silent(scene)
        assert 0 < scene.asked <= 500 // 90  # all nodes, once in that time

    assert play(live, {"silent_s": 89.0}, silence_s=90) == []


def test_ranks_that_went_on_while_they_were_asked_do_not_hang(play: Play) -> None:
    """They may be caught in the same place twice, as in each step's backward pass."""

    async def deed(scene: HangingRanks) -> None:
        await hang(scene)
        assert len(scene.watch._tasks) == 1
        scene.call()

    assert play(deed, {"places": []}) == []


def test_ranks_that_get_on_without_a_step_are_given_more_time_but_not_for_ever(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(range(1000))

    async def own(scene: HangingRanks) -> list[stacks.RankPlace]:
        return [dataclasses.replace(WAITING[0], stack=next(looks))]

    monkeypatch.setattr(HangingRanks, "_own", own)
    found: list[int] = []

    async def deed(scene: HangingRanks) -> None:
        scene.call()
        for _ in range(EXTENSIONS + 1):
            await scene.idle(100)
            found.append(len(scene.failures))
            assert len(scene.watch._tasks) == 1
            await scene.settle()

    assert len(play(deed, {"places": []})) == 1
    assert found == [0] * (EXTENSIONS + 1)


@pytest.mark.parametrize("moved", [hangs.IDLE_BYTES, hangs.SAVE_BYTES * 10])
def test_a_save_is_given_time_while_bytes_move(play: Play, moved: int) -> None:
    """The stacks stand still, as in a long torch.save; a waiting rank's store is polled."""
    found: list[int] = []

    async def deed(scene: HangingRanks) -> None:
        def signs() -> int:
            scene.signs += moved
            return scene.signs

        scene.watch.own_signs = signs
        scene.call()
        for _ in range(EXTENSIONS + 3):
            await scene.idle(100)
            await scene.settle()
        found.append(len(scene.failures))
        scene.watch.own_signs = lambda: scene.signs  # the save is done
        await scene.idle(100)

    assert len(play(deed, {"places": []})) == 1
    assert found == [moved < hangs.SAVE_BYTES]


@pytest.mark.parametrize("is_saving", [False, True])
def test_ranks_that_outlive_others_may_save_but_not_do_nothing(
    play: Play, monkeypatch: pytest.MonkeyPatch, is_saving: bool
) -> None:
    monkeypatch.setattr(hangs, "LEAVERS_LOOK_S", 0.001)
    found: list[int] = []

    async def deed(scene: HangingRanks) -> None:
        def signs() -> int:
            scene.clock.now += 10
            scene.signs += is_saving and scene.clock.now < 3000
            return scene.signs

        scene.watch.own_signs = signs
        for _ in range(2):
            scene.watch.leaving()
        while scene.clock.now < 2900 and not scene.failures:
            await asyncio.sleep(0.01)
        found.append(len(scene.failures))

    late = [place(3, "train.py:99 in <module>", waits=False)]
    monkeypatch.setattr(HangingRanks, "_own", lambda scene: asyncio.sleep(0, []))
    (failure,) = play(deed, {**stacks.to_data(late), "signs": 7})
    assert found == [0 if is_saving else 1]
    assert (failure.node, failure.rank, failure.cause.value) == ("n2", 3, "hung")
    assert failure.message == (
        "other ranks have ended; no progress for 70 s: rank 3 at train.py:99 in <module>"
    )


def test_ranks_that_outlive_others_and_compute_are_left_alone(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "LEAVERS_LOOK_S", 0.001)
    monkeypatch.setattr(hangs, "AGAIN_S", 0.001)
    looks = iter(range(20))

    async def own(scene: HangingRanks) -> list[stacks.RankPlace]:
        return [dataclasses.replace(WAITING[0], stack=next(looks, 99))]

    monkeypatch.setattr(HangingRanks, "_own", own)

    async def deed(scene: HangingRanks) -> None:
        def signs() -> int:
            scene.clock.now += 10
            return 0

        scene.watch.own_signs = signs
        scene.watch.leaving()

    (failure,) = play(deed, {"places": []})
    assert next(looks, None) is None
    assert failure.rank == 0
