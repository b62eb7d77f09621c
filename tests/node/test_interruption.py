"""Who may interrupt an attempt, who was first, and how it then ends: a real page and link."""

from __future__ import annotations

import asyncio
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from clusterrun.errors import NodeExit
from clusterrun.node.base.causes import Cause, Ending
from clusterrun.node.base.tasks import SharedDisk, Tasks
from clusterrun.node.link.connection import Realm
from clusterrun.node.link.head import Head, Peer, Questions
from clusterrun.node.link.member import answer
from clusterrun.node.recovery.conclude import Account
from clusterrun.node.watch import interruption as module
from clusterrun.node.watch.interruption import (
    TRIES,
    Interruption,
    OwnSignals,
    choose,
    named_signals,
)
from clusterrun.rundir.attempt import take_attempt
from clusterrun.rundir.end import Reason, write_request
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.control_page import ControlPage


class InterruptedNode:
    """An attempt of one node and one rank; what its agent was told is written down."""

    def __init__(self, path: Path, *, warning_s: float = 120) -> None:
        self.file = path / "request"
        self.control = ControlPage(path / "control", 1)
        paths = RunPaths(root=path)
        paths.attempts_dir.mkdir()
        take_attempt(paths, 1, "")
        self.head = Head(Realm(paths=paths, attempt=1), 1, lambda: 1.0, SharedDisk())
        self.head.questions = Questions(self._send, lambda: {0})
        self.peer = self.head.peers[0] = Peer(node="n0", node_rank=0, channel=MagicMock())
        self.head.is_launched = True
        self.said: list[str] = []
        self.events: list[str] = []
        self.account = Account(paths, 1, "42")
        self.calls = 0
        own = OwnSignals(page=self.control, pids=dict)
        self.answerers = {
            "warn": own.warn,
            "hold": partial(module.hold, self.control),
            "decide": partial(module.decide, self.control),
        }
        self.interruption = Interruption(
            request=self.file,
            head=self.head,
            warning_s=warning_s,
            happened=lambda kind, **fields: self.events.append(
                " ".join(map(str, (kind, *fields.values())))
            ),
            say=self.said.append,
            account=self.account,
            disk=SharedDisk(),
            tasks=Tasks(),
            end_s=120,
        )

    def _send(self, kind: str, **fields: Any) -> None:
        def take(kind: str, **fields: Any) -> None:
            self.head.questions.take(0, fields)

        self.answering = asyncio.ensure_future(answer(fields, self.answerers, take))

    @property
    def is_cancelled(self) -> bool:
        return [failure.cause for failure in self.head.decision.failures] == [Cause.CANCELLED]

    def end_ranks(self) -> None:
        """Have the rank's process end."""
        self.head._handle(self.peer, {"type": "done", "has_left": self.control.has_left})

    def step(self) -> None:
        self.calls += 1
        self.control.count(0, self.calls)
        self.interruption.is_used = True

    async def settle(self) -> None:
        """Let the tasks that were started come to their end."""
        while running := [*self.interruption.tasks]:
            await asyncio.wait(running)

    async def warned(self, reason: Reason | None = None) -> None:
        """Have a request written, if there is a reason, and the ranks warned."""
        if reason:
            write_request(self.file, reason)
        self.interruption.handle_warning(are_caught=False)
        await self.settle()

    async def looked(self) -> None:
        await self.interruption.check_request()
        await self.settle()

    def decisions(self) -> tuple[int, bool]:
        """Count the requests that were decided, and say whether the ranks are to leave."""
        decision = self.control.save_point
        return decision.request, decision.at > 0

    async def ending(self) -> Ending:
        return await self.head.decision.wait()


@pytest.mark.parametrize(
    ("word", "code", "reason"),
    [
        ("cancel", NodeExit.CANCELLED, "cancelled, after a checkpoint"),
        ("time-limit", NodeExit.INTERRUPTED, "the time limit"),
        ("preempt", NodeExit.INTERRUPTED, "preempted"),
    ],
)
async def test_ranks_are_told_to_leave_and_the_attempt_says_why(
    tmp_path: Path, word: str, code: int, reason: str
) -> None:
    scene = InterruptedNode(tmp_path)
    scene.step()
    await scene.warned(Reason(word))
    assert scene.decisions() == (1, True)
    assert scene.events == [f"interrupted {word} True"]
    assert scene.said == [f"{reason}: the ranks are asked to save and exit"]
    scene.control.stopping(0)
    scene.end_ranks()
    ending = await scene.ending()
    assert (ending.code, ending.reason, ending.cause) == (int(code), reason, Cause.INTERRUPTED)


TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)


def test_sigterm_warns_a_rank_that_handles_several_signals() -> None:
    for handled, option, chosen in (
        ((), "USR1@90", 0),
        ((USR1, TERM), "", TERM),
        ((USR1, TERM), "BR:sigusr1@90", USR1),
        ((TERM,), "10", TERM),
    ):
        assert choose(handled, named_signals(option)) == chosen


@pytest.mark.parametrize(("left_s", "reason"), [(100, "time-limit"), (3600, "signal")])
async def test_a_warning_without_a_request_is_that_of_the_time_limit_if_that_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: int, reason: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + left_s))
    scene = InterruptedNode(tmp_path)
    scene.step()
    await scene.warned()
    assert scene.events == [f"interrupted {reason} True"]
    assert scene.said == [f"{Reason(reason).text}: the ranks are asked to save and exit"]
    assert scene.file.read_text() == f"{reason}\n"
    assert scene.file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "\xff\n"])
