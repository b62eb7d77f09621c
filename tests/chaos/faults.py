"""The faults that a training must survive, each a function that brings it about."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from clusterrun.node.base.ports import candidate_ports
from tests.chaos.training import (
    SAVE_EVERY,
    SCRIPT,
    STEPS,
    Training,
    submit,
    submit_and_die,
    submit_beside_another,
)
from tests.cluster import network
from tests.cluster.cluster import Cluster
from tests.namespaces import SmallDisk
from tests.patience import wait_for

IN_BETWEEN = SAVE_EVERY * 3 // 2  # a step in the middle between two checkpoints
AFTER_TWO = SAVE_EVERY * 5 // 2
CUT_S, FULL_S, DOWN_S = 20.0, 3.0, 10.0


@dataclass(kw_only=True)
class Scene:
    """A training, and what is needed to hurt it; `undo` makes the cluster whole again."""

    cluster: Cluster
    training: Training
    attempt: int = 1
    undo: ExitStack = field(default_factory=ExitStack)

    @property
    def head(self) -> str:
        return self.training.world(self.attempt)[0]

    @property
    def other(self) -> str:
        return self.training.world(self.attempt)[-1]

    @property
    def job_id(self) -> str:
        return self.training.job_ids[-1]

    def kill_rank(self, rank: int = 1) -> float:
        """Kill a rank and return when."""
        return send(self.training.rank_pid(rank, self.attempt), signal.SIGKILL)

    def kill_agent(self, node: str) -> float:
        return send(self.training.agent_pid(node, self.attempt), signal.SIGKILL)

    def lose(self, node: str, how: Callable[[str], None]) -> float:
        self.undo.callback(self.cluster.heal)
        at = time.time()
        how(node)
        return at

    def newest_checkpoint(self) -> Path:
        """Name the newest directory that a next attempt would resume from. Raises TooLateError."""
        send(self.training.rank_pid(1, self.attempt), 0)  # not if the next attempt is on its way
        return sorted((self.training.root / "checkpoints").glob("step-*/.complete"))[-1].parent


@dataclass(frozen=True)
class Fault:
    """One way to hurt a training at step `at`: `inject` returns the moment when it was hurt.

    `attempts` are how many the run takes in all, None where that depends on the moment.
    `warned` says that there is time to save: no step may be lost. `unusable` is how many of the
    newest checkpoints it spoils. `state` is how the run ends. `trace` is in its logs or events
    where the fault has had an effect, which the end of the run does not show. `same_agents` says
    whether the agents of the first attempt begin the second.
    """

    name: str
    inject: Callable[[Scene], float]
    options: tuple[str, ...] = ()
    _: KW_ONLY
    submit: Callable[..., Training] = submit
    script: str = SCRIPT
    steps: int = STEPS
    at: int = IN_BETWEEN
    attempts: int | None = 2
    state: str = "COMPLETED"
    warned: bool = False
    unusable: int = 0
    trace: str = ""
    same_agents: bool | None = None


class TooLateError(Exception):
    """The process that a fault was meant for had ended before."""


def send(pid: int, number: int) -> float:
    """Send a signal and return when. Raises TooLateError."""
    at = time.time()
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise TooLateError(f"process {pid} had ended before signal {number}") from None
    return at


def timed(deed: Callable[[Scene], object]) -> Callable[[Scene], float]:
    """Make a fault of a deed: it hurts from its beginning."""

    def inject(scene: Scene) -> float:
        at = time.time()
        deed(scene)
        return at

    return inject


def stop_rank(scene: Scene) -> float:
    return send(scene.training.rank_pid(1, scene.attempt), signal.SIGSTOP)


def lose_node(scene: Scene) -> float:
    return scene.lose(scene.other, scene.cluster.kill_node)


def lose_head(scene: Scene) -> float:
    return scene.lose(scene.head, scene.cluster.kill_node)


def cut_for_a_while(scene: Scene) -> None:
    node = scene.other
    scene.undo.callback(scene.cluster.heal)
    scene.cluster.cut(node)
    time.sleep(CUT_S)
    scene.cluster.restore(node)


def preempt(scene: Scene) -> None:
    """Have a job of a higher partition take all CPUs of the training's nodes, for a moment.

    Slurm 22.05 loses count of GPUs when it requeues a job with a spare node.
    """
    nodes = ",".join(scene.training.world(scene.attempt))
    cpus = f"-c{scene.cluster.shape.cpus_per_node}"
    argv = ("-p", "high", "-N2", "-w", nodes, "--ntasks-per-node=1", cpus, "-o", "/dev/null")
    job_id = scene.cluster.sbatch(*argv, "--wrap=sleep 2")
    scene.undo.callback(scene.cluster.run, ["scancel", job_id], check=False)


def restart_slurmctld(scene: Scene) -> None:
    scene.undo.callback(scene.cluster.heal)
    scene.cluster.restart_slurmctld()


def slurm(*argv: str) -> Callable[[Scene], float]:
    """Make a fault of a command of Slurm about the job."""
    return timed(lambda scene: scene.cluster.run([*argv, scene.job_id]))


def kill_rank_without_slurmdbd(scene: Scene) -> float:
    scene.undo.enter_context(scene.cluster.slurmdbd_stopped())
    return scene.kill_rank()


def fill_disk(scene: Scene) -> None:
    """Leave no byte to checkpoints, logs, events and outcomes, for some seconds."""
    disk = SmallDisk(root=scene.training.project.path / "runs")
    scene.undo.callback(disk.free)
    disk.fill()
    time.sleep(FULL_S)
    disk.free()


def corrupt_checkpoint(scene: Scene) -> float:
    """Change one byte of the newest checkpoint's weights, then interrupt the training."""
    path = scene.newest_checkpoint() / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    return scene.kill_rank()


