"""`status` and `list` of a training that reports no steps: what rank 0 printed, and when."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from clusterrun.cli.list import READ_MARK
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.world import write_world
from tests.cli.conftest import CommandLine
from tests.cli.runs import ended, events, queue, running, sampled, submitted

BAR = "\rEpoch 3:  {n}%|####      | {n}/100 [00:30<00:37, {rate}it/s]"


@pytest.fixture(name="root")
def _root(here: CommandLine) -> Path:
    """Start a job on two nodes; rank 0 is on node17."""
    root = submitted(here)
    (root / "attempts/1").mkdir(parents=True)
    write_world(RunPaths(root=root), 1, ["node17", "node18"], 1)
    queue(here, running())
    return root


def printed(root: Path, *lines: tuple[float, str, str]) -> None:
    """Write the log of rank 0's node: for each line how long ago, by whom, and the text."""
    log = root / "logs/a1/node17.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    now = time.time()
    with log.open("a") as file:
        for age_s, head, text in lines:
            file.write(f"{int((now - age_s) * 1e6)} {head} {text}\n")


def bar(n: int, rate: float = 2.0) -> str:
    return BAR.format(n=n, rate=rate)


def test_a_bar_of_rank_0_is_shown_as_what_it_is(here: CommandLine, root: Path) -> None:
    # A drawing is cut in two, another rank has a bar, and the agent's line is no output.
    printed(
        root,
        (9, "0 E", bar(40)[:20]),
        (7, "0 E", bar(40)[20:] + bar(50)),
        (5, "0 o", "saved"),
        (5, "1 E", bar(77)),
        (1, "- a", "node17 says something"),
    )
    out = here("status", "4711").out
    assert "step       50/100  2 it/s, 00:00:25 to go  (from its output: Epoch 3)\n" in out
    assert "output     last written 00:00:05 ago\n" in out
    listed = here("list")
    assert f"50/100{READ_MARK} 2 it/s, 00:00:25 left" in listed.out
    assert "note: * was read from the output" in listed.err
    told = json.loads(here("status", "4711", "--json").out)["progress"]
    assert {told.pop("reported")} != {None}
    assert 5 <= told.pop("last_output_s") < 5 + 60
    assert told == {
        "step": 50,
        "total": 100,
        "rate_per_s": 2.0,
        "eta_s": 25.0,
        "source": "output",
        "bar": "Epoch 3",
        "metrics": {},
    }


def test_reported_steps_win_over_a_bar(here: CommandLine, root: Path) -> None:
    printed(root, (5, "0 E", bar(50)), (5, "0 o", "step 1/50"), (5, "0 o", "step 2/50"))
    now = time.time()
    events(root, *[{"type": "step", "step": n, "total": 9, "ts": now - 9 + n} for n in (1, 3)])
    told = json.loads(here("list", "--json").out)["jobs"][0]["progress"]
    assert (told["step"], told["total"], told["source"], told["bar"]) == (3, 9, "reported", None)
    assert (told["rate_per_s"], told["eta_s"]) == (1.0, 6.0)
    assert told["last_output_s"] >= 5
    assert READ_MARK not in here("list").out
    assert "(from its output" not in here("status", "4711").out


@pytest.mark.parametrize(("ago", "is_told"), [(290, False), (400, True)])
def test_a_silent_job_may_hang(here: CommandLine, root: Path, ago: int, *, is_told: bool) -> None:
    printed(root, (ago, "0 o", "hello"))
    hint = "\n           if it hangs, see where: clusterrun diagnose 4711 --stacks\n"
    assert (hint in here("status", "4711").out) == is_told


def test_a_bar_that_stands_still_is_not_estimated(here: CommandLine, root: Path) -> None:
    printed(root, (125, "0 E", bar(50)), (65, "0 E", bar(50)))
    out = here("status", "4711").out
    assert "50/100  2 it/s, last moved 00:02:0" in out
    assert "output     last written 00:01:0" in out
    assert "left" not in here("list").out


def test_nan_is_null_in_json(here: CommandLine, root: Path) -> None:
    metrics = {"loss": float("nan"), "norm": float("inf"), "lr": 0.5}
    events(root, {"type": "step", "step": 3, "total": 9, "ts": time.time(), "metrics": metrics})
    for command in (("status", "4711", "--json"), ("list", "--json")):
        out = here(*command).out
        assert "NaN" not in out
        assert "Infinity" not in out
        found = json.loads(out)
        shown = found["jobs"][0] if "jobs" in found else found
        assert shown["progress"]["metrics"] == {"loss": None, "norm": None, "lr": 0.5}


def test_only_the_end_of_a_log_is_read_also_after_the_end(
    here: CommandLine, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed(root, (9, "0 E", bar(50)), *[(8, "1 o", "x" * 60_000)] * 3)
    out = here("status", "4711").out
    assert "step " not in out
    assert "last written 00:00:0" in out
    printed(root, (1, "0 E", bar(60)))
    assert "step       60/100" in here("status", "4711").out
    ended(root, "FAILED", 1)
    queue(here)
    out = here("status", "4711").out
    assert "step       60/100" in out
    assert "output " not in out
    assert "60/100" in here("list").out
    assert "60/100" not in here("list", "--all").out  # hundreds of logs


def test_the_fullest_memory_is_shown_and_at_the_end_the_peaks(
    here: CommandLine, root: Path
) -> None:
    assert "memory  " not in here("status").out, "there is no sample"
    sampled(root)
    sampled(root, node="node18", host=500)
    host, gpu = "host {} % of 2,000 GiB (node17)", "GPU {} % of 80 GiB (GPU 2 of node17)"
    both = f"{host}, {gpu}"
    assert f"memory     {both.format(31, 64)}\n" in here("status").out
    queue(here)
    ended(root, "COMPLETED", 0)
    assert f"memory     peaks: {both.format(36, 88)}\n" in here("status").out
    RunPaths(root=root).attempt(2).mkdir()
    assert "memory  " not in here("status").out, "no sample of the new attempt"
