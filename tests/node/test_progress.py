"""Whether steps end, by a clock of the test's own."""

from __future__ import annotations

import pytest

from clusterrun.node.watch.hangs import LOOK_MOST_S, PATIENCE, Progress


class Watch:
    """Look once a second, as the agent does."""

    def __init__(self, floor_s: float) -> None:
        self.progress = Progress(floor_s=floor_s)
        self.now, self.steps, self.printed = 1000.0, 0, 0

    def look(self) -> float:
        self.progress.look(self.now, steps=self.steps, printed=self.printed)
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


def test_steps_that_end_between_two_looks_share_its_time() -> None:
    watch = Watch(1)
    watch.train(1)
    for _ in range(4):
        watch.now, watch.steps = watch.now + 8, watch.steps + 4
        watch.look()
    assert watch.progress.limit_s == 2 * PATIENCE


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
