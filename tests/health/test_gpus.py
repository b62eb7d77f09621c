"""Each check of GPUs finds its own fault, and no other check does, with a stand-in for NVML."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from clusterrun.health import toolchain
from clusterrun.health.examine import examine
from clusterrun.health.gpus import LONG_S, GpuAnswer, gpu_checks, gpu_facts, read
from clusterrun.shared import shell
from clusterrun.shared.finding import Finding, Severity
from tests.health.stand_in import StandIn, stand_in
from tests.patience import patience


@pytest.fixture(name="driver")
def _driver(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> StandIn:
    return stand_in(tmp_path_factory.getbasetemp() / "nvml", tmp_path / "says", monkeypatch)


def asked(*names: str, within_s: float = 0) -> GpuAnswer:
    return GpuAnswer(names, within_s or 20 * patience())


def looked(found: GpuAnswer | None, ranks: int = 2) -> dict[str, Finding]:
    checks = examine(gpu_checks(found, ranks), 20 * patience())
    return {check.id: check for check in checks}


def statuses(found: dict[str, Finding]) -> dict[str, Severity]:
    return {
        name: check.severity for name, check in found.items() if check.severity is not Severity.OK
    }


def test_healthy_gpus(driver: StandIn) -> None:
    assert statuses(looked(asked())) == {"gpu.xid": "skip"}, "a driver before 570"
    driver.answer(gpu0_recovery=0, gpu1_recovery=0)
    found = looked(asked())
    assert statuses(found) == {}
    assert found["gpu.count"].text == "2 GPUs (NVIDIA H100 80GB HBM3) for 2 ranks"
    assert [tuple(gpu.capability or ()) for gpu in asked().gpus] == [(9, 0)] * 2
    assert "at most 4 MiB in use" in found["gpu.foreign"].text
    assert toolchain.driver("12.4", asked()).severity is Severity.OK
    old = toolchain.driver("13.0", asked())
    assert (old.severity, "it needs 580.65" in old.text) == (Severity.FAIL, True)
    assert gpu_facts(asked()) == {
        "driver": "560.35.03",
        "gpus": "2 x NVIDIA H100 80GB HBM3, 79.6 GiB",
        "nvlinks": "18 of 18 active",
    }


@pytest.mark.parametrize(
    ("name", "status", "hint", "text", "says"),
    [
        ("gpu.count", "fail", "--gpus-per-node", "1 GPU (NVIDIA H", {"gpus": 1}),
        ("gpu.count", "fail", "--exclude", "GPU 1: it does not", {"gpu1_handle": -15}),
        ("gpu.ecc", "note", "-d ECC", "GPU 1: 2 uncorrected ECC errors", {"gpu1_errors": 2}),
        ("gpu.ecc", "fail", "-d ECC", "GPU 1: 2 unc", {"gpu1_errors": 2, "gpu1_pending": -3}),
        ("gpu.ecc", "fail", "-d ECC", "GPU 0: remapping a row of its", {"gpu0_failure": 1}),
        ("gpu.ecc", "note", "-d ECC", "GPU 1: a part of its memory", {"gpu1_pending": 1}),
        ("gpu.ecc", "note", "-d ECC", "GPU 1: a part of its memory", {"gpu1_retired": 1}),
        ("gpu.throttle", "note", "PERFORMANCE", "GPU 0: too hot", {"gpu0_reasons": 0x48}),
        ("gpu.throttle", "note", "PERFORMANCE", "GPU 0: short of power", {"gpu0_reasons": 0x88}),
        ("gpu.throttle", "note", "PERFORMANCE", "GPU 0: slowed down by", {"gpu0_reasons": 0x08}),
        ("gpu.foreign", "note", "nvidia-smi", "GPU 1: used by process 1 (", {"gpu1_pid": 1}),
        ("gpu.foreign", "note", "nvidia-smi", "999999999 (not visible", {"gpu1_pid": 999_999_999}),
        (
            "gpu.foreign",
            "note",
            "slurm.exclusive=true",
            "GPU 0: 1.0 GiB of 79.6 GiB",
            {"gpu0_used": 1024},
        ),
        (
            "gpu.foreign",
            "fail",
            "slurm.exclusive=true",
            "that are not visible",
            {"gpu0_used": 40_000},
        ),
        ("gpu.xid", "fail", "dmesg", "GPU 1: the driver asks for a reboot", {"gpu1_recovery": 2}),
        ("gpu.xid", "note", "dmesg", "for a reset after its jobs", {"gpu1_recovery": 4}),
    ],
)
def test_one_thing_is_broken(
    driver: StandIn, name: str, status: str, hint: str, text: str, says: dict[str, int]
) -> None:
    driver.answer(**{"gpu0_recovery": 0, "gpu1_recovery": 0, **says})
    found = looked(asked())
    assert statuses(found) == {name: status}, found
    assert hint in found[name].fix
    assert text in found[name].text


def test_our_own_processes_are_not_foreign(driver: StandIn) -> None:
    own = subprocess.Popen(["sleep", "600"])
    driver.answer(gpu0_recovery=0, gpu1_recovery=0, gpu1_pid=own.pid, gpu1_used=70_000)
    try:
        assert statuses(looked(asked())) == {}
    finally:
        own.kill()
        own.wait()


def test_only_the_jobs_gpus_are_looked_at(driver: StandIn) -> None:
    driver.answer(gpu0_errors=3, gpu0_recovery=2, gpu1_recovery=0)  # of the driver: a reboot
    assert statuses(looked(asked("1"), ranks=1)) == {}
    assert statuses(looked(asked("GPU-b"), ranks=1)) == {}
    assert statuses(looked(asked("1", "0"))) == {"gpu.ecc": "fail", "gpu.xid": "fail"}
    assert "GPU 7: the driver does not list it" in looked(asked("1", "7"))["gpu.count"].text


@pytest.mark.parametrize(
    ("name", "text", "fields"),
    [
        ("gpu.ecc", "do not report memory errors", ("errors", "retired", "pending")),
        ("gpu.throttle", "do not report why", ("reasons",)),
        ("gpu.foreign", "do not report their memory", ("used", "used1", "pid")),
    ],
)
def test_what_a_gpu_does_not_report_is_not_ok(
    driver: StandIn, name: str, text: str, fields: tuple[str, ...]
) -> None:
    """As a GPU without the feature (-3), or a driver without the function (-13)."""
    recovered = {"gpu0_recovery": 0, "gpu1_recovery": 0}
    driver.answer(**recovered, **{f"gpu0_{field}": -3 for field in fields})
    found = looked(asked())
    assert statuses(found) == {}
    assert found[name].text.endswith("incomplete reports from GPU 0")
    driver.answer(**{f"gpu1_{field}": -13 for field in fields})
    found = looked(asked())
    assert statuses(found) == {name: "skip"}
    assert text in found[name].text


@pytest.mark.parametrize("says", [{"init": -12}, {"init": -9}])
def test_a_machine_without_a_driver(driver: StandIn, says: dict[str, int]) -> None:
    driver.answer(**says)
    found = looked(asked())
    assert {check.severity for check in found.values()} == {Severity.SKIP}
    assert found["gpu.count"].text == "this machine has no NVIDIA driver"
    assert gpu_facts(asked()) == {}


@pytest.mark.parametrize(
    ("says", "text"),
    [
        ({"gpu1_reasons": "hang"}, "NVIDIA's driver did not answer within 3 s, asked for GPU 1"),
        ({"init": -18}, "NVIDIA's driver cannot be used: RM has detected"),
        ({"gpus": -999}, "asking NVIDIA's driver for NVML failed: "),
    ],
)
def test_a_driver_that_fails_is_one_failure(
    driver: StandIn, says: dict[str, int | str], text: str
) -> None:
    driver.answer(**says)
    begin, answer = time.monotonic(), asked(within_s=LONG_S)
    found = looked(answer)
    assert time.monotonic() - begin < LONG_S + patience()
    assert found["gpu.count"].severity is Severity.FAIL
    assert "nvidia-smi -q" in found["gpu.count"].fix
    assert text in found["gpu.count"].text
    assert {check.severity for check in found.values() if check.id != "gpu.count"} == {
        Severity.SKIP
    }
    if answer.pid:
        assert not Path(f"/proc/{answer.pid}").exists(), "it was ended, and has left no zombie"


def test_nobody_waits_for_a_process_that_cannot_be_killed(tmp_path: Path) -> None:
    """As one that the driver blocks: a process of another session that holds its pipes."""
    note = tmp_path / "pid"
    line = f"setsid bash -c 'echo $$ > {note}; sleep 600' & echo ready; wait"
    begin, limit_s = time.monotonic(), 2 * patience()
    done = shell.run_once(["bash", "-c", line], limit_s, rest_s=0.1)
    took_s = time.monotonic() - begin
    with contextlib.suppress(OSError):
        os.killpg(int(note.read_text()), signal.SIGKILL)
    assert (done.rc, done.stdout) == (shell.TIMED_OUT, "ready\n")
    assert done.pid
    assert took_s < 2 * limit_s


def test_a_python_that_starts_slowly_says_nothing_about_the_driver() -> None:
    late = shell.Completed(rc=shell.TIMED_OUT, stdout="", stderr="")
    assert (read(late, 1.5).problem, read(late, 1.5).absent) == (
        "",
        "Python, which asks NVML, did not start within 1.5 s",
    )
    cut = shell.Completed(rc=shell.TIMED_OUT, stdout='{"asks": "NVML"}\n{"driv', stderr="")
    assert "did not answer within 1.5 s" in read(cut, 1.5).problem
