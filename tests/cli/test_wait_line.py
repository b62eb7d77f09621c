"""A wait on a terminal is one line that changes, and nothing of it is left."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios

import pytest

from tests.cli.conftest import CommandLine
from tests.cli.runs import ended, events, queue, running, submitted
from tests.patience import patience, wait_for

WAITS = (
    ("status", "--wait", "4711"),
    ("logs", "--follow", "4711"),
    ("cancel", "--checkpoint", "4711"),
)


class Terminal:
    """A command in a terminal of some columns, with all that it has shown."""

    def __init__(self, here: CommandLine, argv: tuple[str, ...], columns: int) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        env = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "COLUMNS": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "clusterrun", *argv],
            **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
            env=env,
            cwd=here.path,
        )
        os.close(slave)
        self.shown = ""

    def read(self) -> str:
        """Return what was shown so far; wait for more, or for the end."""
        try:
            self.shown += os.read(self._master, 65536).decode()
        except OSError:  # EIO: the command has ended
            self.process.wait(timeout=60 * patience())
            return self.shown
        return self.shown

    def screen(self) -> list[str]:
        """Return the rows that are left at the end."""
        wait_for(lambda: self.read() and self.process.poll() is not None, "the end", every_s=0)
        os.close(self._master)
        rows = self.shown.replace("\r\n", "\n").split("\n")
        return [row.rpartition("\r\x1b[K")[2] for row in rows]


@pytest.mark.parametrize(("argv", "columns"), [*zip(WAITS, (20, 80, 80), strict=True)])
def test_a_wait_is_one_line_that_changes_until_something_else_is_said(
    here: CommandLine, argv: tuple[str, ...], columns: int
) -> None:
    root = submitted(here)
    queue(here, running())
    events(root, {"type": "started", "host": "node17"})
    terminal = Terminal(here, argv, columns)
    text = "starting: 1 of 2 nodes, importing torch"
    if argv[0] == "cancel":
        text = "waiting for the checkpoint of job 4711"
    line = re.compile(rf"\r\x1b\[K({text[:12]}[^\r]*) … (\d+) s")
    wait_for(lambda: len({*line.findall(terminal.read())}) > 2, "the line", every_s=0)
    for begin, seconds in line.findall(terminal.shown):
        assert begin == text[: columns - 6 - len(seconds)]
    ended(root, "COMPLETED", 0)
    rows = terminal.screen()
    assert terminal.process.returncode == 0
    assert not any("…" in row for row in rows), rows
    assert "" not in rows[:-1]


def test_ctrl_c_leaves_a_clean_line(here: CommandLine) -> None:
    root = submitted(here)
    queue(here, running())
    events(root, {"type": "started", "host": "node17"})
    for argv, said in zip(WAITS, ("interrupted", "job 4711 keeps running"), strict=False):
        terminal = Terminal(here, argv, 80)
        wait_for(lambda: "…" in terminal.read(), "the line", every_s=0)  # noqa: B023
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.screen()[-2:] == [said, ""]
        assert terminal.process.returncode == 130
