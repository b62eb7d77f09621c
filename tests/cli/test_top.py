"""`top` and `status -f`: the screen of a job, on a terminal and as text."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.usage import Alert, AlertKind, GpuSample, Sample, to_line
from tests.cli.conftest import CommandLine
from tests.cli.runs import GIB, ended, events, queue, running, submitted
from tests.terminals import columns_of, terminal

HOSTILE = b"\x1b[2J\x1b]0;owned\x07[red]\xe2\x80\xaemarkup[/red]\t\xf0\x9f\x94\xa5 step 9"
GPU = GpuSample(
    index=0, memory_bytes=51 * GIB, memory_total_bytes=80 * GIB, activity=97.0, temperature_c=64
)


def node(age_s: float = 0, **changes: object) -> Sample:
    sample = Sample(at=time.time() - age_s, attempt=1, host_limit_bytes=2015 * GIB, cpu=12.5)
    usual = {"host_bytes": 620 * GIB, "gpus": tuple(replace(GPU, index=n) for n in range(8))}
    return replace(sample, **{**usual, **changes})  # type: ignore[arg-type]


def write(root: Path, **samples: Sample) -> None:
    for name, sample in samples.items():
        path = RunPaths(root=root).usage(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(to_line(sample))


@pytest.fixture(name="root")
def _root(here: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a job that runs and has reported its steps."""
    monkeypatch.setenv("TERM", "xterm")
    root, now = submitted(here), time.time()
    queue(here, running())
    times = {"total": 46880, "ts": now}
    events(root, {"type": "started", "host": "node17", "ts": now - 900})
    events(root, {"type": "checkpoint", "path": "/ckpt/step-3000", "step": 4, "ts": now - 300})
    for n in range(1, 9):
        step = {"type": "step", "step": n, "metrics": {"loss": 9.8 / n}}
        events(root, {**times, **step, "ts": now - 800 + 100 * n})
    write(root, node17=node(), node18=node())
    log = RunPaths(root=root).log(1, "node17")
    log.parent.mkdir(parents=True, exist_ok=True)
    texts = (HOSTILE, b"x" * 500 + b" the end")
    log.write_bytes(b"".join(b"%016d 0 o %b\n" % (1e15 + n, t) for n, t in enumerate(texts)))
    return root


def test_a_snapshot_says_first_that_all_is_well(here: CommandLine, root: Path) -> None:
    write(root, node19=node(gpus=(GpuSample(index=0),)))  # NVML has disappeared
    said = here("top", "4711")
    assert said.err == ""
    first, second, *lines = said.out.splitlines()
    assert said.code == 0
    assert re.match(r"job 4711  train  RUNNING  05:10:40 of 1-00:00:00  2 nodes", first)
    assert second == "all well"
    text = "\n".join(lines)
    assert re.search(r"^step   8/46880 +0% \[ +\] \S+ left$", text, re.M)
    assert re.search(r"^loss   1.225   9.8 █\S+▁$", text, re.M)
    assert re.search(
        r"^saved  step-3000, 00:05:0\d ago; a failure now costs 00:05:0\d$", text, re.M
    )
    assert re.search(r"^node18 +█{8} +97 % +64 % +64 °C +31 % +12.5/\?$", text, re.M)
    assert re.search(r"^node19 +· +31 % +12.5/\?$", text, re.M)
    assert "[red]markup[/red]" in text  # what the log says, without what a terminal obeys
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", said.out)


def test_alerts_and_silent_nodes_come_first(here: CommandLine, root: Path) -> None:
    full = Alert(kind=AlertKind.HOST_MEMORY, at=1.0)
    idle = tuple(Alert(kind=AlertKind.GPU_IDLE, at=1.0, gpu=gpu) for gpu in (2, 5))
    high = {"host_bytes": 1491 * GIB, "host_full_s": 2400.0}
    write(root, node17=node(alerts=(full, *idle), **high), node18=node(alerts=(full,)))
    write(root, node19=node(1190))
    silent, *others = here("top").out.splitlines()[1:5]
    assert re.match(r"node19: no sample for 00:(19|20):", silent)
    assert others == [
        "2 of 24 GPUs idle",
        "node17: host memory 74 % of 2,015 GiB, full in 40 min; "
        "GPUs 2,5: idle for 0 min while others work",
        "node18: host memory 31 % of 2,015 GiB",
    ]


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50), (20, 5)])
def test_no_line_is_wrapped_on_a_terminal(root: Path, columns: int, rows: int) -> None:
    write(root, **{f"node{n}": node() for n in range(1, 64)}, node64=node(1190))
    with terminal("top", columns=columns, rows=rows) as shown:
        shown.wait_for("node64: no sample"[: columns - 1])
        shown.resize(columns - 2, rows)
        shown.wait_for("node64: no sample"[: columns - 3])
        frame = shown.frame()
        os.write(shown.master, b"q")
        assert shown.ended() == 0
    assert len(frame) == rows
    assert max(map(columns_of, frame)) <= columns - 2
    assert any("███!" in line for line in frame) == (columns >= 80)


def test_a_key_runs_a_command_and_a_signal_leaves_the_terminal_as_it_was(root: Path) -> None:
    with terminal("top") as shown:
        shown.wait_for("all well")
        os.write(shown.master, b"l")
        shown.wait_for("the end")
        shown.wait_for("Press a key")
        shown.resize(80, 24)
        shown.wait_for("all well", keys=b" ")
        os.write(shown.master, b"x")
        shown.wait_for("Cancel job 4711?")
        shown.resize(80, 24)
        shown.wait_for("all well", keys=b"n")
        shown.process.send_signal(signal.SIGTERM)
        assert shown.ended() == 143


def test_status_f_ends_with_the_job_and_prints_its_end(here: CommandLine, root: Path) -> None:
    with terminal("status", "-f", "--exit-status") as shown:
        shown.wait_for("all well")
        queue(here)
        ended(root, "COMPLETED", 0)
        assert shown.ended() == 0
    assert b"COMPLETED" in shown.shown.rpartition(b"\x1b[?1049l")[2]
