"""Who interrupts an attempt, and why: one word in `attempts/<n>/request`."""

from __future__ import annotations

import contextlib
from enum import Enum
from pathlib import Path

from clusterrun import files


class Reason(str, Enum):
    """Why an attempt is interrupted."""

    END = "end"
    CANCEL = "cancel"
    TIME_LIMIT = "time-limit"
    PREEMPT = "preempt"

    @property
    def text(self) -> str:
        """Word it for people."""
        return _TEXTS[self]


_TEXTS = {
    Reason.END: "cancelled",
    Reason.CANCEL: "cancelled, after a checkpoint",
    Reason.TIME_LIMIT: "the time limit",
    Reason.PREEMPT: "preempted",
}


def read_request(path: Path) -> Reason | None:
    """Return why an attempt is interrupted; None if nobody interrupts it."""
    try:
        return Reason(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        return None


def write_request(path: Path, reason: Reason) -> None:
    """Request an interruption: the first request counts, but an end replaces any other."""
    write = files.write_whole if reason is Reason.END else files.create
    with contextlib.suppress(OSError):  # FileExistsError: somebody else was first
        write(path, f"{reason.value}\n")
