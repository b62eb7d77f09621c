"""Simulated nodes for tests: real agents, launchers and ranks on this machine, no scheduler."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from clusterrun.config.choices import Cluster, Device
from clusterrun.config.spec import JobSpec
from clusterrun.launch.facts import Facts, Interpreter
from clusterrun.launch.make import make_plan
from clusterrun.launch.plan import Plan
from clusterrun.node.base.identity import Identity
from clusterrun.node.conductor.agents import Agents, AgentsState
from clusterrun.rendering.bundle import render_bundle
from clusterrun.rundir.attempt import take_attempt
from clusterrun.rundir.paths import RunPaths
from tests.patience import patience, wait_for
from tests.road import ROOT, STUB, processes_of

VERSIONS = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8"}


def who(rank: int, *nodes: str, **changes: Any) -> Identity:
    """Return the identity of one of these nodes; the conductor is on the first."""
    about = {"job_id": "42", "node": nodes[rank], "node_rank": rank, "nodes": nodes}
    return Identity(**{"conductor": nodes[0], **about, **changes})


@dataclass
class AgentJob:
    """One attempt of a run on simulated nodes."""

    paths: RunPaths
    plan: Plan
    job_id: str
    is_stub: bool = False
    is_led: bool = False
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_node(self, rank: int, **env: str) -> subprocess.Popen[bytes]:
        """Start one node's script, as the local controller does."""
        environ = {
            **os.environ,
            "CLUSTERRUN_LOCAL_NODE_RANK": str(rank),
            "CLUSTERRUN_LOCAL_JOB_ID": self.job_id,
            "TMPDIR": str(self.tmp),
            **(
                {"PYTHONPATH": f"{STUB}:{ROOT}", "STUB_STORE": str(self.tmp)}
                if self.is_stub
                else {}
            ),
            **env,
        }
        if not self.is_led:
            self.is_led = True
            self.paths.attempts_dir.mkdir(exist_ok=True)
            take_attempt(self.paths, 1, "test")
            self.link.begin(1)
            self.link.serve()
        output = (self.paths.slurm_dir / f"node{rank}.out").open("ab")
        node = subprocess.Popen(
            [
                *("bash", str(self.paths.node_script), str(self.paths.root), "1"),
                *("127.0.0.1", str(self.link.port)),
            ],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        self.agents.append(node)
        return node

    @cached_property
    def link(self) -> Agents:
        """What the conductor does for the job, in a thread of the test."""
        link = Agents(self.paths, self.plan, self.job_id, self._woken)
        link.tell = self._told
        return link

    def _woken(self) -> None:
        """Decide that no attempt follows."""
        if self.link.state is AgentsState.REST:
            self.link.dismiss()

    def _told(self, text: str) -> None:
        with (self.paths.slurm_dir / "conductor.out").open("a") as output:
            output.write(f"clusterrun: {text}\n")

    @property
    def tmp(self) -> Path:
        """Where the agents make their spools."""
        return self.paths.root.parents[2] / "tmp"

    def spools(self) -> list[Path]:
        return list(self.tmp.glob("clusterrun-*"))

    def start(self, **env: str) -> AgentJob:
        for rank in range(self.plan.nodes):
            self.start_node(rank, **env)
        return self

    def wait(self, timeout_s: float = 240) -> list[int]:
        """Wait for all agents and return their exit statuses."""
        deadline = time.monotonic() + timeout_s * patience()
        codes = [agent.wait(max(0.1, deadline - time.monotonic())) for agent in self.agents]
        self.link.finish()
        return codes

    def log(self, node: str = "local0") -> list[tuple[int, str, str, str]]:
        """Read a node's log as (µs, rank, stream, text)."""
        lines = self.paths.log(1, node).read_text().split("\n")[:-1]
        rows = [line.split(" ", 3) for line in lines]
        return [(int(stamp), rank, stream, text) for stamp, rank, stream, text in rows]

    def text(self) -> str:
        """Read all that the nodes logged."""
        files = sorted(self.paths.logs_dir.glob("a1/*.log"))
        return "".join(path.read_text() for path in files)

    def errors(self) -> str:
        """Read what the agents said to the batch script."""
        return "".join(path.read_text() for path in sorted(self.paths.slurm_dir.glob("*.out")))

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        files = sorted(self.paths.events_dir.glob("*.jsonl"))
        events = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        wanted = [event for event in events if kind in ("", event["type"])]
        return sorted(wanted, key=lambda event: event["ts"])

    def wait_for(self, text: str, count: int = 1, timeout_s: float = 60) -> None:
        """Wait until the nodes have logged a text so many times."""

        def has_come() -> bool:
            if self.text().count(text) >= count:
                return True
            assert any(agent.poll() is None for agent in self.agents), self.text() + self.errors()
            return False

        wait_for(has_come, repr(text), timeout_s)

    def processes(self) -> list[psutil.Process]:
        return processes_of(self.paths.root)

    def rank_pid(self, rank: int) -> int:
        def started() -> list[int]:
            return [e["pid"] for e in self.events("rank_start") if e["rank"] == rank]

        return wait_for(started, f"the start of rank {rank}", 10)[0]

    def agent_pid(self, node: str) -> int:
        return int(next(e["pid"] for e in self.events("started") if e["node"] == node))

    def assert_clean(self) -> None:
        """No process of the job is left."""
        wait_for(lambda: not self.processes(), "the end of all processes", 5)

    def kill(self) -> None:
        """End what is left of the job, for the sake of the next test."""
        self.link.close()
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue
        for agent in self.agents:
            agent.wait(10 * patience())


def make_job(
    path: Path,
    script: str | Path,
    *args: str,
    job_id: str = "",
    is_stub: bool = False,
    as_module: bool = False,
    gpus: tuple[str, ...] = (),
    **asked: Any,
) -> AgentJob:
    """Lay out a run directory for simulated nodes; `script` is a file or Python source."""
    run = path / "runs" / "job" / "run1"
    run.mkdir(parents=True, mode=0o700)
    (path / "tmp").mkdir()
    if isinstance(script, str) and not as_module:
        (path / "script.py").write_text(script)
        script = path / "script.py"
    spec = JobSpec(
        **{
            "module" if as_module else "script": str(script),
            "args": args,
            "nodes": 2,
            "nproc_per_node": 2,
            "device": Device.CPU,
            "cluster": Cluster.LOCAL,
            "rendezvous_timeout_s": int(30 * patience()),
            **asked,
        }
    )
    facts = Facts(
        cluster=Cluster.LOCAL,
        python=sys.executable,
        workdir=str(path),
        runs_dir=str(path / "runs"),
        interpreter=Interpreter(packages=VERSIONS),
        local_cpus=2,
        local_gpus=gpus,
    )
    plan = make_plan(spec, facts)
    bundle = render_bundle(plan, resolved_yaml="")
    for name, text in bundle.files.items():
        (run / name).write_text(text)
    paths = RunPaths(root=run)
    for directory in (paths.slurm_dir, paths.attempts_dir, paths.attempt(1)):
        directory.mkdir(mode=0o700)
    return AgentJob(paths=paths, plan=plan, job_id=job_id or f"L{os.getpid()}", is_stub=is_stub)
