"""What nvidia-smi answers, as drivers of several years print it, and what an agent notes of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

import pytest

from clusterrun.diagnosis.table import Role, built_in
from clusterrun.node.base import processes
from clusterrun.node.watch import gpus
from clusterrun.node.watch.gpus import Gpus, GpuState, changes, held, parsed, problems
from tests.patience import patience, wait_for

UUIDS = ("GPU-5a0c1f8e-7d3b", "GPU-b94d27b9-934d")
H100 = (
    f"00000000:3B:00.0, 0, {UUIDS[0]}, 4, 81559, 0, [N/A]\n"
    f"00000000:5E:00.0, 1, {UUIDS[1]}, 79123, 81559, 2, [N/A]\n"
)
ROWS = "00000000:3B:00.0, No, No\n00000000:5E:00.0, Yes, No\n"
V100 = f"00000000:3B:00.0, 0, {UUIDS[0]}, 11, 16160, 0, Yes\n"
UNKNOWN = (
    "ERROR: Option --query-remapped-rows=gpu_bus_id is not recognized. Please run 'nvidia-smi'"
)
TITAN = f"00000000:3B:00.0, 0, {UUIDS[0]}, [Not Supported], 12194, [Not Supported], [Not Supported]"
MUTE = f"00000000:3B:00.0, 0, {UUIDS[0]}, [Unknown Error], [Unknown Error], [Unknown Error], [N/A]"
LOST = (
    "Unable to determine the device handle for GPU 0000:5E:00.0: GPU is lost.  "
    "Reboot the system to recover this GPU\n"
)
DEAF = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."


def gpu(**fields: int | bool | None) -> GpuState:
    values: dict[str, int | bool | None] = {"used": 4, "total": 81559, "errors": 0}
    return GpuState(index=0, uuid=UUIDS[0], **{**values, **fields})  # type: ignore[arg-type]


def test_a_driver_with_remapped_rows() -> None:
    found = parsed([H100, ROWS], [])
    assert found["0000:3b:00"] == gpu(is_pending=False, is_worn=False)
    second = found["0000:5e:00"]
    assert (second.index, second.used, second.errors) == (1, 79123, 2)
    assert (second.is_pending, second.is_worn) == (True, False)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([V100, UNKNOWN], gpu(used=11, total=16160, is_pending=True)),
        ([TITAN, UNKNOWN], gpu(used=None, total=12194, errors=None)),
        ([MUTE, ""], gpu(used=None, total=None, errors=None)),
    ],
)
def test_older_drivers_and_cards_that_do_not_say(texts: list[str], expected: GpuState) -> None:
    assert parsed(texts, []) == {"0000:3b:00": expected}


@pytest.mark.parametrize("text", ["No devices were found\n", "", "a, b\n", LOST])
def test_what_is_no_gpu_is_left_out(text: str) -> None:
    assert parsed([text, text], []) == {}


@pytest.mark.parametrize(("name", "number"), [("1", 0), (UUIDS[1][:12], 0), ("7", None)])
def test_the_gpus_of_other_jobs_are_left_out(name: str, number: int | None) -> None:
    found = parsed([H100, ROWS], [name])
    expected = {} if number is None else {"0000:5e:00": number}
    assert {address: each.index for address, each in found.items()} == expected


WORSE = [
    pytest.param({"errors": 2}, "2 new uncorrectable ECC errors", "gpu_ecc", id="errors"),
    pytest.param({"is_pending": True}, "now waits for its replacement", "gpu_ecc", id="pending"),
    pytest.param({"is_worn": True}, "remapping a row of its memory failed", "gpu_ecc", id="worn"),
    pytest.param(None, "is no longer listed", "gpu_hardware", id="gone"),
]


def roles(text: str) -> dict[str, Role]:
    """Return the causes that a text is a sign of."""
    found = ((cause, sign) for cause in built_in().values() for sign in cause.signs)
    return {cause.id: sign.role for cause, sign in found if sign.text.search(text)}


@pytest.mark.parametrize(("fields", "text", "cause"), WORSE)
def test_what_became_worse_is_a_sign_of_one_cause(
    fields: dict[str, int] | None, text: str, cause: str
) -> None:
    before = {"0000:3b:00": gpu(is_pending=False, is_worn=False), "0000:5e:00": gpu()}
    now = {"0000:5e:00": gpu()}
    if fields is not None:
        now["0000:3b:00"] = gpu(**{"is_pending": False, "is_worn": False, **fields})
    (line,) = changes(before, now)
    assert text in line
    assert roles(line) == {cause: Role.ROOT}
    assert not list(changes(now, now)), "what was so before has not ended the attempt"


def test_what_was_not_known_before_is_no_change() -> None:
    silent = {"0000:3b:00": gpu(errors=None)}
    assert not list(changes(silent, {"0000:3b:00": gpu(errors=9, is_pending=True, is_worn=True)}))
    assert not list(changes({"0000:3b:00": gpu()}, {})), "nvidia-smi itself did not answer"


def test_memory_that_others_held_is_no_sign_by_itself() -> None:
    (line,) = held(parsed([H100, ROWS], []))
    assert line == "GPU 1 (0000:5e:00): 79123 of 81559 MiB were in use before the ranks started"
    assert roles(line) == {}


def test_an_error_about_another_jobs_gpu_is_left_out() -> None:
    assert list(problems(LOST, {"0000:5e:00": gpu()})) == [LOST.strip()]
    assert not list(problems(LOST, {"0000:3b:00": gpu()}))
    assert list(problems(DEAF, {"0000:3b:00": gpu()})) == [DEAF]
    assert not list(problems(DEAF, {})), "it may have been so before"


Smi = Path


@pytest.fixture(name="smi")
def _smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    program = tmp_path / "nvidia-smi"
    answers(program, H100, ROWS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return program


def answers(smi: Smi, text: str, rows: str, *, last: str = "") -> None:
    branch = f"case $1 in *remapped*) printf '%s' '{rows}';; *) printf '%s' '{text}';; esac"
    smi.write_text(f"#!/bin/bash\n{branch}\n{last}\n")


def noted(found: Gpus, within_s: float = 30.0) -> list[str]:
    return asyncio.run(found.notes(within_s))


def started() -> Gpus:
    found = Gpus([])
    wait_for(lambda: found.before)
    return found


def test_the_node_is_asked_before_and_after(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "IDLE_S", 60.0)  # however busy this machine is
    found = started()
    held_line = "nvidia-smi: " + next(held(found.before))
    answers(smi, H100.replace("81559, 0,", "81559, 3,"), ROWS)
    error = f"nvidia-smi: GPU 0 (0000:3b:00, {UUIDS[0]}): 3 new uncorrectable ECC errors"
    assert noted(found) == [error, held_line]
    assert found.pids == []


def test_memory_that_ranks_may_use_is_not_held_by_others(
    smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "IDLE_S", -1.0)
    assert noted(started()) == []


def test_an_nvidia_smi_that_hangs_is_left_alone(smi: Smi) -> None:
    found = started()
    answers(smi, H100, ROWS, last="exec sleep 60")
    begun = time.monotonic()
    (line,) = noted(found, 0.2)
    assert time.monotonic() - begun < 30 * patience()
    assert roles(line.removeprefix("nvidia-smi: ")) == {"gpu_hang": Role.CONFIRMATION}
    assert len(found.pids) == 2
    for pid in found.pids:
        os.kill(pid, 9)


def test_one_that_has_hung_since_the_start_is_not_started_again(smi: Smi) -> None:
    answers(smi, "", "", last="exec sleep 60")
    found = Gpus([])
    before = found.pids
    assert len(noted(found, 0.1)) == 1
    assert found.pids == before
    for pid in before:
        os.kill(pid, 9)


def test_a_node_without_nvidia_smi_has_no_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    found = Gpus([])
    assert (noted(found), found.pids, dict(found.before)) == ([], [], {})


def test_what_is_stuck_in_the_kernel_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "KILL_S", 0.1)
    with subprocess.Popen(["sleep", "60"]) as stuck:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda pid, number: None)
            assert processes.kill_descendants() == [stuck.pid]
            assert processes.kill_descendants([stuck.pid]) == []
        stuck.kill()
