"""Where ranks are: real processes with faulthandler, and what is made of many answers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from clusterrun.node.forward.spool import Spool
from clusterrun.node.watch import hangs
from clusterrun.node.watch.hangs import RankPlace, places, sentence, suspect
from tests.patience import patience

pytestmark = pytest.mark.timeout(120)

_SETUP = """
import faulthandler, sys, threading, time
from clusterrun.shared.control_page import STACKS_SIGNAL
faulthandler.register(STACKS_SIGNAL, file=open(sys.argv[1], "w"), all_threads=False, chain=False)
def rest():
    print("ready", flush=True)
    time.sleep(100)
def start(count):
    for _ in range(count):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(root=tmp_path)


@pytest.fixture
def start(tmp_path: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start processes that write their stacks where rank 0 does."""
    monkeypatch.setattr(hangs, "ANSWER_S", 0.5)
    ranks: list[subprocess.Popen[bytes]] = []

    def started(body: str) -> subprocess.Popen[bytes]:
        script = tmp_path / "train.py"
        script.write_text(_SETUP + textwrap.dedent(body))
        argv = [sys.executable, str(script), str(spool.stacks(0))]
        ranks.append(subprocess.Popen(argv, stdout=subprocess.PIPE))
        assert ranks[-1].stdout is not None
        assert ranks[-1].stdout.readline() == b"ready\n"
        return ranks[-1]

    yield started
    for rank in ranks:
        rank.kill()
        rank.communicate()


def where(spool: Spool, rank: subprocess.Popen[bytes]) -> list[RankPlace]:
    return asyncio.run(places({0: rank.pid}, spool, "n1"))


def test_a_rank_says_where_its_script_is(start: Start, spool: Spool, tmp_path: Path) -> None:
    rank = start("def step():\n    rest()\nstep()\n")
    (place,) = where(spool, rank)
    assert re.fullmatch(rf"{re.escape(str(tmp_path))}/train\.py:\d+ in rest", place.where)
    assert (place.rank, place.node, place.is_waiting, place.state) == (0, "n1", False, "")
    assert rank.poll() is None


def test_other_threads_are_not_taken_for_the_scripts(start: Start, spool: Spool) -> None:
    (place,) = where(spool, start("start(150)\nrest()\n"))
    assert place.where.endswith(" in rest")


def test_a_place_in_a_library_is_told_by_the_users_line(
    start: Start, spool: Spool, tmp_path: Path
) -> None:
    library = tmp_path / "site-packages" / "torch" / "distributed"
    library.mkdir(parents=True)
    (library / "distributed_c10d.py").write_text("def barrier(wait):\n    wait()\n")
    rank = start(
        f"sys.path.insert(0, {str(library)!r})\nimport distributed_c10d\n"
        "distributed_c10d.barrier(rest)\n"
    )
    (place,) = where(spool, rank)
    assert (place.is_waiting, place.where.endswith(" in rest")) == (True, True)


def test_the_second_question_is_not_answered_with_the_first_answer(
    start: Start, spool: Spool
) -> None:
    rank = start("rest()\n")
    where(spool, rank)
    os.kill(rank.pid, signal.SIGSTOP)
    (place,) = where(spool, rank)
    assert (place.where, place.state) == ("", "stopped by a signal")


def test_a_rank_that_went_meanwhile_is_gone(start: Start, spool: Spool) -> None:
    rank = start("rest()\n")
    rank.kill()
    rank.wait()
    (place,) = where(spool, rank)
    assert (place.state, place.where) == ("gone", "")


def test_a_state_that_passes_is_no_evidence(
    start: Start, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = start("rest()\n")
    states = iter(["", hangs._HALTED[psutil.STATUS_DISK_SLEEP]])
    monkeypatch.setattr(hangs, "_state", lambda pid: next(states))
    (place,) = where(spool, rank)
    assert place.state == ""


def place(
    rank: int, at: str = "train.py:9 in step", *, waits: bool = True, state: str = ""
) -> RankPlace:
    return RankPlace(rank=rank, node=f"n{rank // 8}", where=at, is_waiting=waits, state=state)


def test_who_does_not_wait_is_suspected_if_it_stands_out() -> None:
    odd = place(7, "data.py:3 in load", waits=False)
    assert suspect([*(place(rank) for rank in range(7)), odd]) == odd
    for busy in (0, 5, 8):
        assert suspect([place(rank, waits=rank >= busy) for rank in range(8)]) is None
    assert suspect([place(0, waits=False)]) is not None
    stopped = place(1, state="stopped by a signal")
    assert suspect([place(0), stopped, odd]) == stopped
    assert sentence([place(0), stopped]).endswith("; rank 1 stopped by a signal")


def test_thousands_of_ranks_are_one_sentence() -> None:
    found = [place(rank) for rank in range(7999)] + [place(7999, "data.py:3 in load")]
    begin = time.monotonic()
    text = sentence(hangs.from_data(hangs.to_data(found)))
    assert time.monotonic() - begin < 5 * patience()
    assert text == "7999 ranks (e.g. rank 0) at train.py:9 in step; rank 7999 at data.py:3 in load"
    many = sentence([place(rank, f"train.py:{rank} in f") for rank in range(50)])
    assert many.count("rank ") == hangs.NAMED_GROUPS
