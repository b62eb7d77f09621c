"""A port for a process that starts in a moment."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return a free port that the kernel gives to nobody meanwhile, as it would one of its own."""
    while True:
        port = random.randrange(12_000, 32_000)  # below the range that the kernel gives out
        with socket.socket() as mine:
            try:
                mine.bind(("", port))
            except OSError:
                continue
            return port
