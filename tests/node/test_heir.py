"""What the node after the head's does once the head's node is lost; the scheduler is recorded.

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

from clusterrun.config.spec import Cluster
from clusterrun.node.base.identity import Attempt
from clusterrun.node.recovery import conclude as conclude_module
from clusterrun.node.recovery import heir, reach
from clusterrun.node.recovery.reach import known_address, unreachable
from clusterrun.rundir.outcome import Cause, Outcome, write_outcome
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import write_whole
from clusterrun.shared.shell import Completed
from tests.launch.samples import on_slurm
from tests.node.jobs import who

NODES = ("n1", "n2", "n3")
LOST_HEAD = Outcome(
    attempt=1,
    job_id="42",
    started_at=1.0,
    ended_at=2.0,
    nodes=NODES,
    code=heir.LOST,
    cause=Cause.NODE_LOST,
    reason="n1: its agent is gone",
    node="n1",
    checkpoint=40,
)


class Heirs:
    """A run whose head's node n1 is gone, and what was asked of Slurm since."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root=root)
        self.paths.attempts_dir.mkdir()
        self.paths.events_dir.mkdir()
        self.gone = ("n1",)
        self.refusal = ""
        self.asked: list[list[str]] = []
        self.said: list[str] = []

    def lose_head(self, rank: int = 1, cluster: Cluster = Cluster.SLURM, **asked: Any) -> Heirs:
        plan = on_slurm(nodes=3, gpus_per_node=1, **asked)
        plan = dataclasses.replace(plan, cluster=cluster)
        self.paths.plan.write_text(plan.to_json())
        self.paths.attempt(1).mkdir(exist_ok=True)
        write_outcome(self.paths, LOST_HEAD)
        given = Attempt(plan=plan, paths=self.paths, number=1, who=who(rank, *NODES))
        heir.inherit(given, self.said.append)
        return self

    def unreachable(self, nodes: Sequence[str]) -> tuple[str, ...]:
        return tuple(node for node in nodes if node in self.gone)

    def run(self, argv: Sequence[str], **_: Any) -> Completed:
        is_successor = "clusterrun.backends.slurm.successor" in argv
        self.asked.append(list(argv[-3:] if is_successor else argv))
        if is_successor and self.refusal:
            return Completed(rc=1, stdout="", stderr=f"clusterrun: {self.refusal}\n")
        return Completed(rc=0, stdout="43\n", stderr="")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Heirs:
    scene = Heirs(tmp_path)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setattr(heir, "unreachable", scene.unreachable)
    monkeypatch.setattr(conclude_module, "unreachable", scene.unreachable)
    monkeypatch.setattr(heir.shell, "run", scene.run)
    return scene


def test_the_next_job_is_submitted_without_the_lost_node_and_this_one_ends(scene: Heirs) -> None:
    scene.lose_head()
    successor = ["clusterrun.backends.slurm.successor", str(scene.paths.root), "n1"]
    assert scene.asked == [successor, ["scancel", "42"]]
    assert scene.said[-1] == "job 43 continues the run"
    outcome = json.loads(scene.paths.outcome(1).read_text())
    assert (outcome["next"], outcome["exclude"]) == ("successor", ["n1"])
    assert scene.paths.followed(1).read_text() == "n2\n"  # the batch script can tell


def test_where_that_node_is_lost_too_the_next_one_sees_to_it(scene: Heirs) -> None:
    scene.gone = ("n1", "n2")
    scene.lose_head(rank=2, spare_nodes=2)
    successor = ["clusterrun.backends.slurm.successor", str(scene.paths.root), "n1,n2"]
    assert scene.asked == [successor, ["scancel", "42"]]


def test_nobody_continues_a_run_that_another_node_or_a_person_sees_to(
    monkeypatch: pytest.MonkeyPatch, scene: Heirs
) -> None:
    given: dict[str, dict[str, Any]] = {
        "a nearer node is there": {"rank": 2},
        "it is the head": {"rank": 0, "gone": ()},
        "the head can be reached": {"gone": ()},
        "the run has continued": {"exists": scene.paths.attempt(2)},
        "a person cancels the run": {"word": "cancel"},
        "a person ends the job": {"word": "end"},
        "the batch script has begun to": {"exists": scene.paths.followed(1)},
        "hosts have no batch script": {"cluster": Cluster.ALLOCATION},
        "too far from the head": {"rank": 2, "gone": ("n1", "n2"), "heirs": 1},
        "the batch script is on a spare node": {"nodelist": "n[0-3]"},
    }
    scene.paths.attempt(1).mkdir()
    for why, asked in given.items():
        scene.gone = asked.pop("gone", ("n1",))
        monkeypatch.setattr(heir, "HEIRS", asked.pop("heirs", 3))
        monkeypatch.setenv("SLURM_JOB_NODELIST", asked.pop("nodelist", "n[1-3]"))
        scene.paths.request(1).write_text(asked.pop("word", ""))
        if blocks := asked.pop("exists", None):
            blocks.mkdir()
        assert scene.lose_head(**asked).asked == [], why
        if blocks:
            blocks.rmdir()
        scene.paths.followed(1).unlink(missing_ok=True)


def test_a_run_that_is_to_stop_ends(scene: Heirs) -> None:
    scene.lose_head(on_interrupt="stop")
    assert scene.asked == [["scancel", "42"]]
    end = json.loads(scene.paths.end.read_text())
    assert (end["state"], end["exit_code"]) == ("FAILED", heir.LOST)


@pytest.mark.parametrize(("spares", "asked"), [(0, []), (1, [["scontrol", "requeue", "42"]])])
def test_where_nothing_may_be_submitted_slurm_requeues(
    scene: Heirs, spares: int, asked: list[list[str]]
) -> None:
    scene.refusal = "no successor: not from here"
    scene.lose_head(spare_nodes=spares)
    assert scene.asked[1:] == asked
    assert "not from here" in scene.said[-1]
    assert not scene.paths.followed(1).exists(), "the batch script, if it lives, may go on"


def on_hosts(scene: Heirs, monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None]) -> bool:
    """Lose the agent of the first host; return whether the run has ended."""
    write_whole(scene.paths.controller, "{}")
    os.utime(scene.paths.controller, (1.0, 1.0))
    monkeypatch.setattr(heir.time, "sleep", sleep)
    monkeypatch.setattr(heir, "SIGN_S", 0.05)
    scene.lose_head(cluster=Cluster.SSH)
    return scene.paths.end.exists()


def test_a_lost_first_host_ends_the_run(scene: Heirs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_hosts(scene, monkeypatch, lambda _: None)
    assert "n1, which conducts the run, is lost: the run has ended" in scene.said[-1]


def test_a_conductor_that_is_alive_decides_itself(
    scene: Heirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not on_hosts(scene, monkeypatch, lambda _: os.utime(scene.paths.controller))
    assert (scene.said, scene.paths.followed(1).exists()) == ([], False)


@pytest.fixture(name="scontrol")
def _scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for scontrol; it prints what a test writes into the file, whatever it is asked."""
    program, says = tmp_path / "bin" / "scontrol", tmp_path / "says"
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\ncat {says}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setattr(reach, "CONNECT_S", 0.5)
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
