"""A wait on a terminal is one line that changes, and nothing of it is left."""

from __future__ import annotations

import re
import signal

import pytest

from tests.cli.conftest import CommandLine
from tests.cli.runs import ended, events, queue, running, submitted
from tests.patience import wait_for
from tests.terminals import Terminal, terminal

WAITS = (
    ("status", "--wait", "4711"),
    ("logs", "--follow", "4711"),
    ("cancel", "--checkpoint", "4711"),
)


def rows_left(shown: Terminal) -> list[str]:
    """Return the rows that are left at the end."""
    rows = re.sub(r"\x1b\[[0-9;]*m", "", shown.text()).replace("\r\n", "\n").split("\n")
    return [row.rpartition("\r\x1b[K")[2] for row in rows]


@pytest.mark.parametrize(("argv", "columns"), [*zip(WAITS, (20, 80, 80), strict=True)])
def test_a_wait_is_one_line_that_changes_until_something_else_is_said(
    here: CommandLine, argv: tuple[str, ...], columns: int
) -> None:
    root = submitted(here)
    queue(here, running())
    events(root, {"type": "started", "host": "node17"})
    text = "starting: 1 of 2 nodes, importing torch"
    if argv[0] == "cancel":
        text = "waiting for the checkpoint of job 4711"
    line = re.compile(rf"\r\x1b\[K({text[:12]}[^\r]*) … (\d+) s")
    with terminal(*argv, columns=columns) as shown:
        wait_for(lambda: len({*line.findall(shown.text())}) > 2, "the line", every_s=0)
        for begin, seconds in line.findall(shown.text()):
            assert begin == text[: columns - 6 - len(seconds)]
        ended(root, "COMPLETED", 0)
        assert shown.ended() == 0
        rows = rows_left(shown)
    assert not any("…" in row for row in rows), rows
    assert "" not in rows[:-1]


def test_ctrl_c_leaves_a_clean_line(here: CommandLine) -> None:
    root = submitted(here)
    queue(here, running())
    events(root, {"type": "started", "host": "node17"})
    for argv, said in zip(WAITS, ("interrupted", "job 4711 keeps running"), strict=False):
        with terminal(*argv) as shown:
            wait_for(lambda: "…" in shown.text(), "the line", every_s=0)
            shown.process.send_signal(signal.SIGINT)
            assert shown.ended() == 130
            assert rows_left(shown)[-2:] == [said, ""]
