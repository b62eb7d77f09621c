"""The quick checks of a node, as their callers see them: what certainly fails, and what may."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from clusterrun.diagnosis.kinds import Memory
from clusterrun.health import machine
from clusterrun.health.checks import clock as checks_clock
from clusterrun.health.machine import MemoryGroup
from clusterrun.health.node import Needs
from clusterrun.shared.finding import Finding, Severity

GIB = 1 << 30


@pytest.fixture(name="group")
def _group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The limit of a cgroup above this process."""
    (tmp_path / "job").mkdir()
    group = MemoryGroup.own("0::/job/step_0/task_0\n", tmp_path)
    monkeypatch.setattr(machine, "own_group", lambda: group)
    return tmp_path / "memory.max"


@pytest.mark.parametrize(
    ("limit", "planned", "status"),
    [
        ("max", 0, Severity.OK),
        (str(GIB), 0, Severity.OK),
        (str(GIB - 1), 0, Severity.NOTE),
        (str(GIB), GIB + 1, Severity.NOTE),
        (str(200 << 20), 0, Severity.FAIL),
    ],
)
def test_the_memory_that_a_job_may_use(
    group: Path, limit: str, planned: int, status: Severity
) -> None:
    group.write_text(f"{limit}\n")
    found = machine.memory(1, planned)
    assert found.severity is status, found.text
    assert found.fix == ("request more with --mem" if status is not Severity.OK else "")


def test_the_ports_of_infiniband_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    monkeypatch.setattr(machine, "INFINIBAND", tmp_path)
    assert machine.facts()["network.mlx5_0/1"] == "ACTIVE, 400 Gb/sec (4X NDR)"


@pytest.mark.parametrize(
    ("moved", "status", "text"),
    [
        (0, Severity.OK, "0.0 s ahead of"),
        (-9, Severity.NOTE, "9.0 s ahead of"),
        (9, Severity.NOTE, "9.0 s behind"),
    ],
)
def test_the_clock_of_a_file_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int, status: Severity, text: str
) -> None:
    """A server whose clock is moved sets other times."""
    utime = os.utime
    monkeypatch.setattr(checks_clock, "file_system", lambda _: "nfs4")
    monkeypatch.setattr(os, "utime", lambda file: utime(file, (0, time.time() + moved)))
    found = checks_clock.clock(Needs(runs=tmp_path))
    assert found.severity is status
    assert text in found.text
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("ranks", "status"), [(1, Severity.NOTE), (2, Severity.FAIL)])
def test_shared_memory_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, status: Severity
) -> None:
    monkeypatch.setattr(machine, "SHM", tmp_path / "shm")
    found: Finding = machine.shm(ranks)
    assert found.severity is status


@pytest.mark.parametrize(
    ("of_head", "hard", "status"),
    [
        (0, 250, Severity.NOTE),  # enough for its own ranks
        (0, 17, Severity.FAIL),
        (4000, 3999, Severity.FAIL),
        (4000, 4000, Severity.NOTE),
        (4000, 4255, Severity.NOTE),
        (4000, 4256, Severity.OK),
    ],
)
def test_only_the_heads_node_opens_a_file_for_each_node_and_rank(
    monkeypatch: pytest.MonkeyPatch, of_head: int, hard: int, status: Severity
) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (hard, hard))
    assert machine.open_files(2, of_head).severity is status


SLURM = "system.slice/slurmstepd.scope/{}/step_0/user/task_0"


def written(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("_", ".", 1)).write_text(text)


@pytest.mark.parametrize("job", ["job_4711", "s6BA7MXHZKGY2R"])
def test_the_job_of_a_step_counts_and_what_is_above_does_not(tmp_path: Path, job: str) -> None:
    group = MemoryGroup.own(f"0::/{SLURM.format(job)}\n", tmp_path)
    assert group.levels[-1] == tmp_path / "system.slice/slurmstepd.scope" / job
    top = group.levels[-1]
    written(top, memory_events="oom 1\noom_kill 1\n", memory_max="4096\n")
    written(group.levels[0], memory_events="oom_kill 0\n", memory_max="max\n")
    before = group.kills()
    written(top, memory_events="oom 3\noom_kill 3\n")
    assert group.since(before) == Memory(2, 4096)


def test_the_first_version(tmp_path: Path) -> None:
    group = MemoryGroup.own("9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n", tmp_path)
    own = tmp_path / "memory" / "a" / "b"
    written(own, memory_oom_control="under_oom 0\noom_kill 0\n")
    written(own, memory_limit_in_bytes="9223372036854771712\n")
    assert group.since(group.kills()) == Memory(0)


@pytest.mark.parametrize("text", ["", "0::/../x\n", "nonsense", "0::/gone\n"])
def test_what_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    group = MemoryGroup.own(text, tmp_path)
    assert group.since(group.kills()) is None