def lose_shard(scene: Scene) -> float:
    """Remove what rank 1 saved in the newest checkpoint, then interrupt the training."""
    (scene.newest_checkpoint() / "random_states_1.pkl").unlink()
    return scene.kill_rank()


LISTEN = """
import signal, socket, sys
held = []
for port in sys.argv[1:]:
    held.append(socket.create_server(("", int(port))))
print("ready", flush=True)
signal.pause()
"""


def take_ports(scene: Scene) -> float:
    """Listen, and say nothing, where the ranks of the next attempt would meet first."""
    root = scene.training.root
    job = f"{scene.job_id}:{root.parent.name}/{root.name}"
    wanted = candidate_ports(job, scene.attempt + 1, (20000, 29999))
    ports = [str(port) for port in wanted[:2]]
    argv = [*network.enter(scene.cluster.shape, scene.head), sys.executable, "-c", LISTEN]
    thief = subprocess.Popen([*argv, *ports], stdout=subprocess.PIPE)
    scene.undo.callback(thief.wait)
    scene.undo.callback(thief.kill)
    assert thief.stdout
    assert thief.stdout.readline() == b"ready\n"
    return scene.kill_rank()


def wait_for_the_bug(scene: Scene) -> float:
    """Let the script run into its own mistake."""
    return float(wait_for(lambda: scene.training.events("failed"), "the user's exception")[0]["ts"])


NOTHING = timed(lambda scene: None)  # what hurts is in how it was submitted
UNDISTURBED = Fault("none", NOTHING, attempts=1)
RESTARTS = ("--max-restarts", "3")
SUCCESSOR = ("--on-interrupt", "successor")
AGAIN = (*RESTARTS, *SUCCESSOR)
SPARE = ("--set", "slurm.spare_nodes=1")
LOW = ("--partition", "low", "--on-interrupt")
LIMIT = ("--time", "2", "--set", "slurm.signal=B:USR2@85", *SUCCESSOR)
SPOILED: dict[str, Any] = {"at": AFTER_TWO, "unusable": 1}
LONG = 360  # steps: several checkpoints while a disk is full, and some after
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("rank killed", Scene.kill_rank, RESTARTS, same_agents=True),
        Fault("rank stopped", stop_rank, (*RESTARTS, "--hang-timeout", "5s"), same_agents=True),
        Fault("agent killed", lambda s: s.kill_agent(s.other), RESTARTS, same_agents=False),
        Fault("head's agent killed", lambda s: s.kill_agent(s.head), RESTARTS),
        Fault("node killed, a spare", lose_node, (*AGAIN, *SPARE)),
        Fault("node killed", lose_node, AGAIN, same_agents=False),
        Fault("first node killed", lose_head, AGAIN),
        Fault(  # Slurm may refuse steps of a requeued job that had lost a node: a successor follows
            "first node killed, a spare", lose_head, (*AGAIN, *SPARE), attempts=None
        ),
        Fault("link cut for good", lambda s: s.lose(s.other, s.cluster.cut), AGAIN),
        Fault("link cut for 20 s", timed(cut_for_a_while), AGAIN, attempts=None),
        Fault("preempted", timed(preempt), (*LOW, "successor"), steps=LONG, warned=True),
        Fault("preempted, requeued", timed(preempt), (*LOW, "requeue"), steps=LONG, warned=True),
        Fault(
            "time limit",
            NOTHING,  # the warning before the limit is what hurts
            LIMIT,
            steps=3000,
            at=1,
            attempts=None,
            warned=True,
            trace='"interrupted"',
        ),
        Fault(
            "time limit's warning",
            slurm("scancel", "--batch", "--signal=USR2"),
            SUCCESSOR,
            warned=True,
        ),
        Fault("scancel", slurm("scancel"), state="CANCELLED", attempts=1),
        Fault(  # on a busy machine, the command may start after the last of fewer steps
            "cancel --checkpoint",
            timed(lambda s: s.training.project.ok("cancel", "--checkpoint", "--yes", s.job_id)),
            steps=LONG,
            state="CANCELLED",
            attempts=1,
            warned=True,
        ),
        Fault("scontrol requeue", slurm("scontrol", "requeue")),
        Fault("slurmctld restarted", timed(restart_slurmctld), attempts=1),
        Fault("slurmdbd down", kill_rank_without_slurmdbd, RESTARTS),
        Fault(
            "run directory full",
            timed(fill_disk),
            RESTARTS,
            steps=LONG,
            attempts=None,
            trace="training continues",
        ),
        Fault("checkpoint corrupted", corrupt_checkpoint, RESTARTS, **SPOILED),
        Fault("shard missing", lose_shard, RESTARTS, **SPOILED),
        Fault("ports taken", take_ports, RESTARTS),
        Fault(
            "two runs on the same nodes", Scene.kill_rank, RESTARTS, submit=submit_beside_another
        ),
        Fault("submitting shell killed", NOTHING, submit=submit_and_die, attempts=1),
        Fault(
            "user's bug", wait_for_the_bug, RESTARTS, script="buggy.py", state="FAILED", attempts=1
        ),
    )
}
