"""When an agent notes what its node knows, and that this changes nothing else."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clusterrun.config.choices import Device
from clusterrun.health.cgroup import MemoryGroup
from clusterrun.logformat.notes import Memory, Note, NoteSource
from clusterrun.node.base.causes import Cause, Ending, Failure, cancelled, lost_node
from clusterrun.node.watch import notes
from clusterrun.node.watch.notes import NodeNotes
from clusterrun.node.watch.preflight import NodeChecks


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


class Worse:
    """Checks that are worse than at the start."""

    pids = ()

    async def changes(self) -> list[Note]:
        return [Note(source=NoteSource.PREFLIGHT, text="x")]


@pytest.fixture(name="made")
def _made(monkeypatch: pytest.MonkeyPatch) -> NodeNotes:
    monkeypatch.setattr(MemoryGroup, "since", lambda *_: Memory(0, 4096))
    monkeypatch.setattr(
        notes.KernelLog, "notes", lambda *_: [Note(source=NoteSource.KERNEL, text="x")]
    )
    plan = SimpleNamespace(device=Device.CPU, procs_per_node=2)
    attempt: Any = SimpleNamespace(who=SimpleNamespace(node="n1"), plan=plan)
    found = NodeNotes(attempt, cast("NodeChecks", Worse()))
    found.gpus = Asked()  # type: ignore[assignment]
    return found


def lines(made: NodeNotes, ending: Ending) -> list[str]:
    return [str(note) for note in asyncio.run(made.notes(ending, {}))]


def test_a_failure_is_noted_and_what_the_node_knows_of_it(made: NodeNotes) -> None:
    kernel, nvml, preflight = "kernel: x", "nvml: x", "preflight: x"
    assert lines(made, killed()) == [f"cgroup: {Memory(0, 4096)}", kernel, nvml, preflight]
    assert lines(made, killed("n2")) == [kernel, nvml, preflight]
    assert lines(made, Ending.of(lost_node("n2", "gone"))) == [kernel], "not the GPUs' fault"
    made.gpus = None  # only the node that failed is checked again
    assert [lines(made, killed())[-1], lines(made, killed("n2"))] == [preflight, [kernel]]
    for ending in (Ending.completed(), Ending.of(cancelled("n1"))):
        assert lines(made, ending) == []


def test_an_error_while_noting_is_a_line(made: NodeNotes, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*_: object) -> list[Note]:
        raise ValueError("torn")

    monkeypatch.setattr(notes.KernelLog, "notes", torn)
    assert lines(made, killed()) == ["agents: cannot note what the node knows: ValueError('torn')"]
