"""Keep a full disk from ending a training: what can't be printed is counted and told later."""

from __future__ import annotations

import atexit
import errno
import io
import os
import resource
import stat
import threading
import time
from collections.abc import Callable
from typing import Any

# Full, over the quota, failing, remounted read-only, or as large as a file may be.
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG})
_Write = Callable[[Any], "int | None"]

# Who fills a disk from above this floor within one interval writes 32 GB a second.
LITTLE_ROOM = 8 << 30
LOOK_INTERVAL_S = 0.25


def forgive_full_disk(*given: io.TextIOWrapper) -> None:
    """Let prints to the standard streams succeed where their disk takes no more.

    A stream stays as it is, with its encoding, and text is buffered as ever: only the `write` of
    its binary buffer is replaced, which costs 0.1 µs a write. A class of our own in its place would
    cost more, since it would take the shortcuts away that `io` has for its own. Under `python -u`,
    where each print is two writes, that is a twelfth of a print: there it is replaced only while
    the disk has little room, and a sleeping thread looks for that. It sees no user's quota on
    the node's own disk, and no disk that fails: only with buffered text are those forgiven too.

    Bytes that a script writes to the binary buffer itself are not buffered: those would be left in
    there, and raise at each later flush, once the disk is full.
    """
    unwatched = []
    for stream in given:
        losses = _Losses(stream.buffer)
        atexit.register(losses.tell)
        is_raw = not hasattr(stream.buffer, "raw")
        if is_raw and _has_room(stream.fileno()) and not _is_limited():
            losses.let_through()
            unwatched.append((stream.fileno(), losses))
    if unwatched:
        _watch(unwatched)


def _is_limited() -> bool:
    return resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY


def _has_room(descriptor: int) -> bool:
    """Say whether the descriptor is a file on a file system with much room; asks the kernel."""
    try:
        room = os.fstatvfs(descriptor)
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:
        return False
    return is_file and room.f_bavail * room.f_frsize >= LITTLE_ROOM


def _watch(streams: list[tuple[int, _Losses]]) -> None:
    """Guard the streams while their disk has little room; a forked process guards its own."""

    def guard_all() -> None:
        for _, losses in streams:
            losses.guard()

    def look() -> None:
        while True:
            time.sleep(LOOK_INTERVAL_S)
            for descriptor, losses in streams:
                if _has_room(descriptor):
                    losses.let_through()
                else:
                    losses.guard()

    os.register_at_fork(after_in_child=guard_all)
    threading.Thread(target=look, name="clusterrun-room", daemon=True).start()


class _Losses:
    """The bytes that a stream has lost since it last could say so."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self._put: _Write = getattr(buffer, "raw", buffer).write  # under `python -u` it is raw
        self._write = buffer.write = self._guarded(self._put)
        self._is_guarded = True
        self._lost = 0
        self._reason = ""

    def guard(self) -> None:
        """Replace the buffer's `write` by the one that survives a full disk."""
        if not self._is_guarded:
            self._is_guarded = True
            self._buffer.write = self._write_after_loss if self._lost else self._write

    def let_through(self) -> None:
        """Give the buffer its own `write` back, unless there are losses to tell of."""
        if self._is_guarded and not self._lost:
            self._is_guarded = False
            del self._buffer.write

    def _guarded(self, put: _Write) -> _Write:
        def write(data: Any) -> int | None:
            written: int | None = 0
            try:
                written = put(data)
                if written == len(data):
                    return written
            except OSError as error:
                if error.errno not in _DISK:
                    raise
            return self._finish(data, written)

        return write

    def _finish(self, data: Any, written: int | None) -> int | None:
        """Write the rest of what was cut short; what the disk does not take is lost."""
        if written is None:
            return None  # a descriptor that would block, which only the script can have put there
        rest = memoryview(data).cast("B")
        size = len(rest)
        rest = rest[written:]
        try:
            while rest:
                rest = rest[self._put(rest) :]
        except OSError as error:
            self._lose(len(rest), error)
        return size

    def _lose(self, count: int, error: OSError) -> None:
        if error.errno not in _DISK:
            raise error
        self._lost += count
        self._reason = error.strerror or str(error)
        self._buffer.write = self._write_after_loss

    def _write_after_loss(self, data: Any) -> int | None:
        """Try again, and begin with a line that says what is missing."""
        given = bytes(data)
        words = f"clusterrun: {self._lost} bytes of output were lost here: {self._reason}"
        notice = f"\n{words}\n".encode()  # a line may have been cut
        try:
            written = self._put(notice + given) or 0
        except OSError as error:
            self._lose(len(given), error)
            return len(given)
        if written < len(notice):
            self._lost += len(given)
            return len(given)
        self._lost, self._buffer.write = 0, self._write
        return self._finish(given, written - len(notice))

    def tell(self) -> None:
        """Say at the end what was lost, if there is room by then."""
        if self._lost:
            self._write_after_loss(b"")
