"""What the memory cgroup counts, in both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterrun.health.cgroup import MemoryGroup
from clusterrun.logformat.notes import Memory

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
    written(top, memory_events="oom 1\noom_kill 1\n", memory_max="4096\n", memory_peak="4000\n")
    written(group.levels[0], memory_events="oom_kill 0\n", memory_max="max\n")
    before = group.kills()
    written(top, memory_events="oom 3\noom_kill 3\n")
    assert group.since(before) == Memory(2, 4096, 4000)
    assert group.job == f"/system.slice/slurmstepd.scope/{job}"


def test_the_first_version(tmp_path: Path) -> None:
    group = MemoryGroup.own("9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n", tmp_path)
    own = tmp_path / "memory" / "a" / "b"
    written(own, memory_oom_control="under_oom 0\noom_kill 0\n")
    written(own, memory_limit_in_bytes="9223372036854771712\n")
    assert group.since(group.kills()) == Memory(0)
    assert group.job == ""  # of no step of Slurm


@pytest.mark.parametrize("text", ["", "0::/../x\n", "nonsense", "0::/gone\n"])
def test_what_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    group = MemoryGroup.own(text, tmp_path)
    assert group.since(group.kills()) is None
