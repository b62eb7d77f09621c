"""Locks of a machine: one holder, who is named; free when it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
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
        holder = take(name)
        return f"Held by {holder}" if holder else "None"

    return deed


def test_a_taken_lock_names_its_holder_until_that_ends(name: str) -> None:
    with somebody(takes(name)) as (pid, taken):
        assert taken() == "None"
        assert take(name) == f"process {pid} of {current_user()}"
        os.kill(pid, signal.SIGKILL)
    assert holder_of(name) == ""
    assert take(name) == ""


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
def test_another_users_lock_shows_the_user_and_the_process(name: str) -> None:
    answer = of_ann(takes(name), takes(name))
    assert re.fullmatch(rf"Held by process \d+ of {BOB}", answer)


def test_a_lock_that_nobody_listens_to_is_held(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier, "WAIT_S", courier.WAIT_S / 20)
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(courier._address(name))
        assert take(name) == "a process"


def test_a_lock_holds_however_many_ask_and_until_it_is_given_up(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier, "_BACKLOG", 1)
    assert take(name) == ""
    named, unnamed = f"process {os.getpid()} of {current_user()}", "a process"
    assert [holder_of(name) for _ in range(4)] == [named, named, unnamed, unnamed]
    assert take(name) == unnamed
    courier._held.pop().close()
    assert holder_of(name) == ""


def test_a_long_name_is_a_lock_of_its_own(name: str) -> None:
    assert [take(f"{name}{'x' * 200}{letter}") for letter in "ab"] == ["", ""]
