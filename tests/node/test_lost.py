"""What the next node does once the head's node is lost; the scheduler is recorded.

The real one is asked in tests/chaos, where a node is killed."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterrun.config.choices import Cluster
from clusterrun.errors import NodeExit
from clusterrun.node.base.causes import Ending, lost_node
from clusterrun.node.base.identity import Attempt
from clusterrun.node.recovery import lost
from clusterrun.node.recovery.lost import known_address, unreachable
from clusterrun.rundir.outcome import Outcome
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import write_whole
from clusterrun.shared.shell import Completed
from tests.launch.samples import on_slurm
from tests.node.jobs import who

NODES = ("n1", "n2", "n3")
LOSS = Ending.of(lost_node("n1", "the conductor is gone"))
REQUEUE = ["scontrol", "requeue", "42"]


class Scene:
    """A run whose head's node n1 is gone, and what was asked of Slurm since."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root=root)
        self.paths.attempt(1).mkdir(parents=True)
        self.gone: Sequence[str] = ("n1",)
        self.refusal = ""
        self.asked: list[list[str]] = []
        self.said: list[str] = []

    def lose_head(self, rank: int = 1, cluster: Cluster = Cluster.SLURM, spares: int = 1) -> Scene:
        plan = on_slurm(nodes=3, gpus_per_node=1, spare_nodes=spares)
        plan = dataclasses.replace(plan, cluster=cluster)
        given = Attempt(plan=plan, paths=self.paths, number=1, who=who(rank, *NODES))
        self.paths.outcome(1).unlink(missing_ok=True)
        lost.see_to_run(given, LOSS, self.said.append)
        assert Outcome.from_json(self.paths.outcome(1).read_text()).node == "n1"
        return self

    def unreachable(self, nodes: Sequence[str]) -> tuple[str, ...]:
        return tuple(node for node in nodes if node in self.gone)

    def run(self, argv: Sequence[str]) -> Completed:
        self.asked.append(list(argv))
        is_refused = bool(self.refusal) and "requeue" in argv
        return Completed(rc=int(is_refused), stdout="", stderr=f"{self.refusal}\n")

    @property
    def end(self) -> tuple[str, int]:
        end = json.loads(self.paths.end.read_text())
        return end["state"], end["exit_code"]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene(tmp_path)
    monkeypatch.setattr(lost, "unreachable", scene.unreachable)
    monkeypatch.setattr(lost.shell, "run", scene.run)
    return scene


@pytest.mark.parametrize(("rank", "gone"), [(1, ("n1",)), (2, ("n1", "n2"))])
def test_the_nearest_node_left_has_a_job_requeued_that_slurm_would_keep(
    scene: Scene, rank: int, gone: tuple[str, ...]
) -> None:
    scene.gone = gone
    scene.lose_head(rank)
    assert (scene.asked, scene.said, scene.paths.end.exists()) == ([REQUEUE], [], False)


def test_nobody_requeues_a_run_that_another_one_sees_to(
    monkeypatch: pytest.MonkeyPatch, scene: Scene
) -> None:
    given: dict[str, dict[str, Any]] = {
        "Slurm itself requeues it": {"spares": 0},
        "a nearer node is there": {"rank": 2},
        "it is beside the conductor": {"rank": 0, "gone": ()},
        "its node can be reached": {"gone": ()},
        "the run has continued": {"exists": scene.paths.attempt(2)},
        "a person cancels the run": {"word": "cancel"},
        "a person ends the job": {"word": "end"},
        "too far from it": {"rank": 2, "gone": ("n1", "n2"), "nearest": 1},
    }
    for why, asked in given.items():
        scene.gone = asked.pop("gone", ("n1",))
        monkeypatch.setattr(lost, "NEAREST", asked.pop("nearest", 3))
        scene.paths.request(1).write_text(asked.pop("word", ""))
        if blocks := asked.pop("exists", None):
            blocks.mkdir()
        assert (scene.lose_head(**asked).asked, scene.said) == ([], []), why
        if blocks:
            blocks.rmdir()


def test_a_job_that_may_not_be_requeued_ends_with_a_hint(scene: Scene) -> None:
    scene.refusal = "Requested operation is presently disabled"
    scene.lose_head()
    assert scene.asked == [REQUEUE, ["scancel", "42"]]
    assert scene.refusal in scene.said[0]
    assert "clusterrun resume 42" in scene.said[1]
    assert scene.end == ("NODE_FAIL", NodeExit.NODE_LOST)


def on_hosts(scene: Scene, monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None]) -> bool:
    """Lose the agent of the first host; return whether the run has ended."""
    write_whole(scene.paths.controller, "{}")
    os.utime(scene.paths.controller, (1.0, 1.0))
    monkeypatch.setattr(lost.time, "sleep", sleep)
    monkeypatch.setattr(lost, "SIGN_S", 0.05)
    scene.lose_head(cluster=Cluster.SSH)
    return scene.paths.end.exists()


def test_a_lost_first_host_ends_the_run(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_hosts(scene, monkeypatch, lambda _: None)
    assert "n1, which conducts the run, is lost: the run has ended" in scene.said[-1]
    assert scene.end == ("NODE_FAIL", NodeExit.NODE_LOST)


def test_a_conductor_that_is_alive_decides_itself(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not on_hosts(scene, monkeypatch, lambda _: os.utime(scene.paths.controller))
    assert (scene.said, scene.asked) == ([], [])


@pytest.fixture(name="scontrol")
def _scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for scontrol; it prints what a test writes into the file, whatever it is asked."""
    program, says = tmp_path / "bin" / "scontrol", tmp_path / "says"
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\ncat {says}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setattr(lost, "CONNECT_S", 0.5)
    return says


@pytest.mark.parametrize(
    "words",
    [
        "SlurmdPort  = PORT\nNodeName=n1 NodeAddr=127.0.0.1\nNodeName=n2 NodeAddr=127.0.0.2",
        "SlurmdPort = 1\nNodeName=n1 NodeAddr=127.0.0.1 Port=PORT\nNodeName=n2 NodeAddr=127.0.0.2",
    ],
)
def test_a_node_without_a_daemon_is_named(scontrol: Path, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        scontrol.write_text(words.replace("PORT", str(server.getsockname()[1])) + "\n")
        assert unreachable(["n1", "n2"]) == ("n2",)


def test_nothing_is_known_where_slurm_is_silent(scontrol: Path) -> None:
    scontrol.with_name("bin").joinpath("scontrol").write_text("#!/bin/bash\nexit 1\n")
    assert unreachable(["no-such-host.invalid"]) == ()


def test_a_node_whose_name_is_unknown_is_at_its_address_in_slurm(scontrol: Path) -> None:
    scontrol.write_text("NodeName=cloud-1 Arch=x86_64 NodeAddr=192.0.2.1 NodeHostName=ip-1\n")
    assert known_address("cloud-1.invalid") == "192.0.2.1"
    assert known_address("localhost") == "localhost"  # Slurm is not asked
    scontrol.write_text("")
    assert known_address("cloud-1.invalid") == "cloud-1.invalid"
