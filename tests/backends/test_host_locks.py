"""Locks of a machine: one holder, who is named; free when it ends; all of them or none."""

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
from clusterrun.backends.hosts.locks import Busy, Locks, gpu_lock, holder_of
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
def names() -> list[str]:
    return [gpu_lock(f"GPU-{number}") for number in range(3)]


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


def takes(*names: str, at: float = 0.0) -> Deed:
    kept: list[Locks] = []

    def deed() -> None:
        time.sleep(max(0.0, at - time.monotonic()))
        kept.append(Locks.take(names, {"run": "lm/1", "job": "7"}))

    return deed


def locks_file(file: Path, text: str | None = None) -> Deed:
    def deed() -> None:
        if text is not None:
            file.write_text(text)
        fcntl.flock(os.open(file, os.O_RDONLY), fcntl.LOCK_EX)

    return deed


def left_by_a_killed_process(name: str) -> Path:
    with somebody(takes(name)) as (pid, taken):
        assert taken() == "None"
        os.kill(pid, signal.SIGKILL)
    return locks._file(name, os.getuid())


def test_a_taken_lock_names_its_holder_until_that_ends(names: list[str]) -> None:
    with somebody(takes(*names)) as (pid, taken):
        assert taken() == "None"
        with pytest.raises(Busy) as found:
            Locks.take(names[1:], {"run": "other", "job": "8"})
        named = found.value.holder
        assert (found.value.name, named.pid, named.job) == (names[1], pid, "7")
        assert str(named) == f"run lm/1 of {current_user()} (process {pid})"
        os.kill(pid, signal.SIGKILL)
    Locks.take(names, {"run": "other", "job": "8"}).free()


def test_a_refused_taker_keeps_none_of_its_locks(names: list[str]) -> None:
    first = Locks.take(names[2:], {"run": "a", "job": "1"})
    with pytest.raises(Busy, match="run a of"):
        Locks.take(names, {"run": "b", "job": "2"})
    Locks.take(names[:2], {"run": "c", "job": "3"}).free()
    first.free()
    first.free()
    Locks.take(names, {"run": "d", "job": "4"}).free()
    assert all(holder_of(name) is None for name in names)


@pytest.mark.parametrize("users", [(None, None), pytest.param((ANN, BOB), marks=root)])
def test_of_takers_at_the_same_moment_exactly_one_wins(
    names: list[str], users: tuple[int | None, ...]
) -> None:
    for _ in range(10):
        at = time.monotonic() + 0.1 * patience()
        one, other = (takes(*order, at=at) for order in (names, names[::-1]))
        with somebody(one, users[0]) as (_, ann), somebody(other, users[1]) as (_, bob):
            assert sorted(answer[:4] for answer in (ann(), bob())) == ["Busy", "None"]


@root
def test_another_users_lock_shows_the_user_the_process_and_the_run(names: list[str]) -> None:
    answer = of_ann(takes(names[0]), takes(names[0]))
    assert re.fullmatch(rf"Busy: \S+ is held by run lm/1 of {BOB} \(process \d+\)", answer)


@root
@pytest.mark.parametrize("text", ["", "[1, 2]", "{" * 5000, '{"pid": "1"}', '{"user": "ann"}'])
def test_a_holder_that_writes_nonsense_is_named_by_its_file(names: list[str], text: str) -> None:
    answer = of_ann(takes(names[0]), locks_file(locks._file(names[0], BOB), text))
    assert answer == f"Busy: {names[0]} is held by a process of {BOB}"


@root
@pytest.mark.parametrize("squat", [Path.touch, Path.mkdir, os.mkfifo, lambda f: f.symlink_to("/")])
def test_who_takes_the_place_of_anothers_file_is_named(
    names: list[str], squat: Callable[[Path], object]
) -> None:
    answer = of_ann(takes(names[0]), lambda: squat(locks._file(names[0], ANN)))
    assert answer == f"Busy: {names[0]} is held by a process of {BOB}"


@root
def test_a_stranger_cannot_lock_the_file_that_an_ended_process_left(names: list[str]) -> None:
    left = left_by_a_killed_process(names[0])
    with somebody(locks_file(left), BOB) as (_, done):
        assert (done(), holder_of(names[0])) == ("None", None)
        Locks.take(names[:1], {}).free()
    assert not left.exists()


def test_what_killed_processes_left_is_removed_and_nothing_else(
    names: list[str], place: Path
) -> None:
    left, held = left_by_a_killed_process(names[0]), Locks.take(names[1:2], {})
    (place / "clusterrun-of-another.1").touch()
    locks.tidy()
    assert (left.exists(), len([*place.iterdir()])) == (False, 2)
    assert holder_of(names[1])
    held.free()


def test_a_name_is_one_file_of_the_directory(place: Path) -> None:
    held = Locks.take(["../x", "a/b"], {"run": "x" * 1000})
    node = re.sub("[^A-Za-z0-9_-]", "-", os.uname().nodename)
    assert sorted(file.stem for file in place.iterdir()) == [f"---x-{node}", f"a-b-{node}"]
    assert len((holder_of("a/b") or held).run) == 200  # type: ignore[union-attr]
    held.free()
