"""A terminal of a given size, to run a command line in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from clusterrun.cli.main import main

_SGR = re.compile(r"\x1b\[[0-9;]*m")


def shown_in(columns: int, *args: str, rows: int = 24) -> list[str]:
    """Run a command line in a terminal, and return its lines without colours."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: b"".join(_read(master)))
        with (
            open(slave, "w", encoding="utf-8") as terminal,
            contextlib.redirect_stdout(terminal),
            contextlib.redirect_stderr(terminal),
        ):
            main(args)
        text = reading.result().decode()
    return _SGR.sub("", text).replace("\r\n", "\n").splitlines()


def _read(master: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # how Linux says that the other end was closed
        while chunk := os.read(master, 65536):
            yield chunk
    os.close(master)


def columns_of(line: str) -> int:
    """Return how many columns a line takes."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in line)
    return len(line) + wide - sum(unicodedata.combining(letter) > 0 for letter in line)
