"""Keep a full disk from ending a training: count the output that can't be written."""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
from typing import Any

from clusterrun.shared.files import DISK_FAULTS

_FORGIVEN = DISK_FAULTS | {errno.EFBIG}


def forgive_full_disk(*given: io.TextIOWrapper) -> None:
    """Let prints to the standard streams succeed when their disk is full.

    Replace only the `write` of the stream's binary buffer: a custom stream class would lose the
    fast paths that `io` has for its classes.

    Bytes that a script writes to the binary buffer are no longer buffered: on a full disk they
    would stay in the buffer and raise at each later flush.
    """
    for stream in given:
        _forgive(stream.buffer)


def _forgive(buffer: Any) -> None:
    put = getattr(buffer, "raw", buffer).write  # `python -u` has no buffer
    lost, why = 0, ""

    def report() -> None:
        nonlocal lost
        words = f"clusterrun: {lost} bytes of output were lost here: {why}"
        if lost and put(f"\n{words}\n".encode()):  # the last line may have been cut
            lost = 0

    def write(data: Any) -> int | None:
        nonlocal lost, why
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            report()
            while rest:
                if (written := put(rest)) is None:
                    return None  # only the script can make it non-blocking
                rest = rest[written:]
        except OSError as error:
            if error.errno not in _FORGIVEN:
                raise
            lost, why = lost + len(rest), str(error.strerror)
        return size

    def report_at_exit() -> None:
        with contextlib.suppress(OSError):
            report()

    buffer.write = write
    atexit.register(report_at_exit)
