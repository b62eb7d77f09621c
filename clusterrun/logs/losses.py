"""Read the records of bytes that were lost before they reached the log."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterrun.logs.lines import LogLine, Stream

_LOSS = re.compile(rb"([oela]) ([0-9]{1,18})(?: (.*))?\Z", re.DOTALL)
_NAMES = {Stream.OUT: "stdout", Stream.ERR: "stderr"}


@dataclass(frozen=True, kw_only=True)
class Loss:
    """How many bytes of a stream are missing at this place, and why."""

    stream: Stream
    size_bytes: int
    reason: str

    def __str__(self) -> str:
        name = _NAMES.get(self.stream, "output")
        why = f": {self.reason}" if self.reason else ""
        return f"{self.size_bytes:,} bytes of {name} lost{why}"


def parse_loss(line: LogLine) -> Loss | None:
    """Read a line of stream GAP; None for a damaged one."""
    found = _LOSS.match(line.text)
    if found is None:
        return None
    return Loss(
        stream=Stream(found[1].decode()),
        size_bytes=int(found[2]),
        reason=(found[3] or b"").decode("utf-8", "replace"),
    )
