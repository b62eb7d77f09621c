"""When an agent notes what its node knows, and that this changes nothing else."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterrun.config.choices import Device
from clusterrun.diagnosis.kinds import Memory, Note, NoteSource
from clusterrun.health.machine import MemoryGroup
from clusterrun.node.base.causes import Cause, Ending, Failure, cancelled, lost_node
from clusterrun.node.watch import notes
from clusterrun.node.watch.notes import MOST_LINES, OLD_S, KernelLog, NodeNotes, of_interest


def killed(node: str = "n1") -> Ending:
    number = signal.SIGKILL
    return Ending.of(Failure(node=node, code=137, signal=number, cause=Cause.SIGNAL, message="x"))


class Asked:
    """GPUs that count how often they are asked."""

    before: tuple[str, ...] = ()
    times = 0

    async def notes(self) -> list[Note]:
        self.times += 1
        return [Note(source=NoteSource.NVML, text="x")]


@pytest.fixture(name="made")
def _made(monkeypatch: pytest.MonkeyPatch) -> NodeNotes:
    monkeypatch.setattr(MemoryGroup, "since", lambda *_: Memory(0, 4096))
    monkeypatch.setattr(
        notes.KernelLog, "notes", lambda *_: [Note(source=NoteSource.KERNEL, text="x")]
    )
    plan = SimpleNamespace(device=Device.CPU, procs_per_node=2)
    attempt: Any = SimpleNamespace(who=SimpleNamespace(node="n1"), plan=plan)
    found = NodeNotes(attempt)
    found.gpus = Asked()  # type: ignore[assignment]
    return found


def lines(made: NodeNotes, ending: Ending) -> list[str]:
    return [str(note) for note in asyncio.run(made.notes(ending, {}))]


def test_a_failure_is_noted_and_what_the_node_knows_of_it(made: NodeNotes) -> None:
    kernel, nvml = "kernel: x", "nvml: x"
    assert lines(made, killed()) == [f"cgroup: {Memory(0, 4096)}", kernel, nvml]
    assert lines(made, killed("n2")) == [kernel, nvml]
    assert lines(made, Ending.of(lost_node("n2", "gone"))) == [kernel], "not the GPUs' fault"
    made.gpus = None
    assert lines(made, killed("n2")) == [kernel]
    for ending in (Ending.completed(), Ending.of(cancelled("n1"))):
        assert lines(made, ending) == []


def test_an_error_while_noting_is_a_line(made: NodeNotes, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*_: object) -> list[Note]:
        raise ValueError("torn")

    monkeypatch.setattr(notes.KernelLog, "notes", torn)
    assert lines(made, killed()) == ["agents: cannot record node evidence: ValueError('torn')"]


# Messages of the kernel: the agent's own processes', its GPUs', the node's


OURS: Any = ({4242: 2, 4300: None}, {"0000:3b:00"})
NOBODY = "999999999"  # no pid of Linux is so high


def noted(*texts: str) -> list[str]:
    return [str(note).removeprefix("kernel: ") for note in of_interest(texts, *OURS)]


PROCESSES = [
    "pt_main_thread[4242]: segfault at 8 ip 00007f10 sp 00007ffe error 4 in libcuda.so[7f10]",
    "traps: pt_main_thread[4242] general protection fault ip:7f10 sp:7ffe error:0 in libc.so",
    "Out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB",
    "Out of memory: Kill process 4242 (python) score 977 or sacrifice child",
    "oom_reaper: reaped process 4242 (python), now anon-rss:0kB",
    "Memory failure: 0x1fd3a4: Sending SIGBUS to python:4242 due to hardware memory corruption",
    "INFO: task pt main:4242 blocked for more than 120 seconds.",
]


def test_a_message_about_a_process_is_noted_only_if_it_is_ours() -> None:
    for text in PROCESSES:
        assert noted(text) == [f"[rank2]: {text}"]
        assert noted(text.replace("4242", "4300")) == [text.replace("4242", "4300")]
        assert noted(text.replace("4242", NOBODY)) == []


HARDWARE = {
    "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen": True,
    "NVRM: Xid (PCI:0000:3b:00): 31, pid=4242, name=python, Ch 00000008": True,
    "NVRM: Xid (PCI:0000:3b:00): 31, pid=999, name=theirs, Ch 00000008": False,
    "NVRM: Xid (0000:3B:00): 48, DBE (double bit error) on partition 3": True,
    "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x26:0x56:1474)": True,
    "NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus.": False,
    "mlx5_core 0000:9a:00.0: poll_health:851:(pid 0): device's health compromised": True,
    "mlx5_core 0000:9a:00.0: Port module event: module 0, Cable plugged": False,
    "EDAC MC3: 1 UE memory read error on CPU_SrcID#1_MC#1_Chan#2_DIMM#0": True,
    "EDAC MC3: 1 CE memory read error on CPU_SrcID#1_MC#1_Chan#2_DIMM#0": False,
    "Buffer I/O error on dev dm-0, logical block 9, lost async page write": True,
    "device eth0 entered promiscuous mode": False,
}


def test_a_message_about_hardware_is_noted_unless_it_is_of_another_job() -> None:
    assert {text: noted(text) == [text] for text in HARDWARE} == HARDWARE


def record(text: str, priority: int = 4, age_s: float = 0.0) -> str:
    at_us = round((time.monotonic() - age_s) * 1e6)
    return f"{priority},17,{at_us},-;{text}\n SUBSYSTEM=pci\n"


def test_only_new_messages_of_the_kernel_are_read(tmp_path: Path) -> None:
    device = tmp_path / "kmsg"
    lost = "Buffer I/O error on dev {}, logical block 9"
    device.write_text(record(lost.format("old")))
    log = KernelLog(device)
    with device.open("a") as file:
        file.write(record(lost.format("new")) + record(lost.format("faked"), priority=12))
        file.write(record(lost.format("passed"), age_s=OLD_S + 60))
    assert list(map(str, log.notes(*OURS))) == [f"kernel: {lost.format('new')}"]
    assert log.notes(*OURS) == []


def test_a_storm_of_messages_is_cut(tmp_path: Path) -> None:
    device = tmp_path / "kmsg"
    device.touch()
    log = KernelLog(device)
    device.write_text("".join(record(f"Buffer I/O error on dev dm-{n}") for n in range(100)))
    assert len(log.notes(*OURS)) == MOST_LINES


def test_a_log_that_cannot_be_read_is_no_note(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / "none")
    assert log.notes(*OURS) == []
    log.close()
