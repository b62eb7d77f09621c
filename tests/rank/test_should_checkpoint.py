"""Ranks that save and leave at the same call: what agents answer, and what ranks then do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clusterrun import runtime
from clusterrun.node.link.head import Questions
from clusterrun.node.link.member import answer
from clusterrun.node.watch.interruption import agree, decide, hold
from clusterrun.shared.control_page import AT_BITS, ControlPage, SavePoint
from tests.patience import patience, wait_for

# Ranks are in step as in a training: none is more than three calls ahead of another. They are asked
# so often only to look into each order of things.
ASKED = 12
RANK = """
import json, random, sys, time
from pathlib import Path
from clusterrun.shared import control_page as control; from clusterrun import runtime
seed, asked, spools = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
pages = [control.ControlPage(Path(spool, "control"), 2) for spool in spools]
pace = random.Random(seed)
slowness = pace.choice([0.0005, 0.002, 0.006])
call, said = 0, []
while len(said) < asked:
    while min(page.calls(rank) for page in pages for rank in range(2)) < call - 3:
        time.sleep(0.0005)
    time.sleep(pace.random() * slowness)
    call += 1
    if runtime.should_checkpoint():
        said.append(call)
print(json.dumps([call, said, runtime.should_stop()]))
"""


@pytest.fixture(name="page")
def _page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPage]:
    """The page of a node with two ranks, of which this process is number 1."""
    monkeypatch.setenv("CLUSTERRUN_SPOOL", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "1")
    runtime._save_point.cache_clear()
    yield ControlPage(tmp_path / "control", 2)
    runtime._save_point.cache_clear()


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_of_all_nodes_save_and_leave_at_the_same_calls(tmp_path: Path, seed: int) -> None:
    spools = [tmp_path / "node0", tmp_path / "node1"]
    for spool in spools:
        spool.mkdir()
    pages = [ControlPage(spool / "control", 2) for spool in spools]
    ranks = [
        start(spools, node, local, seed * 100 + node * 10 + local)
        for node in range(2)
        for local in range(2)
    ]
    saved = [0]
    for request in range(1, ASKED + 1):
        wait_for(lambda: min(p.calls(r) for p in pages for r in range(2)) >= saved[-1])  # it is met
        time.sleep(0.007 * seed)
        saved.append(ask(pages, request))
    told = [json.loads(rank.communicate(timeout=60 * patience())[0]) for rank in ranks]
    assert told == [[saved[-1], saved[1:], True]] * 4
    assert all(page.has_stopped(rank) for page in pages for rank in range(2))


def start(spools: list[Path], node: int, local_rank: int, seed: int) -> subprocess.Popen[str]:
    env = os.environ | {"CLUSTERRUN_SPOOL": str(spools[node]), "LOCAL_RANK": str(local_rank)}
    argv = [sys.executable, "-c", RANK, str(seed), str(ASKED), *map(str, spools)]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)


def ask(pages: list[ControlPage], request: int) -> int:
    """Have all ranks save at one call, as the conductor asks their nodes to."""
    answering: list[asyncio.Task[None]] = []

    def send(_: str, **question: Any) -> None:
        for node, page in enumerate(pages):
            answerers = {"hold": partial(hold, page), "decide": partial(decide, page)}

            def take(_: str, node: int = node, **given: Any) -> None:
                questions.take(node, given)

            answering.append(asyncio.ensure_future(answer(question, answerers, take)))

    questions = Questions(send, lambda: range(len(pages)))
    return asyncio.run(agree(questions, request))


def test_a_rank_that_is_behind_goes_on_to_the_call_and_does_not_wait_again(
    page: ControlPage,
) -> None:
    page.hold(1)
    page.decide(SavePoint(1, 4))
    assert [runtime.should_checkpoint() for _ in range(3)] == [False] * 3
    assert not runtime.should_stop()
    assert runtime.should_checkpoint()
    assert runtime.should_stop()
    assert page.has_stopped(1)
    assert page.calls(1) == 4


def test_a_rank_waits_for_the_decision_which_may_be_its_call(page: ControlPage) -> None:
    page.hold(1)

    def decide() -> None:
        wait_for(lambda: page.calls(1), "the call", every_s=0.01)
        page.decide(SavePoint(1, 1))

    agent = threading.Thread(target=decide)
    agent.start()
    assert [runtime.should_checkpoint() for _ in range(3)] == [True, False, False]
    agent.join()


def test_a_request_that_nobody_decides_is_given_up_and_said_once(
    page: ControlPage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runtime, "DECISION_TIMEOUT_S", 0.05)
    page.hold(1)
    assert [runtime.should_checkpoint() for _ in range(3)] == [False] * 3
    text = "clusterrun: no save point was chosen within 0 s; training continues\n"
    assert capsys.readouterr().err == text
    page.decide(SavePoint(1, 0))  # to do nothing
    assert not runtime.should_checkpoint()
    page.hold(2)
    page.decide(SavePoint(2, 6))
    assert [runtime.should_checkpoint() for _ in range(2)] == [False, True]
    assert runtime.should_stop()


def test_a_forked_child_has_no_calls_of_its_own(page: ControlPage) -> None:
    assert not runtime.should_checkpoint()
    child = os.fork()
    if child == 0:
        page.hold(1)
        survives_sigterm = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        os._exit(int(runtime.should_checkpoint() or survives_sigterm))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert page.calls(1) == 1


@pytest.mark.parametrize("page_is", ["of no run", "missing", "a directory"])
def test_without_a_page_that_can_be_mapped_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_is: str
) -> None:
    if page_is == "a directory":
        (tmp_path / "control").mkdir()
    monkeypatch.setenv("CLUSTERRUN_SPOOL", "" if page_is == "of no run" else str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    runtime._save_point.cache_clear()
    assert not runtime.should_checkpoint()
    assert not runtime.should_stop()
    runtime._save_point.cache_clear()


def test_a_decision_is_read_as_it_was_written(page: ControlPage) -> None:
    request, at = (1 << (64 - AT_BITS)) - 1, (1 << AT_BITS) - 1
    for decision in [SavePoint(0, 0), SavePoint(1, 7), SavePoint(request, at)]:
        page.decide(decision)
        assert page.save_point == decision


READER = """
import ctypes, os
from clusterrun import runtime
runtime.should_checkpoint()
libc = ctypes.CDLL(None, use_errno=True)
byte = ctypes.create_string_buffer(1)
os.write(1, b"r")
count = libc.read(0, byte, 1)
os.write(1, f"{count} {os.strerror(ctypes.get_errno())} {byte.raw}".encode())
"""


def test_a_c_library_that_waits_sees_no_sigterm(page: ControlPage, tmp_path: Path) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", READER],
        env=os.environ | {"CLUSTERRUN_SPOOL": str(tmp_path), "LOCAL_RANK": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert rank.stdout is not None
    assert rank.stdout.read(1) == b"r"
    assert page.does_not_save_on(0)
    for _ in range(10):  # some of them while it is in read()
        time.sleep(0.05)
        rank.send_signal(signal.SIGTERM)
    assert rank.communicate(b"x", timeout=60 * patience())[0] == b"1 Success b'x'"
