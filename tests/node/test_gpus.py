"""What NVML answers while an attempt runs, and what an agent notes of it; a stand-in for NVML."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterrun.diagnosis.table import Role, built_in
from clusterrun.health.nvml import NvmlGpu
from clusterrun.node.base import processes
from clusterrun.node.watch import notes
from clusterrun.node.watch.notes import Gpus
from tests.health.stand_in import StandIn, stand_in
from tests.patience import patience

Start = Callable[..., Gpus]


@pytest.fixture(name="driver")
def _driver(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StandIn:
    return stand_in(tmp_path_factory.getbasetemp() / "nvml", tmp_path / "says", monkeypatch)


@pytest.fixture(name="start")
def _start(driver: StandIn) -> Iterator[Start]:
    made: list[Gpus] = []

    def start(*names: str, is_asked: bool = True) -> Gpus:
        made.append(Gpus(names))
        assert not is_asked or made[-1].ask(30 * patience())
        return made[-1]

    yield start
    for each in made:
        each.close()


def noted(found: Gpus, within_s: float = 30.0) -> list[str]:
    return [str(note) for note in asyncio.run(found.notes(within_s * patience()))]


def roles(text: str) -> dict[str, Role]:
    """Return the causes that a text is a sign of."""
    found = ((cause, sign) for cause in built_in().values() for sign in cause.signs)
    return {cause.id: sign.role for cause, sign in found if sign.text.search(text)}


WORSE = [
    ({"gpu0_errors": 2}, "2 new uncorrectable ECC errors", "gpu_ecc"),
    ({"gpu0_pending": 1}, "now waits for its replacement", "gpu_ecc"),
    ({"gpu0_failure": 1}, "remapping a row of its memory failed", "gpu_ecc"),
    ({"gpu0_recovery": 1}, "the driver now asks for a reset", "gpu_xid"),
    ({"gpu0_handle": -15}, "it does not answer: GPU is lost", "gpu_hardware"),
    ({"gpus": 0}, "the driver does not list it", "gpu_hardware"),
]


@pytest.mark.parametrize(("change", "text", "cause"), WORSE)
def test_what_became_worse_is_a_sign_of_one_cause(
    driver: StandIn, start: Start, change: dict[str, int], text: str, cause: str
) -> None:
    found = start("0")
    driver.answer(**change)
    (line,) = noted(found)
    assert line.startswith("nvml: GPU 0 (0000:3b:00, GPU-a): ")
    assert text in line
    assert roles(line.removeprefix("nvml: ")) == {cause: Role.ROOT}


def test_what_was_so_before_or_is_another_jobs_is_no_change(driver: StandIn, start: Start) -> None:
    driver.answer(gpu1_errors=2, gpu1_pending=1)
    found = start("1")
    driver.answer(gpu0_errors=3)
    assert noted(found) == []


def test_a_gpu_that_fell_off_is_no_longer_listed(driver: StandIn, start: Start) -> None:
    found = start()
    driver.answer(gpus=1)
    (line,) = noted(found)
    assert line == "nvml: GPU 1 (0000:3c:00, GPU-b) is no longer listed"
    assert roles(line.removeprefix("nvml: ")) == {"gpu_hardware": Role.ROOT}


@pytest.mark.parametrize(("idle_s", "is_noted"), [(600.0, True), (-1.0, False)])
def test_memory_that_others_held_is_noted_but_not_what_ranks_use(
    driver: StandIn, start: Start, monkeypatch: pytest.MonkeyPatch, idle_s: float, is_noted: bool
) -> None:
    monkeypatch.setattr(notes, "IDLE_S", idle_s)
    driver.answer(gpu1_used=79123)
    line = "GPU 1 (0000:3c:00): 79123 of 81559 MiB were in use before the ranks started"
    found = start()
    assert noted(found) == [f"nvml: {line}"] * is_noted
    assert roles(line) == {}


def test_the_work_of_gpus(driver: StandIn, start: Start) -> None:
    def asked(name: str) -> NvmlGpu:
        (gpu,) = start(name).before.values()
        return gpu

    gpu = asked("GPU-b")
    assert (gpu.activity, gpu.watts, gpu.celsius) == (30.0, 350.5, 61)
    driver.answer(gpu0_power=-3)
    gpu = asked("0")
    assert (gpu.activity, gpu.watts) == (30.0, None)
    driver.answer(gpu0_mig=1)
    made = start(is_asked=False)
    assert made.ask(0.0) is None, "a late answer is that to the next question"
    listed = made.ask(30 * patience()) or []
    assert [(gpu.name, made.number(gpu)) for gpu in listed] == [("MIG-a", 0), ("1", 1)]


def test_a_driver_that_hangs_is_left_alone(driver: StandIn, start: Start) -> None:
    found = start()
    driver.answer(gpu0_errors="hang")
    begun = time.monotonic()
    for _ in range(2):
        (note,) = asyncio.run(found.notes(0.2))
        assert roles(note.text) == {"gpu_hang": Role.CONFIRMATION}
    assert time.monotonic() - begun < 30 * patience()
    assert len(found.pids) == 1


def test_a_process_that_is_killed_answers_nothing(start: Start) -> None:
    found = start()
    (pid,) = found.pids
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its socket closes a little earlier
    assert found.ask(30 * patience()) is None or found.ask(30 * patience()) is None
    assert not found.is_open
    assert (noted(found), found.pids) == ([], [])


def test_a_node_without_a_driver_has_no_notes(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    found = start(is_asked=False)
    assert (noted(found), found.is_open, found.before) == ([], False, {})


def test_what_is_stuck_in_the_kernel_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "KILL_S", 0.1)
    others = processes.descendants()  # of other tests
    with subprocess.Popen(["sleep", "60"]) as stuck:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda pid, number: None)
            assert processes.kill_descendants(spared=others) == [stuck.pid]
            assert processes.kill_descendants([stuck.pid], others) == []
        stuck.kill()
