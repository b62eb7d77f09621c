"""Locks of a machine: one holder, who is named; free when it ends; all of them or none."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from clusterrun.backends.hosts import locks
from clusterrun.backends.hosts.locks import Busy, Holder, Locks, gpu_lock, holder_of
from clusterrun.rundir.record import current_user
from tests.patience import patience

HOLDER = """\
import sys, time
from clusterrun.backends.hosts.locks import Busy, Locks
sys.stdin.readline()
try:
    held = Locks.take(sys.argv[2:], {"run": sys.argv[1], "job": "7"})
except Busy as busy:
    print("busy", busy.name, flush=True)
else:
    print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def names() -> list[str]:
    """Return locks that no other test uses."""
    gpu = uuid.uuid4()
    return [gpu_lock(f"{gpu}-{number}") for number in range(3)]


@contextlib.contextmanager
def process(run: str, names: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process that takes locks when it gets a line, and holds them."""
    argv = [sys.executable, "-c", HOLDER, run, *names]
    with subprocess.Popen(argv, stdin=-1, stdout=-1, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def go(*started: subprocess.Popen[str]) -> list[str]:
    for each in started:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    return [each.stdout.readline().split()[0] for each in started if each.stdout]


def test_a_taken_lock_names_its_holder_until_that_ends(names: list[str]) -> None:
    with process("lm/1", names) as holder:
        assert go(holder) == ["held"]
        with pytest.raises(Busy) as found:
            Locks.take(names[1:], {"run": "other", "job": "8"})
        assert found.value.name == names[1]
        named = found.value.holder
        assert (named.pid, named.user, named.run, named.job) == (
            *(holder.pid, current_user()),
            *("lm/1", "7"),
        )
        assert abs(time.time() - named.since) < 600 * patience()
        assert str(named) == f"run lm/1 of {current_user()} (process {holder.pid})"
        holder.kill()
        holder.wait()
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


def test_of_takers_at_the_same_moment_exactly_one_wins(names: list[str]) -> None:
    with process("a", names) as one, process("b", names[::-1]) as other:
        assert sorted(go(one, other)) == ["busy", "held"]


def test_many_threads_take_and_free_without_a_deadlock(names: list[str]) -> None:
    wins: list[int] = []

    def contend(number: int) -> None:
        for _ in range(20):
            with contextlib.suppress(Busy):
                held = Locks.take([names[number % 3], names[(number + 1) % 3]], {})
                wins.append(number)
                held.free()

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60 * patience())
    assert wins
    assert not any(thread.is_alive() for thread in threads)


def stranger(name: str, listens: int, answer: Callable[[socket.socket], object]) -> socket.socket:
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    lock.bind(f"\0{name}")
    if listens:
        lock.listen(listens)
        threading.Thread(target=lambda: answer(lock.accept()[0]), daemon=True).start()
    return lock


NONSENSE = [
    *(
        b"",
        b"\n",
        b"\xff\xfe\x00\n",
        b"[1, 2]\n",
        b"7",
        b"{" * 5000,
        b'{"run": "a", "since": []}\n',
    ),
    *(b"[" * 4000 + b"\n", b'{"run": "a", "job": "b", "since": "soon"}\n'),
]


@pytest.mark.parametrize("answer", NONSENSE)
def test_a_stranger_that_writes_nonsense_is_named_by_the_kernel(
    names: list[str], answer: bytes
) -> None:
    def write(asker: socket.socket) -> None:
        with asker, contextlib.suppress(OSError):
            asker.sendall(answer)

    with stranger(names[0], 1, write):
        assert holder_of(names[0]) == Holder(pid=os.getpid(), user=current_user())


def test_the_answer_of_a_holder_is_shown_as_plain_text(names: list[str]) -> None:
    text = '{"run": "\\u001b[31mred\\nnext", "job": "%s", "since": 1}\n' % ("x" * 1000)
    with stranger(names[0], 1, lambda asker: asker.sendall(text.encode())):
        found = holder_of(names[0])
    assert found is not None
    assert (found.run, len(found.job)) == ("[31mrednext", 200)


@pytest.mark.parametrize(("listens", "pid"), [(1, os.getpid()), (0, 0)], ids=["listens", "deaf"])
def test_a_holder_that_never_answers_is_still_a_holder(
    names: list[str], monkeypatch: pytest.MonkeyPatch, listens: int, pid: int
) -> None:
    monkeypatch.setattr(locks, "ANSWER_S", 0.2)
    kept: list[socket.socket] = []
    with stranger(names[0], listens, kept.append):
        with pytest.raises(Busy) as found:
            Locks.take(names, {"run": "a", "job": "1"})
        assert found.value.holder.pid == pid
        assert str(found.value.holder).endswith(
            f"process {pid} of {current_user()}" if pid else "s"
        )


def test_a_name_that_cannot_be_a_lock_is_an_error_at_once() -> None:
    with pytest.raises(OSError, match="too long"):
        Locks.take(["x" * 200], {})
