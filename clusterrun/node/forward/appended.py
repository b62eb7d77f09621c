"""Append to a file in the run directory, whose disk may be full for a while."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class AppendedFile:
    """Keep data that can't be written yet; continue at the byte where writing stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._waiting: list[bytes] = []
        self.pending_bytes = 0
        self.problem = ""

    def add(self, data: bytes) -> None:
        """Queue data for the next flush."""
        if data:
            self._waiting.append(data)
            self.pending_bytes += len(data)

    def flush(self, *, creates: bool = False) -> bool:
        """Write pending data; return whether all was written. `creates` makes an empty file too."""
        if not self._waiting and (not creates or self._descriptor is not None):
            return True
        data = memoryview(b"".join(self._waiting))
        try:
            file = self._open()
            while data:
                data = data[os.write(file, data) :]
            self.problem = ""
        except OSError as error:
            self.problem = error.strerror or str(error)
            self.close()
        self._waiting = [bytes(data)] if data else []
        self.pending_bytes = len(data)
        return not data

    def _open(self) -> int:
        if self._descriptor is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
        return self._descriptor

    def close(self) -> None:
        """Close the file; the next flush opens it again."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
