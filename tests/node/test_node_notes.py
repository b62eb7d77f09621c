"""When an agent notes what its node knows, and that this changes nothing else."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clusterrun.config.spec import Device
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


def test_a_failure_is_noted_and_memory_where_a_rank_was_killed(made: NodeNotes) -> None:
    memory = f"cgroup: {Memory(0, 4096)}"
    assert lines(made, killed()) == [memory, "kernel: x", "nvml: x", "preflight: x"]
    assert lines(made, killed("n2")) == ["kernel: x", "nvml: x", "preflight: x"]


def test_without_gpus_only_the_node_that_failed_is_checked_again(made: NodeNotes) -> None:
    made.gpus = None
    assert lines(made, killed())[-1] == "preflight: x"
    assert lines(made, killed("n2")) == ["kernel: x"]


@pytest.mark.parametrize("ending", [Ending.completed(), Ending.of(cancelled("n1"))])
def test_what_did_not_fail_is_not_noted(made: NodeNotes, ending: Ending) -> None:
    assert lines(made, ending) == []


def test_a_lost_node_is_not_the_fault_of_another_nodes_gpus(made: NodeNotes) -> None:
    assert lines(made, Ending.of(lost_node("n2", "gone"))) == ["kernel: x"]


def test_an_error_while_noting_is_a_line(made: NodeNotes, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*_: object) -> list[Note]:
        raise ValueError("torn")

    monkeypatch.setattr(notes.KernelLog, "notes", torn)
    assert lines(made, killed()) == ["agents: cannot note what the node knows: ValueError('torn')"]
