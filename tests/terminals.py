"""A terminal of a given size, to run a command line in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from clusterrun.cli.main import main
from tests.patience import patience, wait_for

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


def in_terminal(argv: list[str], **settings: Any) -> tuple[int, str]:
    """Run a program in a terminal; return its exit status and what was shown."""
    master, slave = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
    process = subprocess.Popen(argv, **{**streams, **settings})
    os.close(slave)
    shown = b"".join(_read(master))
    return process.wait(60 * patience()), shown.decode()


def columns_of(line: str) -> int:
    """Return how many columns a line takes."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in line)
    return len(line) + wide - sum(unicodedata.combining(letter) > 0 for letter in line)


@dataclass
class Terminal:
    """A command in a terminal; `shown` is what it wrote since the last new size."""

    process: subprocess.Popen[bytes]
    master: int
    shown: bytes = b""

    def wait_for(self, text: str, *, keys: bytes = b"") -> None:
        """Wait for a text; press keys until then: a program may drop what came too early."""

        def is_shown() -> bool:
            os.write(self.master, keys)
            self._read()
            return text.encode() in self.shown

        wait_for(is_shown, text)

    def text(self) -> str:
        """Return what was shown until now."""
        self._read()
        return self.shown.decode()

    def resize(self, columns: int, rows: int) -> None:
        self.shown = b""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def frame(self) -> list[str]:
        """Return the lines of the newest drawing, without colours."""
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-GI-Z]", "", self.shown.decode())
        return text.rpartition("\x1b[H")[2].replace("\r", "").split("\n")

    def ended(self) -> int:
        wait_for(lambda: self._read() or self.process.poll() is not None)
        return self.process.wait()

    def _read(self) -> None:
        while select.select([self.master], [], [], 0.05)[0]:
            self.shown += os.read(self.master, 1 << 16)


@contextlib.contextmanager
def terminal(*args: str, columns: int = 80, rows: int = 24) -> Iterator[Terminal]:
    """Run a command line with a keyboard, and check that it leaves the terminal as it was."""
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    shown = Terminal(None, master)  # type: ignore[arg-type]
    shown.resize(columns, rows)
    words = [sys.executable, "-m", "clusterrun", *args]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": ""}  # the terminal's own size counts
    to = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
    with subprocess.Popen(words, env=env, **to) as shown.process:
        try:
            yield shown
            assert shown.ended() in (0, 130, 143)
        finally:
            shown.process.kill()
    assert termios.tcgetattr(slave) == before
    for on, off in ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h")):
        assert on not in shown.shown or shown.shown.rfind(off) > shown.shown.rfind(on)
    os.close(slave)
    os.close(master)
