"""Locks of one machine that end with the process that holds them: abstract Unix sockets.

Whoever finds a lock taken connects to it and reads who holds it. There is no file, so no lock is
stale. Processes in another network namespace, such as a container's, have locks of their own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from clusterrun.rundir.record import user_name

ANSWER_S: Final = 1.0
PAUSE_S: Final = 0.02
_BYTES: Final = 4096  # of an answer
_LETTERS: Final = 200  # of a value in it
_KEYS: Final = ("run", "job", "host")
_BACKLOG: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


def gpu_lock(gpu: str) -> str:
    """Return the name of a GPU's lock; `gpu` is its UUID, or its index if that is unknown."""
    return f"clusterrun-gpu-{gpu}"


def job_lock(job_id: str) -> str:
    """Return the name of a job's lock, of which a machine holds one."""
    return f"clusterrun-job-{job_id}"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a lock: user and process are the kernel's, the rest is its own answer.

    What did not answer has no run; `pid` is 0 and `user` "" if not even the process is known.
    `host` is the name that the run uses for this machine.
    """

    pid: int = 0
    user: str = ""
    run: str = ""
    job: str = ""
    host: str = ""
    since: float = 0.0

    def __str__(self) -> str:
        """Describe the holder for people."""
        process = f"process {self.pid}" if self.pid else "a process"
        owner = f" of {self.user}" if self.user else ""
        return f"run {self.run}{owner} ({process})" if self.run else f"{process}{owner}"


class Busy(Exception):
    """Another process holds the lock `name`."""

    def __init__(self, name: str, holder: Holder) -> None:
        super().__init__(f"{name} is held by {holder}")
        self.name, self.holder = name, holder


class Locks:
    """Locks that this process holds until `free` or its end."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        texts = {key: str(about[key])[:_LETTERS] for key in _KEYS if key in about}
        self._answer = json.dumps({**texts, "since": time.time()}).encode() + b"\n"
        self._held: list[tuple[socket.socket, threading.Thread]] = []

    @classmethod
    def take(cls, names: Iterable[str], about: Mapping[str, Any]) -> Locks:
        """Take all locks or none; `about` has run, job and host. Raises Busy and OSError.

        All take them in the same order, so of several at the same moment one gets all of its own.
        """
        locks = cls(about)
        try:
            for name in sorted(set(names)):
                locks._take(name)
        except BaseException:
            locks.free()
            raise
        return locks

    def free(self) -> None:
        """Release all; a second call does nothing."""
        while self._held:
            lock, thread = self._held.pop()
            with contextlib.suppress(OSError):
                lock.shutdown(socket.SHUT_RDWR)  # wakes the thread
            thread.join()
            lock.close()

    def _take(self, name: str) -> None:
        lock = _bound(name)
        thread = threading.Thread(target=self._serve, args=(lock,), name=name, daemon=True)
        self._held.append((lock, thread))
        thread.start()

    def _serve(self, lock: socket.socket) -> None:
        """Answer all who ask, without waiting for them."""
        with contextlib.suppress(OSError):
            while True:
                asker, _ = lock.accept()
                with asker, contextlib.suppress(OSError):
                    asker.setblocking(False)
                    asker.send(self._answer)


def _bound(name: str) -> socket.socket:
    """Return the socket that is the lock. Raises Busy and OSError."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            lock.bind(f"\0{name}")
            lock.listen(_BACKLOG)
        except OSError as error:
            lock.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return lock
        holder = holder_of(name)
        if holder is None and time.monotonic() < deadline:  # it has ended, or is just starting
            time.sleep(PAUSE_S)
        else:
            raise Busy(name, holder or Holder())


def holder_of(name: str) -> Holder | None:
    """Return who holds a lock; None if no process answers for it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
        asker.settimeout(ANSWER_S)
        try:
            asker.connect(f"\0{name}")
        except ConnectionRefusedError:
            return None
        except OSError:  # it accepts no more connections
            return Holder()
        peer = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(peer)
        return Holder(pid=pid, user=user_name(uid), **_answer(asker))


def _answer(asker: socket.socket) -> dict[str, Any]:
    """Return what a holder writes about itself, as far as it makes sense; it may be a stranger."""
    deadline, data = time.monotonic() + ANSWER_S, b""
    with contextlib.suppress(OSError):
        while b"\n" not in data and len(data) < _BYTES and time.monotonic() < deadline:
            more = asker.recv(_BYTES)
            data += more
            if not more:
                break
    try:
        found = json.loads(data.partition(b"\n")[0])
        texts = {key: _plain(str(found.get(key, ""))) for key in _KEYS}
        return {**texts, "since": float(found["since"])}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _plain(text: str) -> str:
    return "".join(letter for letter in text[:_LETTERS] if letter.isprintable())
