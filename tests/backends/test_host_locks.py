"""Locks of a machine: one holder, who is named; free when it ends."""

from __future__ import annotations

import contextlib
import fcntl
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
from clusterrun.backends.hosts.locks import Holder, Lock, gpu_lock, holder_of, take
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


def of_ann(deed: Deed, before: Deed) -> str:
    """Return what becomes of a deed of ann's after one of bob's."""
    with somebody(before, BOB) as (_, bob):
        assert bob() == "None"
        with somebody(deed, ANN) as (_, ann):
            return ann()


def takes(name: str, at: float = 0.0) -> Deed:
    kept: list[Lock | Holder] = []

    def deed() -> str:
        time.sleep(max(0.0, at - time.monotonic()))
        kept.append(take(name, {"run": "lm/1"}))
        return "None" if isinstance(kept[0], Lock) else f"Held by {kept[0]}"

    return deed


def taken_now(name: str, run: str = "other") -> Lock:
    lock = take(name, {"run": run})
    assert isinstance(lock, Lock)
    return lock


def locks_file(file: Path, text: str) -> Deed:
    def deed() -> None:
        file.write_text(text)
        fcntl.flock(os.open(file, os.O_RDONLY), fcntl.LOCK_EX)

    return deed


def left_by_a_killed_process(name: str) -> Path:
    with somebody(takes(name)) as (pid, taken):
        assert taken() == "None"
        os.kill(pid, signal.SIGKILL)
    return locks._file(name, os.getuid())


def test_a_taken_lock_names_its_holder_until_that_ends(name: str) -> None:
    with somebody(takes(name)) as (pid, taken):
        assert taken() == "None"
        named = take(name, {"run": "other"})
        assert isinstance(named, Holder)
        assert named.pid == pid
        assert str(named) == f"run lm/1 of {current_user()} (process {pid})"
        os.kill(pid, signal.SIGKILL)
    taken_now(name).free()
    assert holder_of(name) is None


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
def test_a_holder_that_writes_nonsense_or_squats_is_named_by_its_file(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "WAIT_S", locks.WAIT_S / 20)
    own = locks._file(name, BOB)
    texts = ("", "[1, 2]", "{" * 5000, '{"pid": "1"}', '{"user": "ann"}')
    deeds: list[Deed] = [locks_file(own, text) for text in texts]
    deeds += [lambda squat=squat: squat(own) for squat in (Path.mkdir, os.mkfifo)]
    for deed in deeds:
        answer = of_ann(takes(name), deed)
        assert answer == f"Held by a process of {BOB}"
        for file in place.iterdir():
            file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()


def test_what_killed_processes_left_is_removed_and_nothing_else(name: str, place: Path) -> None:
    left, held = left_by_a_killed_process(name), taken_now(gpu_lock("GPU-2"))
    (place / "clusterrun-of-another.1").touch()
    locks.tidy()
    assert (left.exists(), len([*place.iterdir()])) == (False, 2)
    assert holder_of(gpu_lock("GPU-2"))
    held.free()


def test_a_name_is_one_file_of_the_directory(place: Path) -> None:
    held = [taken_now(name, "x" * 1000) for name in ("../x", "a/b")]
    node = re.sub("[^A-Za-z0-9_-]", "-", os.uname().nodename)
    assert sorted(file.stem for file in place.iterdir()) == [f"---x-{node}", f"a-b-{node}"]
    holder = holder_of("a/b")
    assert holder
    assert len(holder.run) == 200
    for lock in held:
        lock.free()
