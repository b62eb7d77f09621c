"""Messages over a pipe, such as ssh's: a line of JSON, then `size` bytes of data if it has any.

Data ends with a line end of its own, so a starter that passes on whole lines holds nothing back.
"""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import dataclass
from typing import IO, Any

LINE_BYTES = 16 << 20  # a header may name many files
DATA_BYTES = 1 << 20  # of one message


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One message: its kind, its fields, and raw bytes."""

    kind: str
    fields: dict[str, Any]
    data: bytes = b""


class Pipe:
    """One end of a connection; several threads may send, one receives."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self._reader, self._writer = reader, writer
        self._lock = threading.Lock()

    def send(self, kind: str, /, data: bytes = b"", **fields: Any) -> None:
        """Send a message. Raises OSError and ValueError if the other end is gone."""
        header = {**fields, "kind": kind, "size": len(data)}
        with self._lock:
            self._writer.write(json.dumps(header).encode() + b"\n" + data + b"\n" * bool(data))
            self._writer.flush()

    def receive(self) -> Frame | None:
        """Return the next message; None at the end, and for anything but a whole message."""
        try:
            fields = json.loads(self._reader.readline(LINE_BYTES))
            kind, size = fields.pop("kind"), fields.pop("size")
            data = self._reader.read(size + 1)[:-1] if 0 < size <= DATA_BYTES else b""
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return Frame(kind=kind, fields=fields, data=data) if len(data) == size else None

    def close(self) -> None:
        """Close both directions."""
        for stream in (self._reader, self._writer):
            with contextlib.suppress(OSError):
                stream.close()
