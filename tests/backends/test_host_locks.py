"""Locks of a machine: one holder, who is named; free when it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterrun.backends.hosts import locks
from clusterrun.backends.hosts.locks import Busy, Lock, gpu_lock, holder_of, take
from clusterrun.rundir.record import current_user
from tests.patience import patience

Deed = Callable[[], object]
ANN, BOB = 65_531, 65_532  # no accounts
root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users")


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a directory in the place of /tmp."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o1777)
        monkeypatch.setattr(locks, "PLACE", Path(directory))
        yield Path(directory)


@pytest.fixture
def name() -> str:
    return gpu_lock("GPU-1")


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


def takes(name: str, at: float = 0.0) -> Deed:
    kept: list[Lock] = []

    def deed() -> None:
        time.sleep(max(0.0, at - time.monotonic()))
        kept.append(take(name, {"run": "lm/1", "job": "7"}))

    return deed


def test_a_taken_lock_names_its_holder_until_that_ends(name: str) -> None:
    with somebody(takes(name)) as (pid, taken):
        assert taken() == "None"
        with pytest.raises(Busy) as found:
            take(name, {"run": "other", "job": "8"})
        named = found.value.holder
        assert (found.value.name, named.pid, named.job) == (name, pid, "7")
        assert str(named) == f"run lm/1 of {current_user()} (process {pid})"
        os.kill(pid, signal.SIGKILL)
    lock = take(name, {"run": "other", "job": "8"})
    for _ in range(2):
        lock.free()
    assert holder_of(name) is None


@pytest.mark.parametrize("users", [(None, None), pytest.param((ANN, BOB), marks=root)])
def test_of_takers_at_the_same_moment_exactly_one_wins(
    name: str, users: tuple[int | None, ...]
) -> None:
    for _ in range(10):
        at = time.monotonic() + 0.1 * patience()
        one, other = (takes(name, at=at) for _ in range(2))
        with somebody(one, users[0]) as (_, ann), somebody(other, users[1]) as (_, bob):
            assert sorted(answer[:4] for answer in (ann(), bob())) == ["Busy", "None"]


@root
def test_another_user_learns_of_the_holder_and_takes_what_a_killed_one_left(name: str) -> None:
    with somebody(takes(name), BOB) as (pid, bob):
        assert bob() == "None"
        with somebody(takes(name), ANN) as (_, ann):
            assert ann() == f"Busy: {name} is held by run lm/1 of {BOB} (process {pid})"
        os.kill(pid, signal.SIGKILL)
    with somebody(takes(name), ANN) as (_, ann):
        assert ann() == "None"


def test_a_holder_that_writes_nonsense_is_a_process(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "WAIT_S", 0.0)
    with somebody(takes(name)) as (_, taken):
        assert taken() == "None"
        (file,) = place.iterdir()
        for text in ("", "[1, 2]", "{" * 5000, '{"pid": "1"}'):
            file.write_text(text)
            with pytest.raises(Busy, match="held by a process"):
                take(name, {})


def test_a_name_is_one_file_of_the_directory(place: Path) -> None:
    held = [take(name, {"run": "x" * 1000}) for name in ("../x", "a/b")]
    node = re.sub("[^A-Za-z0-9_-]", "-", os.uname().nodename)
    assert sorted(file.name for file in place.iterdir()) == [f"---x-{node}", f"a-b-{node}"]
    holder = holder_of("a/b")
    assert holder
    assert len(holder.run) == 200
    for lock in held:
        lock.free()
