"""What `logs` writes to stdout, and what beside it."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clusterrun.cli.logs import print_failed_nodes, print_joined
from clusterrun.cli.logs_view import LogPrinter, Request
from clusterrun.logs.sources import EVERYTHING, LogFile, Query
from clusterrun.rundir.paths import RunPaths
from tests.logs.corpus import T0, line


@dataclass
class PrintedRun:
    world_size: int = 16
    procs_per_node: int = 8
    paths: RunPaths = field(default_factory=lambda: RunPaths(root=Path("/run")))


class Stdout(io.TextIOWrapper):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__(io.BytesIO(), "utf-8", write_through=True)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def take(self) -> str:
        written = self.buffer.getvalue().decode()
        self.buffer.seek(0)
        self.buffer.truncate()
        return written


def use_stdout(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = False) -> Stdout:
    """Put another stdout in place, within the test: pytest puts its own there before each."""
    stdout = Stdout(is_terminal=is_terminal)
    for name, value in (("NO_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "30")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", stdout)
    return stdout


def printer(*, world_size: int = 16, is_following: bool = False, **wanted: Any) -> LogPrinter:
    wanted.setdefault("query", EVERYTHING)
    request = Request(
        record=PrintedRun(world_size=world_size), catalogue=None, attempts=(1,), **wanted
    )
    return LogPrinter(request=request, nodes=["n1"], is_following=is_following)


def print_alike(to: LogPrinter, ranks: int) -> None:
    for rank in range(ranks):
        to.print_lines([line(T0, "n1", rank, "o", b"alike")])


@pytest.mark.parametrize(
    ("wanted", "is_folded"),
    [
        ({}, True),
        ({"world_size": 2}, False),
        ({"query": Query(ranks=frozenset({0, 1, 2}))}, True),
        ({"query": Query(ranks=frozenset({0}))}, False),
        ({"prefix": False}, False),
        ({"dedup": False}, False),
        ({"dedup": True, "world_size": 3}, True),
        ({"form": "raw", "dedup": True}, False),
        ({"form": "json"}, False),
    ],
)
def test_equal_lines_are_folded_where_that_helps_people(
    monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], is_folded: bool
) -> None:
    pipe = use_stdout(monkeypatch)
    to = printer(**wanted)
    print_alike(to, 3)
    to.finish()
    assert len(pipe.take().splitlines()) == (1 if is_folded else 3)


def test_the_progress_bar_of_one_rank_stays_in_its_row_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = use_stdout(monkeypatch, is_terminal=True)
    to = printer(is_following=True, query=Query(ranks=frozenset({3})))
    to.print_lines([line(T0, "n1", 3, "E", b"\r\x1b[32m10 %")])
    to.pause()
    assert terminal.take() == "\r\x1b[Kn1:3  ! 10 %"
    to.pause()
    assert terminal.take() == ""
    to.print_lines([line(T0, "n1", 3, "E", b"\r20 %" + b"#" * 100)])
    to.pause()
    assert terminal.take() == "\r\x1b[Kn1:3  ! 20 %" + "#" * 17
    to.print_lines([line(T0, "n1", 3, "o", b"between")])
    to.pause()
    assert terminal.take() == "\r\x1b[Kn1:3  | between\n\r\x1b[Kn1:3  ! 20 %" + "#" * 17
    to.print_lines([line(T0, "n1", 3, "e", b"\rdone")])
    to.finish()
    assert terminal.take() == "\r\x1b[Kn1:3  ! done\n"


def test_what_happens_beside_the_lines_is_told_on_stderr_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = use_stdout(monkeypatch)
    to = printer(is_following=True)
    to.print_lines([line(T0, "n1", 0, "O", b"begun")])
    to.start_attempt(2)
    print_joined((*[LogFile(node=f"n{n}", path=Path("n.log")) for n in range(1, 21)],), to)
    ends = (("n1", b"0 done"), ("n2", b"1 failed"), ("n3", b"1 failed"))
    print_failed_nodes([line(T0, node, None, "z", text) for node, text in ends], to)
    to.print_end("FAILED", 1)
    assert pipe.take() == "n1:0  | begun…\n"
    assert capsys.readouterr().err.splitlines() == [
        "== attempt 2 ==",
        "+ n[1-20]",
        "- n[2-3] exited 1",
    ]
