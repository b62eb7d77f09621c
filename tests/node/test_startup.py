"""The head learns from its own events where the start of an attempt spends its time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from clusterrun.node.base.identity import Attempt, Identity
from clusterrun.node.base.shared_disk import SharedDisk
from clusterrun.node.watch.startup import StartWatch
from clusterrun.rundir.claims import take_attempt, taken_at
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.startup import STAGED_AT, Phase, read_start
from tests.launch.samples import here

NODES = tuple(f"n{number}" for number in range(1000))


class Disk:
    """Works at once, and counts."""

    def __init__(self) -> None:
        self.deeds = 0

    def do(self, work: Callable[[], Any]) -> None:
        self.deeds += 1
        work()


@pytest.fixture(name="paths")
def _paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(root=tmp_path)
    paths.attempts_dir.mkdir()
    return paths


@pytest.fixture(name="disk")
def _disk() -> Disk:
    return Disk()


@pytest.fixture(name="watch")
def _watch(paths: RunPaths, disk: Disk) -> StartWatch:
    """Return the watch of the first of 1,000 nodes with 8 ranks each."""
    who = Identity(
        job_id="42", node="n0", node_rank=0, nodes=NODES, head_host="127.0.0.1", is_local=False
    )
    attempt = Attempt(plan=here(nodes=1000, nproc_per_node=8), paths=paths, number=1, who=who)
    return StartWatch(attempt, cast(SharedDisk, disk))


def start(watch: StartWatch) -> None:
    watch.see({"type": "started", "ts": 100.0, "nodelist": "n[0-999]"})
    watch.reached(Phase.PREFLIGHT, 100.5)
    watch.see({"type": "forge", "ts": 100.8})
    watch.see({"type": "rendezvous", "ts": 101.0})
    for rank in range(8):
        watch.see({"type": "rank_start", "ts": 104.0 + rank / 10, "rank": rank})


def test_a_large_start_costs_three_small_files(
    paths: RunPaths, disk: Disk, watch: StartWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_START_TIME", "90")
    monkeypatch.setenv(STAGED_AT, "99.5")
    assert take_attempt(paths, 1, "me")
    start(watch)
    watch.see({"type": "world_ready", "ts": 109.0, "hosts": NODES, "waited_s": 1.5})
    for step in range(1000):
        watch.see({"type": "step", "ts": 110.0 + step, "step": step})
    assert disk.deeds == 3
    assert paths.start(1).stat().st_size < 500
    assert read_start(paths, 1)[0] == {
        Phase.QUEUE: 90.0,
        Phase.PROLOG: taken_at(paths, 1),
        Phase.STAGE: 99.5,
        Phase.SETUP: 100.0,
        Phase.PREFLIGHT: 100.5,
        Phase.FORGE: 100.8,
        Phase.AGENTS: 101.0,
        Phase.LAUNCHER: 104.7,
        Phase.IMPORTS: 107.5,
        Phase.RENDEZVOUS: 109.0,
        Phase.FIRST_STEP: 110.0,
    }


def test_nothing_is_written_until_all_ranks_of_the_node_run(
    paths: RunPaths, disk: Disk, watch: StartWatch
) -> None:
    paths.attempt(1).mkdir()
    for rank in range(7):
        watch.see({"type": "rank_start", "ts": 104.0, "rank": rank})
    assert disk.deeds == 0
    watch.see({"type": "rank_start", "ts": 105.0, "rank": 7})
    assert Phase.LAUNCHER in read_start(paths, 1)[0]


@pytest.mark.usefixtures("disk")
def test_what_is_unknown_is_left_out(
    paths: RunPaths, watch: StartWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_START_TIME", raising=False)
    paths.attempt(1).mkdir()
    start(watch)
    watch.see({"type": "world_ready", "ts": 109.0, "waited_s": "?"})
    assert set(Phase) - set(read_start(paths, 1)[0]) == {
        *(Phase.STOP, Phase.QUEUE, Phase.PROLOG, Phase.DECISION, Phase.STAGE),
        *(Phase.IMPORTS, Phase.FIRST_STEP),
    }


def test_a_run_directory_that_cannot_be_written_ends_nothing(watch: StartWatch) -> None:
    start(watch)  # there is no directory of the attempt