async def test_a_request_that_is_no_word_of_ours_is_one_for_the_time_limit(
    tmp_path: Path, text: str
) -> None:
    scene = InterruptedNode(tmp_path)
    await scene.looked()
    assert (scene.interruption.reason, scene.decisions()) == (None, (0, False))
    scene.file.write_text(text, encoding="latin-1")
    await scene.warned()
    assert scene.interruption.reason is Reason.TIME_LIMIT


async def test_two_warnings_are_one_interruption(tmp_path: Path) -> None:
    scene = InterruptedNode(tmp_path)
    scene.step()
    for reason in (Reason.CANCEL, Reason.TIME_LIMIT, Reason.PREEMPT):
        write_request(scene.file, reason)
    scene.interruption.handle_warning(are_caught=False)
    await scene.warned()
    scene.interruption.handle_warning(are_caught=False)
    scene.interruption.handle_sigterm()
    await scene.settle()
    assert scene.decisions() == (1, True)
    assert scene.events == ["interrupted cancel True"]


async def test_sigterm_without_a_word_is_a_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WORD_S", 0.1)
    scene = InterruptedNode(tmp_path)
    scene.step()
    for _ in range(1000):  # all nodes tell the head
        scene.interruption.handle_sigterm()
    assert len([*scene.interruption.tasks]) == 1
    await scene.settle()
    assert scene.interruption.reason is Reason.PREEMPT
    assert (scene.decisions(), scene.is_cancelled) == ((1, True), False)
    assert scene.file.read_text() == "preempt\n"


async def test_sigterm_with_the_batch_shells_word_ends_at_once(tmp_path: Path) -> None:
    scene = InterruptedNode(tmp_path)
    scene.step()
    asyncio.get_running_loop().call_later(0.1, write_request, scene.file, Reason.END)
    scene.interruption.handle_sigterm()
    await scene.settle()
    assert (scene.is_cancelled, scene.decisions()) == (True, (0, False))


@pytest.mark.parametrize("is_through", [True, False])
async def test_a_training_that_ends_before_it_hears_or_leaves_at_its_last_step_is_complete(
    tmp_path: Path, is_through: bool
) -> None:
    scene = InterruptedNode(tmp_path)
    scene.step()
    scene.account.is_at_last_step = is_through
    await scene.warned(Reason.TIME_LIMIT)
    if is_through:
        scene.control.stopping(0)
    scene.end_ranks()
    assert (await scene.ending()).code == 0


async def test_ranks_that_saved_and_go_on_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAVE_S", 0.1)
    scene = InterruptedNode(tmp_path)
    scene.step()
    await scene.warned(Reason.TIME_LIMIT)
    scene.account.checkpoint = 1
    scene.interruption.saved()
    ending = await scene.ending()
    assert (ending.code, ending.reason) == (int(NodeExit.INTERRUPTED), "the time limit")


@pytest.mark.parametrize("has_saved", [True, False])
async def test_before_the_time_limit_ranks_are_ended_where_there_is_a_checkpoint(
    tmp_path: Path, has_saved: bool
) -> None:
    scene = InterruptedNode(tmp_path, warning_s=0.5)
    scene.step()
    scene.account.checkpoint = 1 if has_saved else None  # by an earlier attempt, perhaps
    scene.interruption.handle_warning(are_caught=False)
    if has_saved:
        await scene.ending()
    await asyncio.sleep(0.6)
    assert scene.head.decision.is_made is has_saved


async def test_ranks_that_never_asked_are_told_apart(tmp_path: Path) -> None:
    scene = InterruptedNode(tmp_path)
    await scene.warned(Reason.CANCEL)
    assert "no rank has called runtime.should_checkpoint() yet" in scene.said[-1]
    assert scene.events == ["interrupted cancel False"]
    scene.step()
    for _ in range(2):
        await scene.interruption.check_request()
    assert scene.events == ["interrupted cancel False", "interrupted cancel True"]


async def test_a_node_that_is_silent_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterrun.node.link.head.REPLY_S", 0.05)
    scene = InterruptedNode(tmp_path)
    scene.step()
    scene.head.questions._members = lambda: {0, 1}
    await scene.warned(Reason.CANCEL)
    told = "not all nodes answered: the ranks could not be asked to save"
    assert scene.said[1:] == [told] * TRIES
    assert (scene.decisions(), scene.control.save_point.at) == ((TRIES, False), 0)


async def test_an_end_beats_what_interrupts(tmp_path: Path) -> None:
    scene = InterruptedNode(tmp_path)
    scene.step()
    await scene.warned(Reason.CANCEL)
    write_request(scene.file, Reason.END)
    await scene.looked()
    scene.interruption.handle_sigterm()
    await scene.settle()
    assert (scene.is_cancelled, scene.head.decision.is_held()) == (True, False)


async def test_an_end_after_the_warning_is_that_of_the_time_limit(tmp_path: Path) -> None:
    scene = InterruptedNode(tmp_path)
    await scene.warned()
    write_request(scene.file, Reason.END)
    await scene.interruption.check_request()
    ending = await scene.ending()
    assert (ending.code, ending.cause) == (int(NodeExit.CANCELLED), Cause.CANCELLED)
    assert ending.reason == "the time limit: the ranks did not exit in time"


def test_a_page_that_no_rank_uses_says_so(tmp_path: Path) -> None:
    page = ControlPage(tmp_path / "control", 2)
    assert (page.is_used, page.calls(1), page.has_stopped(1)) == (False, 0, False)
    page.count(1, 1)
    page.set_does_not_save_on(1)
    page.stopping(1)
    assert (page.is_used, page.calls(1), page.has_stopped(1)) == (True, 1, True)
    assert [page.does_not_save_on(rank) for rank in page.ranks] == [False, True]
