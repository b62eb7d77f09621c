"""The kernel's log, as a user may read it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

DEVICE: Final = Path("/dev/kmsg")
MOST_RECORDS: Final = 50_000
_RECORD_BYTES: Final = 8192  # the kernel's are shorter
_RECORD: Final = re.compile(
    r"(?P<priority>\d{1,9}),\d{1,20},(?P<us>\d{1,20}),[^;]{0,99};(?P<text>.*)"
)
GPU: Final = re.compile(r"NVRM: .{0,200}?\b(?P<gpu>[0-9a-fA-F]{4,8}(?::[0-9a-fA-F]{2}){2})\b")


def open_log(device: Path) -> int:
    """Open the kernel's log at its oldest message; reading never waits."""
    return os.open(device, os.O_RDONLY | os.O_NONBLOCK)


def texts(descriptor: int, since_us: float = 0.0) -> Iterator[str]:
    """Yield the kernel's own messages from the current one on, without those of programs."""
    for _ in range(MOST_RECORDS):
        try:
            data = os.read(descriptor, _RECORD_BYTES)
        except BrokenPipeError:  # messages were overwritten
            continue
        except OSError:
            return
        if not data:
            return
        for line in data.decode(errors="replace").splitlines():
            found = _RECORD.match(line)
            is_of_kernel = found and int(found["priority"]) < 8  # else a program's
            if found and is_of_kernel and int(found["us"]) > since_us:
                yield found["text"]


def pci_address(text: str) -> str:
    """Return an address as Xid messages have it.

    >>> pci_address("00000000:3B:00.0")
    '0000:3b:00'
    """
    domain, bus, device = text.lower().split(":")[:3]
    return f"{domain[-4:]}:{bus}:{device.partition('.')[0]}"
