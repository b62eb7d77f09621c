"""Locks of a machine: one holder, who is named; free when it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterrun.backends.hosts import courier
from clusterrun.backends.hosts.courier import holder_of, take
from clusterrun.rundir.record import current_user
from tests.patience import patience

Deed = Callable[[], object]
ANN, BOB = 65_531, 65_532  # no accounts
root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users")


@pytest.fixture
def name(tmp_path: Path) -> str:
    """Return the name of a lock that no other test has."""
    return f"gpu {tmp_path}"


@contextlib.contextmanager
def somebody(deed: Deed, uid: int | None = None) -> Iterator[tuple[int, Callable[[], str]]]:
    """Do something in a process that lives until the end; yield its pid and what waits for it."""
    ours, theirs = socket.socketpair()
    if not (pid := os.fork()):
        ours.close()
        try:
            os.setuid(os.getuid() if uid is None else uid)
            done = str(deed())
        except Exception as error:  # noqa: BLE001 - the test compares it
            done = f"{type(error).__name__}: {error}"
        theirs.send(done.encode())
        theirs.recv(1)
        os._exit(0)
    theirs.close()
    try:
        yield pid, lambda: ours.recv(1000).decode()
    finally:
        ours.close()
        os.waitpid(pid, 0)


def of_ann(deed: Deed, before: Deed) -> str:
    """Return what becomes of a deed of ann's after one of bob's."""
    with somebody(before, BOB) as (_, bob):
        assert bob() == "None"
        with somebody(deed, ANN) as (_, ann):
            return ann()


def takes(name: str, at: float = 0.0) -> Deed:
    def deed() -> str:
        time.sleep(max(0.0, at - time.monotonic()))
        holder = take(name, "lm/1")
        return f"Held by {holder}" if holder else "None"

    return deed


def squats(name: str, text: bytes) -> Deed:
    """Return a deed that takes a lock and answers with a text; nothing if it is empty."""

    def deed() -> None:
        courier._held.append(own := socket.socket(socket.AF_UNIX))
        own.bind(courier._address(name))
        own.listen()
        if text:
            threading.Thread(target=courier._introduce, args=(own, text)).start()

    return deed


def test_a_taken_lock_names_its_holder_until_that_ends(name: str) -> None:
    with somebody(takes(name)) as (pid, taken):
        assert taken() == "None"
        named = take(name, "other")
        assert named
        assert named.pid == pid
        assert str(named) == f"run lm/1 of {current_user()} (process {pid})"
        os.kill(pid, signal.SIGKILL)
    assert holder_of(name) is None
    assert take(name, "other") is None


@pytest.mark.parametrize("users", [(None, None), pytest.param((ANN, BOB), marks=root)])
def test_of_takers_at_the_same_moment_exactly_one_wins(
    name: str, users: tuple[int | None, ...]
) -> None:
    for _ in range(10):
        at = time.monotonic() + 0.1 * patience()
        one, other = (takes(name, at=at) for _ in range(2))
        with somebody(one, users[0]) as (_, ann), somebody(other, users[1]) as (_, bob):
            assert sorted(answer[:4] for answer in (ann(), bob())) == ["Held", "None"]


@root
def test_another_users_lock_shows_the_user_the_process_and_the_run(name: str) -> None:
    answer = of_ann(takes(name), takes(name))
    assert re.fullmatch(rf"Held by run lm/1 of {BOB} \(process \d+\)", answer)


@root
@pytest.mark.parametrize(("text", "run"), [("", ""), ("\nx", "run x"), ("\xff\nx", "run x")])
def test_a_holder_that_says_nothing_or_anything_is_named_by_the_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch, text: str, run: str
) -> None:
    monkeypatch.setattr(courier, "WAIT_S", courier.WAIT_S / 20)
    answer = of_ann(takes(name), squats(name, text.encode("latin-1")))
    process = r"process \d+"
    named = rf"{run} of {BOB} \({process}\)" if run else rf"{process} of {BOB}"
    assert re.fullmatch(f"Held by {named}", answer)


def test_a_lock_holds_if_its_holder_cannot_answer_and_until_it_is_given_up(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "accept", lambda own: os.open("/no/descriptor", 0))
    assert take(name, "lm/1") is None
    with somebody(takes(name)) as (_, other):
        assert other() == f"Held by process {os.getpid()} of {current_user()}"
    courier.free_all()
    assert holder_of(name) is None


def test_a_long_name_is_a_lock_of_its_own_and_a_long_text_is_cut(name: str) -> None:
    for letter, run in (("a", "y" * 1000), ("b", "of\na user\udcff")):
        longer = f"{name}{'x' * 200}{letter}"
        assert take(longer, run, "h1") is None
        holder = holder_of(longer)
        assert holder
        assert (holder.run, holder.host) == (run[:200].replace("\udcff", "?"), "h1")
