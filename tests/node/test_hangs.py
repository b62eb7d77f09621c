"""A hang is told once, with who is where, whatever the other nodes say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from clusterrun.errors import NodeExit
from clusterrun.node.base.causes import Failure
from clusterrun.node.base.tasks import Tasks
from clusterrun.node.link.head import Questions
from clusterrun.node.watch import hangs
from clusterrun.node.watch.hangs import EXTENSIONS, LOOK_MOST_S, PATIENCE, HangWatch, Progress
from clusterrun.rundir.end import Cause
from clusterrun.shared.control_page import ControlPage

Make = Callable[..., "HangingRanks"]


class TickingClock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def place(rank: int, where: str, *, waits: bool = True) -> hangs.RankPlace:
    node = f"n{1 + rank // 2}"
    return hangs.RankPlace(rank=rank, node=node, where=where, is_waiting=waits)


WAITING = [place(0, "train.py:9 in step"), place(1, "train.py:9 in step")]


class HangingRanks:
    """Two nodes; `answer` is what the second says of its ranks, and the first has `places`."""

    def __init__(self, clock: TickingClock, answer: dict[str, Any] | None) -> None:
        self.clock, self.answer = clock, answer
        self.failures: list[Failure] = []
        self.calls = 0
        self.places: Callable[[], list[hangs.RankPlace]] = lambda: WAITING
        self.signs: Callable[[], int] = lambda: 0
        self.questions = Questions(self._send, lambda: {0, 1})
        self.watch = HangWatch(
            floor_s=60,
            node="n1",
            questions=self.questions,
            failed=self.failures.append,
            tasks=Tasks(),
        )

    def _send(self, kind: str, **fields: Any) -> None:
        is_of_signs = fields["what"] == "signs"
        own = {"signs": self.signs()} if is_of_signs else hangs.to_data(self.places())
        for node, answer in enumerate((own, self.answer)):
            if answer is not None:
                message = {"question": fields["question"], **answer}
                asyncio.get_running_loop().call_soon(self.questions.take, node, message)

    async def settle(self) -> None:
        """Let the tasks that were started come to their end."""
        while running := [*self.watch.tasks]:
            await asyncio.wait(running)

    async def idle(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.now += 1
            self.watch.check()
            await asyncio.sleep(0)

    def call(self) -> None:
        self.calls += 1
        self.watch.heard_of(calls=self.calls, printed=0)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    clock = TickingClock()
    monkeypatch.setattr(hangs, "time", clock)
    monkeypatch.setattr(hangs, "AGAIN_S", 0.05)
    monkeypatch.setattr(hangs, "LEAVERS_LOOK_S", 0.001)
    monkeypatch.setattr("clusterrun.node.link.head.REPLY_S", 0.1)

    def made(answer: dict[str, Any] | None = None) -> HangingRanks:
        return HangingRanks(clock, answer)

    return made


async def hung(scene: HangingRanks) -> Failure:
    """Let a step begin that does not end; return the failure."""
    scene.call()
    await scene.idle(1)
    await scene.idle(300)
    await scene.settle()
    (failure,) = scene.failures
    return failure


async def test_the_rank_that_the_others_wait_for_is_named(make: Make) -> None:
    late = [place(2, "train.py:9 in step"), place(3, "data.py:3 in load", waits=False)]
    failure = await hung(make(hangs.to_data(late)))
    assert (failure.node, failure.rank, failure.where) == ("n2", 3, "data.py:3")
    assert (failure.code, failure.cause.value) == (int(NodeExit.HUNG), "hung")
    assert failure.message == (
        "no step ended for 61 s: 3 ranks (e.g. rank 0) at train.py:9 in step;"
        " rank 3 at data.py:3 in load"
    )


@pytest.mark.parametrize(
    ("state", "cause"),
    [("stopped by a signal", Cause.HALTED), ("gone", Cause.HUNG), ("", Cause.HUNG)],
)
async def test_a_rank_that_does_not_run_is_told_from_one_that_waits(
    make: Make, state: str, cause: Cause
) -> None:
    there = place(3, "train.py:9 in step")._replace(state=state)
    assert (await hung(make(hangs.to_data([there])))).cause is cause


async def test_a_node_that_is_silent_is_said_and_the_others_are_heard(make: Make) -> None:
    found = "2 ranks (e.g. rank 0) at train.py:9 in step; 1 node did not answer"
    assert (await hung(make())).message.endswith(found)


@pytest.mark.parametrize("sign", ["calls", "steps", "events", "output"])
async def test_each_sign_of_life_is_enough(make: Make, sign: str) -> None:
    scene = make()
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
            scene.watch.heard_of(calls=scene.calls, printed=1 + number)
    await scene.settle()
    assert scene.failures == []


async def test_ranks_that_went_on_while_they_were_asked_do_not_hang(make: Make) -> None:
    """They may be caught in the same place twice, as in each step's backward pass."""
    scene = make({"places": []})
    scene.call()
    await scene.idle(1)
    await scene.idle(300)
    assert len([*scene.watch.tasks]) == 1
    scene.call()
    await scene.settle()
    assert scene.failures == []


async def test_ranks_that_get_on_without_a_step_are_given_more_time_but_not_for_ever(
    make: Make,
) -> None:
    scene, looks = make({"places": []}), iter(range(1000))

    scene.places = lambda: [WAITING[0]._replace(stack=next(looks))]
    scene.call()
    for _ in range(EXTENSIONS + 1):
        await scene.idle(100)
        assert (scene.failures, len([*scene.watch.tasks])) == ([], 1)
        await scene.settle()
    assert len(scene.failures) == 1


