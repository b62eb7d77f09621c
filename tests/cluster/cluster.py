"""A running test cluster: bring it up, hurt it, heal it, use it, take it down."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from tests import namespaces
from tests.cluster import daemons, network
from tests.cluster.shape import Shape
from tests.namespaces import ClusterError, Process, run
from tests.patience import patience

INFRASTRUCTURE = frozenset({"slurmd", "slurmstepd"})  # of Slurm itself
USABLE = frozenset({"IDLE", "MIXED", "ALLOCATED", "COMPLETING"})
OVER = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE"),
        *("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One cluster, known by its shape; everything else is asked of Slurm or of the kernel."""

    shape: Shape

    @classmethod
    def existing(cls, state_dir: Path) -> Cluster | None:
        """Return the cluster that `up` left in `state_dir`, or None."""
        try:
            text = (state_dir / "cluster.json").read_text()
        except FileNotFoundError:
            return None
        return cls(shape=Shape.from_json(text))

    @classmethod
    def running(cls, state_dir: Path) -> Cluster | None:
        """Return the cluster in `state_dir` that `heal` can make healthy, or None.

        None, too, where all that is left of it are files: a reboot, or whoever killed the program
        that had brought it up, took munged and the database as well, which no fault here does.
        """
        found = cls.existing(state_dir)
        if found is None or {"mariadbd", "munged"} & set(daemons.missing(found.shape)):
            return None
        return found

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes."""
        return self.shape.node_names

    @property
    def env(self) -> dict[str, str]:
        """Return the variables by which Slurm's commands find this cluster."""
        return daemons.client_environment(self.shape)

    # Life

    def up(self) -> bool:
        """Bring the cluster up; return False where a healthy one of this shape was up already."""
        with _one_at_a_time():
            before = Cluster.existing(self.shape.state_dir)
            if before == self and not self.problems():
                return False
            for old in (before, self):
                if old is not None:
                    old._remove()
            try:
                self._start()
            except (ClusterError, OSError, subprocess.SubprocessError) as error:
                self._keep_logs()
                self._remove()
                raise ClusterError(f"{error} (logs: {self._kept_logs})") from error
            return True

    def down(self) -> None:
        """Take everything away: processes, namespaces, bridge, names, devices and files."""
        with _one_at_a_time():
            self._remove()
            shutil.rmtree(self._kept_logs, ignore_errors=True)

    def problems(self) -> list[str]:
        """Return what is wrong with the cluster, in words; empty for a healthy one."""
        if not (self.shape.state_dir / "cluster.json").exists():
            return ["it is not up"]
        gone = [f"{name} does not run" for name in daemons.missing(self.shape)]
        if gone:
            return gone
        if not daemons.controller_answers(self.shape):
            return ["slurmctld does not answer"]
        states = self.node_states()
        return [f"{node} is {state}" for node, state in states.items() if state not in USABLE]

    def wait_healthy(self, timeout_s: float = 60) -> None:
        """Wait until nothing is wrong; raise ClusterError with what still is."""
        deadline = time.monotonic() + timeout_s * patience()
        while problems := self.problems():
            if time.monotonic() > deadline:
                raise ClusterError("; ".join(problems[:5]))
            time.sleep(0.2)

    # Use

    def run(
        self, argv: Sequence[str], *, check: bool = True, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login side, with SLURM_CONF set."""
        return run(argv, env=self.env, check=check, timeout_s=timeout_s)

    def run_on(
        self, node: str, argv: Sequence[str], *, check: bool = True, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, beside Slurm."""
        whole = [*network.enter(self.shape, node), *argv]
        return run(whole, env=self.env, check=check, timeout_s=timeout_s)

    def sbatch(self, *argv: str) -> str:
        """Submit with plain sbatch and return the job id."""
        return self.run(["sbatch", "--parsable", *argv]).stdout.strip().split(";")[0]

    def job_state(self, job_id: str) -> str:
        """Return a job's state, UNKNOWN where neither slurmctld nor accounting knows the job.

        slurmctld forgets a job MinJobAge (300 s) after its end.
        """
        shown = self.run(["scontrol", "-o", "show", "job", job_id], check=False).stdout
        for word in shown.split():
            if word.startswith("JobState="):
                return word.removeprefix("JobState=")
        argv = ["sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State"]
        lines = self.run(argv, check=False).stdout.split()
        return lines[0] if lines else "UNKNOWN"

    def start_requeued(self, job_id: str) -> None:
        """Have a requeued job, which Slurm holds back for two minutes, start in two seconds.

        A job that starts in the second in which its last run was killed fails: "Job credential
        revoked".
        """
        shown = self.run(["scontrol", "-o", "show", "job", job_id], check=False).stdout
        words = dict(word.partition("=")[::2] for word in shown.split())
        if words.get("JobState") != "PENDING" or words["StartTime"] == "Unknown":
            return
        if datetime.fromisoformat(words["StartTime"]) - datetime.now() > timedelta(seconds=5):
            self.run(["scontrol", "update", f"JobId={job_id}", "StartTime=now+2"], check=False)

    def wait_job(
        self, job_id: str, states: Collection[str] | str = OVER, timeout_s: float = 200
    ) -> str:
        """Wait until a job is in one of `states` and return it; raise ClusterError when late."""
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + timeout_s * patience()
        while (state := self.job_state(job_id)) not in wanted:
            if time.monotonic() > deadline:
                raise ClusterError(f"job {job_id} is {state} after {timeout_s} s, not {wanted}")
            time.sleep(0.1)
        return state

    def node_states(self) -> dict[str, str]:
        """Return the state of each node; a mark that Slurm adds (`*`: no answer) is kept."""
        lines = self.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N %T"]).stdout.split("\n")
        return {node: state.upper() for node, state in (line.split() for line in lines if line)}

    def processes_on(self, node: str) -> list[Process]:
        """Return what runs on a node, Slurm's own daemons left out."""
        return self.processes()[node]

    def processes(self, *, infrastructure: bool = False) -> dict[str, list[Process]]:
        """Return what runs on every node (in its network namespace)."""
        found = namespaces.in_namespaces({node: self.shape.netns(node) for node in self.nodes})
        return {
            node: [p for p in found.get(node, []) if infrastructure or p.name not in INFRASTRUCTURE]
            for node in self.nodes
        }

    def wait_no_processes(self, timeout_s: float = 10) -> None:
        """Wait until no node runs anything but Slurm; raise ClusterError naming what is left."""
        deadline = time.monotonic() + timeout_s * patience()
        while left := {node: found for node, found in self.processes().items() if found}:
            if time.monotonic() > deadline:
                raise ClusterError(f"left on the nodes: {left}")
            time.sleep(0.1)

    # Faults and their repair

    def cut(self, node: str) -> None:
        """Pull the node's network cable; its processes go on."""
        network.set_cable(self.shape, node, plugged=False)

    def restore(self, node: str) -> None:
        """Plug the node's network cable in again."""
        network.set_cable(self.shape, node, plugged=True)

    def kill_node(self, node: str) -> None:
        """Kill slurmd and everything else on a node; the kernel still closes its connections.

        All are stopped first, or one might start another when it sees the first of them die.
        """
        stopped: set[int] = set()
        while new := {p.pid for p in self.processes(infrastructure=True)[node]} - stopped:
            for pid in new:
                namespaces.send(pid, signal.SIGSTOP)
            stopped |= new
        namespaces.kill(stopped)

    def power_off(self, node: str) -> None:
        """Lose a node as a power cut does: nobody is told that a connection is closed."""
        self.cut(node)
        self.kill_node(node)
        network.remove_node(self.shape, node)

    def start_node(self, node: str) -> None:
        """Bring back a node that was cut, killed or powered off."""
        if network.has_node(self.shape, node):
            self.restore(node)
        else:
            network.make_node(self.shape, node)
        if f"slurmd-{node}" in daemons.missing(self.shape):
            daemons.start_slurmd(self.shape, node)

    @contextmanager
    def slurmd_suspended(self, node: str) -> Iterator[None]:
        """Suspend a node's slurmd for a while: it accepts connections and never answers."""
        pids = [p.pid for p in self.processes(infrastructure=True)[node]]
        for pid in pids:
            namespaces.send(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                namespaces.send(pid, signal.SIGCONT)

    def restart_slurmctld(self) -> None:
        """Stop slurmctld, and start it from its saved state."""
        daemons.stop(self.shape, "slurmctld")
        daemons.start_slurmctld(self.shape)

    @contextmanager
    def slurmdbd_stopped(self) -> Iterator[None]:
        """Make sacct fail for a while; jobs and slurmctld continue."""
        daemons.stop(self.shape, "slurmdbd")
        try:
            yield
        finally:
            daemons.start_slurmdbd(self.shape)

    def heal(self, timeout_s: float = 60) -> None:
        """Undo every fault above and wait until the cluster is healthy.

        A node without slurmd is set down first: else Slurm may go on for two minutes to wait for
        the end of a job that was lost with it.
        """
        gone = daemons.missing(self.shape)
        if "slurmdbd" in gone:
            daemons.start_slurmdbd(self.shape)
        if "slurmctld" in gone:
            daemons.start_slurmctld(self.shape)
        for node in self.nodes:
            if f"slurmd-{node}" in gone:
                self._set_node(node, "DOWN")
            self.start_node(node)
        for node, state in self.node_states().items():
            if state.startswith(("DRAIN", "DOWN")):
                self._set_node(node, "RESUME")
        self.wait_healthy(timeout_s)

    def _set_node(self, node: str, state: str) -> None:
        update = [f"NodeName={node}", f"State={state}", "Reason=healed by the test cluster"]
        # Not checked: a node may have come back by itself, and then there is nothing to resume.
        self.run(["scontrol", "update", *update], check=False)

    def _start(self) -> None:
        shape = self.shape
        namespaces.check_empty(shape.state_dir)
        daemons.write_files(shape)
        network.make(shape)
        daemons.start_munged(shape)
        if shape.accounting:
            daemons.start_database(shape)
            daemons.start_slurmdbd(shape)
            daemons.register_accounts(shape)
        daemons.start_slurmctld(shape)
        for node in self.nodes:
            daemons.start_slurmd(shape, node)
        self.wait_healthy()

    def _remove(self) -> None:
        shape = self.shape
        names = {name: name for name in network.existing_namespaces(shape)}
        on_nodes = namespaces.in_namespaces(names)
        namespaces.kill(p.pid for found in on_nodes.values() for p in found)
        namespaces.kill(namespaces.marked(shape.bridge))
        network.remove(shape)
        network.remove_cgroups(shape)
        shutil.rmtree(shape.device_dir, ignore_errors=True)
        if (shape.state_dir / "cluster.json").exists():
            shutil.rmtree(shape.state_dir, ignore_errors=True)

    @property
    def _kept_logs(self) -> Path:
        return Path(f"{self.shape.state_dir}-failed")

    def _keep_logs(self) -> None:
        """Keep the logs of a cluster that did not come up, for a person to read."""
        shutil.rmtree(self._kept_logs, ignore_errors=True)
        if (self.shape.state_dir / "log").exists():
            shutil.copytree(self.shape.state_dir / "log", self._kept_logs)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let one process at a time change clusters; they share /etc/hosts, so that is the lock."""
    descriptor = os.open(network.HOSTS, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
