"""The samples that an agent takes of its node: agreement with the kernel, alerts, faults."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clusterrun.health.machine import OWN, MemoryGroup, cpu_seconds
from clusterrun.health.nvml import NvmlGpu
from clusterrun.node.watch import usage
from clusterrun.node.watch.usage import Sampler, following, full_in_s, holding
from clusterrun.rundir import usage as files
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.usage import AlertKind, GpuSample, Sample, alert_texts
from tests.patience import patience, wait_for

MIB = 1 << 20
HOG = "import sys; x = bytearray(int(sys.argv[1]) << 20); print(flush=True); sys.stdin.read()"


@pytest.fixture(name="hog")
def _hog() -> Iterator[subprocess.Popen[bytes]]:
    """Hold 300 MiB in a process."""
    argv = [sys.executable, "-c", HOG, "300"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        yield process
        process.kill()


def sampler(root: Path, **given: Any) -> Any:
    plan = SimpleNamespace(nodes=1, gpus_per_node=0)
    who = SimpleNamespace(node="n1")
    attempt: Any = SimpleNamespace(plan=plan, who=who, number=1, paths=RunPaths(root=root))
    said: list[str] = []
    now_s = given.pop("now_s", time.time)
    journal: Any = SimpleNamespace(now_s=now_s, say=said.append)
    made = Sampler(attempt=attempt, journal=journal, **{"gpus": None, "pids": dict, **given})
    return SimpleNamespace(take_sample=made.take_sample, said=said, it=made)


def test_the_memory_of_a_rank_is_its_own_and_its_childrens(
    tmp_path: Path, hog: subprocess.Popen[bytes]
) -> None:
    ((rank, own),) = sampler(tmp_path, pids=lambda: {3: hog.pid}).take_sample().ranks
    truth = psutil.Process(hog.pid).memory_info()
    assert (rank, own) == (3, pytest.approx(truth.rss - truth.shared, rel=0.02))
    ((_, all_of_it),) = sampler(tmp_path, pids=lambda: {3: os.getpid()}).take_sample().ranks
    assert all_of_it > own + 10 * MIB


def test_memory_agrees_with_the_cgroup() -> None:
    own = MemoryGroup.own(OWN.read_text())
    place = own.levels[0] / f"clusterrun-test-{os.getpid()}"
    try:
        place.mkdir()
        (place / ("memory.limit_in_bytes" if own.is_v1 else "memory.max")).write_text(f"{1 << 30}")
    except OSError:  # no cgroup with a limit can be made here
        assert 0 < own.memory()[0] < psutil.virtual_memory().total
        return
    enter = f"open('{place}/cgroup.procs', 'w').write('0'); {HOG}"
    argv = [sys.executable, "-c", enter, "300"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        memory = psutil.Process(process.pid).memory_info()
        used, limit = MemoryGroup(levels=(place,), is_v1=own.is_v1).memory()
        process.kill()
    wait_for(lambda: not (place / "cgroup.procs").read_text())
    place.rmdir()
    assert limit == 1 << 30
    assert used == pytest.approx(memory.rss - memory.shared, rel=0.02)


SLURM = "system.slice/slurmstepd.scope/job_7"


def test_the_group_with_the_lowest_limit_counts_without_its_page_cache(tmp_path: Path) -> None:
    group = MemoryGroup.own(f"0::/{SLURM}/step_0/user/task_0\n", tmp_path)
    top = group.levels[-1]
    group.levels[0].mkdir(parents=True)
    (top / "memory.max").write_text("1000000\n")
    (group.levels[1] / "memory.max").write_text("1000000\n")
    (top / "memory.stat").write_text("anon 500\nfile 300\nshmem 100\n")
    assert group.memory() == (600, 1000000)
    (top / "memory.max").write_text("max\n")
    (group.levels[1] / "memory.max").write_text("max\n")
    machine = psutil.virtual_memory()
    used, limit = group.memory()
    assert limit == machine.total
    assert used == pytest.approx(machine.total - machine.available, rel=0.2)


@pytest.mark.parametrize("own", [f"0::/{SLURM}/step_0/x\n", f"2:cpu,cpuacct:/{SLURM}/step_0\n"])
def test_cpu_time_is_that_of_the_job(tmp_path: Path, own: str) -> None:
    for group in (tmp_path / SLURM, tmp_path / "cpuacct" / SLURM):
        group.mkdir(parents=True)
        (group / "cpu.stat").write_text("usage_usec 2500000\n")
        (group / "cpuacct.usage").write_text("2500000000\n")
    (tmp_path / "own").write_text(own)
    assert cpu_seconds(tmp_path, tmp_path / "own") == 2.5


def sample(at: float = 0.0, used: int | None = None, *gpus: GpuSample) -> Sample:
    return Sample(at=at, attempt=1, host_bytes=used, host_limit_bytes=100, gpus=gpus)


@given(st.lists(st.integers(50, 90)))
@example([70, 70, 70, 66, 90, 65, 70, 70, 69, 70, 70, 70, 70])
def test_an_alert_is_raised_once_for_each_crossing(values: list[int]) -> None:
    """It is raised where three in a row are at 70, and holds while the values stay above 65."""
    state: usage.State = {}
    held = False
    for at, used in enumerate(values):
        before = holding(state)
        state = following(following(state, sample(at, used)), sample(at, None))  # None: unknown
        held = used > 65 if held else at >= 2 and min(values[at - 2 : at + 1]) >= 70
        assert bool(holding(state)) is held
        assert holding(state) in ((), before) or not before, "it is the same alert"


def gpu(index: int, **fields: Any) -> GpuSample:
    return GpuSample(**{"index": index, "activity": 90.0, **fields})


def test_gpus_that_are_full_hot_or_idle() -> None:
    full = gpu(0, memory_bytes=85 << 30, memory_total_bytes=100 << 30)
    idle = gpu(2, activity=1.0, idle_s=660.0)
    many = sample(1, 50, full, gpu(1, temperature_c=86), idle)
    state: usage.State = {}
    for _ in range(3):
        state = following(state, many)
    assert alert_texts(holding(state), many) == [
        "GPU 0: memory 85 % of 100 GiB",
        "GPU 1: 86 °C",
        "GPU 2: idle for 11 min while others work",
    ]
    state = following(state, sample(2, 50, idle))
    assert AlertKind.GPU_IDLE not in {alert.kind for alert in holding(state)}, "all are idle"


@given(st.floats(10, 1e6), st.integers(0, 1 << 40))
def test_growth_tells_when_memory_is_full(rate: float, first: int) -> None:
    points = [(float(at), first + int(rate * at)) for at in range(0, 601, 5)]
    limit = points[-1][1] + int(rate * 2400)
    assert full_in_s(points, limit) == pytest.approx(2400, rel=0.05)
    assert full_in_s(points[:40], limit) is None, "too short"
    assert full_in_s([(at, -used) for at, used in points], limit) is None


class Driver:
    """GPUs that a test decides; without more answers, the process that asks has ended."""

    is_open = True

    def __init__(self, *answers: list[NvmlGpu] | None) -> None:
        self._answers = list(answers)

    def ask(self, within_s: float) -> list[NvmlGpu] | None:
        if self._answers:
            return self._answers.pop(0)
        self.is_open = False
        return None

    def number(self, gpu: NvmlGpu) -> int:
        return int(gpu.name)


def test_peaks_and_means_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(5, 1000, 5))
    monkeypatch.setattr(usage.time, "monotonic", lambda: next(clock))
    used = ((5, 0.0), (9, 40.0), (2, 20.0))
    answers = ([NvmlGpu(name="0", used=each, activity=active)] for each, active in used)
    made = sampler(tmp_path, gpus=Driver(*answers))
    (last,) = [made.take_sample().gpus for _ in range(3)][-1]
    assert (last.memory_bytes, last.memory_peak_bytes, last.activity_mean) == (2, 9, 30.0)


def test_a_driver_that_is_late_is_asked_again(tmp_path: Path) -> None:
    answer = [NvmlGpu(name="0")]
    made = sampler(tmp_path, gpus=Driver(answer, None, answer))
    assert [len(made.take_sample().gpus) for _ in range(5)] == [1, 0, 1, 0, 0]


def test_cpu_use_is_that_of_a_busy_process_and_a_clock_may_jump(tmp_path: Path) -> None:
    now = iter([1e9, 5e8])
    made = sampler(tmp_path, now_s=lambda: next(now))
    before, begun = cpu_seconds(), time.monotonic()
    made.take_sample()
    assert sum(range(2 * 10**7))
    last = made.take_sample()
    spent, taken = cpu_seconds() - before, time.monotonic() - begun
    assert last.cpu == pytest.approx(spent / taken, rel=0.02 * patience(), abs=0.1)
    assert (last.at, made.said) == (5e8, [])


def test_a_full_disk_drops_samples_and_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = sampler(tmp_path)
    made.take_sample()
    with monkeypatch.context() as patch:
        patch.setattr(usage.os, "open", full)
        made.take_sample(), made.take_sample()
    assert made.take_sample().lost == 2
    lines = RunPaths(root=tmp_path).usage("n1").read_bytes().splitlines()
    assert [files.parse(line) is not None for line in lines] == [True, True]


def full(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_the_files_of_a_node_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "HALF_BYTES", 2000)
    paths = RunPaths(root=tmp_path)
    for at in range(200):
        assert usage.append(paths, "n1", files.to_line(sample(float(at))))
    sizes = [path.stat().st_size for path in paths.usage_dir.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 2000
    both = paths.earlier_usage("n1").read_bytes() + paths.usage("n1").read_bytes()
    ats = [found.at for line in both.splitlines() if (found := files.parse(line))]
    assert ats == [*map(float, range(int(ats[0]), 200))]
    assert ats[0] <= 190


def test_a_file_that_is_none_costs_only_its_samples(tmp_path: Path) -> None:
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/x", path)):
        paths = RunPaths(root=tmp_path / f"{make}")
        paths.usage_dir.mkdir(parents=True)
        paths.attempt(1).mkdir(parents=True)
        make(paths.usage("n1"))  # type: ignore[operator]
        assert usage.append(paths, "n1", b"{}\n") is False
        assert files.read_latest(paths) == {}


def test_a_sample_that_a_full_disk_cuts_spoils_no_other(tmp_path: Path) -> None:
    paths, limits = RunPaths(root=tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = [files.to_line(sample(float(at))) for at in range(3)]
    assert usage.append(paths, "n1", lines[0])
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(lines[0]) + 9, limits[1]))
        assert not usage.append(paths, "n1", lines[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert usage.append(paths, "n1", lines[2])
    assert paths.usage("n1").read_bytes() == lines[0] + lines[2]


def test_a_sample_costs_less_than_a_hundredth_of_a_core(tmp_path: Path) -> None:
    made = sampler(tmp_path, pids=lambda: {0: os.getpid()})
    made.take_sample()
    begun = time.process_time()
    for _ in range(20):
        made.take_sample()
    assert (time.process_time() - begun) / 20 < 0.01 * usage.INTERVAL_S