@pytest.mark.parametrize("moved", [hangs.IDLE_BYTES, hangs.SAVE_BYTES * 10])
async def test_a_save_is_given_time_while_bytes_move(make: Make, moved: int) -> None:
    """The stacks stand still, as in a long torch.save; a waiting rank's store is polled."""
    scene, sums = make({"places": []}), count(0, moved)
    scene.signs = lambda: next(sums)
    scene.call()
    for _ in range(EXTENSIONS + 3):
        await scene.idle(100)
        await scene.settle()
    assert len(scene.failures) == (moved < hangs.SAVE_BYTES)
    scene.signs = lambda: 0  # the save is done
    await scene.idle(100)
    await scene.settle()
    assert len(scene.failures) == 1


@pytest.mark.parametrize("is_saving", [False, True])
async def test_ranks_that_outlive_others_may_save_but_not_do_nothing(
    make: Make, is_saving: bool
) -> None:
    late = [place(3, "train.py:99 in <module>", waits=False)]
    scene, moved = make({**hangs.to_data(late), "signs": 7}), 0

    def signs() -> int:
        nonlocal moved
        scene.clock.now += 10
        moved += is_saving and scene.clock.now < 3000
        return moved

    scene.places, scene.signs = list, signs
    for _ in range(2):
        scene.watch.watch_leavers()
    while scene.clock.now < 2900 and not scene.failures:
        await asyncio.sleep(0.01)
    assert len(scene.failures) == (not is_saving)
    await scene.settle()
    (failure,) = scene.failures
    assert (failure.node, failure.rank, failure.cause.value) == ("n2", 3, "hung")
    assert failure.message == (
        "other ranks have ended; no progress for 70 s: rank 3 at train.py:99 in <module>"
    )


async def test_ranks_that_outlive_others_and_compute_are_left_alone(make: Make) -> None:
    scene, looks = make({"places": []}), iter(range(20))

    def signs() -> int:
        scene.clock.now += 10
        return 0

    scene.places = lambda: [WAITING[0]._replace(stack=next(looks, 99))]
    scene.signs = signs
    scene.watch.watch_leavers()
    await scene.settle()
    (failure,) = scene.failures
    assert (next(looks, None), failure.rank) == (None, 0)


# The time of a step, by a clock of the test's own


class Watch:
    """Look once a second, as the agent does."""

    def __init__(self, floor_s: float) -> None:
        self.progress = Progress(floor_s=floor_s)
        self.now, self.steps, self.printed = 1000.0, 0, 0

    def look(self) -> float:
        self.progress.record(self.now, steps=self.steps, printed=self.printed)
        return self.progress.stalled_s

    def idle(self, seconds: int) -> float:
        for _ in range(seconds):
            self.now += 1
            self.look()
        return self.progress.stalled_s

    def train(self, steps: int, each_s: int = 1) -> None:
        for _ in range(steps):
            self.idle(each_s - 1)
            self.now, self.steps = self.now + 1, self.steps + 1
            assert self.look() == 0


def test_a_step_that_does_not_end_is_told_with_its_time() -> None:
    watch = Watch(60)
    assert watch.idle(10_000) == 0, "before the first step"
    watch.train(5)
    for _ in range(2):
        assert watch.idle(60) == 0
        assert watch.idle(1) == 61
        assert watch.idle(9) == 70
        watch.train(1)
    for _ in range(7):  # an agent that looks seldom
        watch.now += LOOK_MOST_S
        stalled_s = watch.look()
    assert stalled_s == 7 * LOOK_MOST_S
    off = Watch(0)
    off.train(5)
    assert off.idle(10_000) == 0


def test_the_limit_follows_the_usual_step() -> None:
    watch = Watch(60)
    watch.train(8, each_s=30)
    watch.train(1, each_s=90)
    assert watch.progress.limit_s == 30 * PATIENCE, "one slow step changes nothing"
    assert watch.idle(30 * PATIENCE) == 0
    assert watch.idle(1) > 0
    watch = Watch(1)
    watch.train(1)
    for _ in range(4):
        watch.now, watch.steps = watch.now + 8, watch.steps + 4
        watch.look()
    assert watch.progress.limit_s == 2 * PATIENCE, "steps between two looks share their time"


def test_ranks_that_print_do_not_hang() -> None:
    watch = Watch(60)
    watch.train(5)
    for _ in range(10):
        assert watch.idle(50) == 0
        watch.printed += 1
    assert watch.idle(62) > 0


@pytest.mark.parametrize("suspended_s", [3600, 86_400])
def test_a_job_that_the_scheduler_suspended_does_not_hang(suspended_s: int) -> None:
    watch = Watch(60)
    watch.train(5)
    watch.now += suspended_s
    assert watch.look() == 0
    watch.train(2)
    assert watch.progress.limit_s == 60
    assert watch.idle(61) > 0


def test_a_rank_notes_on_the_page_that_it_has_joined(tmp_path: Path) -> None:
    agent = ControlPage(tmp_path / "control", 2)
    ControlPage(tmp_path / "control", 2).joined(1)
    assert [agent.has_joined(0), agent.has_joined(1)] == [False, True]
