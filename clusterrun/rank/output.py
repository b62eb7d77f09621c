"""Keep a full disk from ending a training: what can't be printed is counted and told later."""

from __future__ import annotations

import atexit
import errno
import io
from collections.abc import Callable
from typing import Any

# Full, over the quota, failing, remounted read-only, or as large as a file may be.
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG})
_Write = Callable[[Any], "int | None"]


def forgive_full_disk(*given: io.TextIOWrapper) -> None:
    """Let prints to the standard streams succeed if their disk takes no more.

    A stream stays as it is, with its encoding, and text is buffered as ever: only the `write` of
    its binary buffer is replaced, which costs 0.1 µs a write. A class of our own in its place would
    cost more, since it would take the shortcuts away that `io` has for its own.

    Bytes that a script writes to the binary buffer itself are not buffered: those would be left in
    there, and raise at each later flush, once the disk is full.
    """
    for stream in given:
        atexit.register(_Losses(stream.buffer).tell)


class _Losses:
    """The bytes that a stream has lost since it last could say so."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self._put: _Write = getattr(buffer, "raw", buffer).write  # under `python -u` it is raw
        self._write = buffer.write = self._guarded(self._put)
        self._lost = 0
        self._reason = ""

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
