"""Train the example on the hosts, and read from the real machine what becomes of it.

With /shared, project and run are there. Without it, the project is in a home directory of the
laptop, and the run's home on the first host.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from subprocess import CompletedProcess
from typing import Any

from tests.chaos.training import SCRIPT, STEPS, Training, add_scripts, arguments
from tests.hosts import LAPTOP, Hosts
from tests.namespaces import Process
from tests.patience import wait_for
from tests.road import EXAMPLES, STUB, Project

ONE_EACH = ("--gpus-per-node", "1", "--device", "cpu", "--set", "launch.threads_per_process=1")
TRAIN = (SCRIPT, *arguments())
# Without torch: in its first attempt it waits, in the next it is done.
WAITER = """\
import sys, time
from clusterrun import runtime
print(f"attempt {runtime.info().attempt}", flush=True)
time.sleep(600 if runtime.info().attempt == 1 else 0)
"""
WAIT = ("--set", "launch.world_contract=false", "--env", f"PYTHONPATH={STUB}", "waiter.py")
FILES = ("/shared/", "clusterrun/", "/proj/", "/.local/state/")  # where a run may leave files
OF_KILLED_CLIENT = "laptop: file /tmp/clusterrun-ssh-"


@dataclass
class Job:
    """One run on the hosts, its newest job `id`."""

    hosts: Hosts
    directory: str
    id: str
    training: Training
    is_shared: bool

    def cli(self, *argv: str, machine: str = LAPTOP, **how: Any) -> CompletedProcess[str]:
        return self.hosts[machine].run(["clusterrun", *argv], cwd=self.directory, **how)

    def status(self) -> dict[str, Any]:
        done = self.cli("status", self.id, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    @property
    def root_there(self) -> str:
        """The run's home, as the first host sees it."""
        top = self.hosts.state_dir if self.is_shared else self.hosts["h1"].directory
        return f"/{self.training.root.relative_to(top)}"

    def waits_for(self) -> str:
        return str((self.status()["reason"] or {}).get("text"))

    def end(self, timeout_s: float = 240) -> str:
        """Wait for its end, without looking too often, and return the state."""
        wait_for((self.training.root / "end.json").exists, f"the end of {self.id}", timeout_s)
        self.cli("status", self.id, "--wait", timeout_s=timeout_s)
        return str(self.status()["state"])

    def wait_for_ranks(self, number: int) -> None:
        """Wait until so many ranks of the first attempt run."""
        started = self.training.events
        wait_for(lambda: len(started("rank_start", attempt=1)) >= number, "the ranks to start")

    def batch_output(self) -> str:
        return (self.training.root / "slurm" / "batch.out").read_text()

    def is_said(self, text: str) -> bool:
        return text in self.batch_output()


def kill(hosts: Hosts, host: str, pid: int) -> None:
    hosts[host].as_root(["kill", "-9", str(pid)])


def running(hosts: Hosts, host: str, text: str) -> list[Process]:
    """Return the programs of a host whose command line contains a text."""
    return [found for found in hosts[host].processes() if text in " ".join(found.argv)]


def submit(
    hosts: Hosts, names: Sequence[str], *options: str, command: Sequence[str] = TRAIN
) -> Job:
    """Submit a job from the laptop: the shared directory of the hosts decides how."""
    is_shared = "h1" in hosts.sharing
    here = prepare(hosts, is_shared=is_shared)
    argv = ["submit", "--parsable", "--cluster", "ssh", "--hosts", ",".join(names), *ONE_EACH]
    done = hosts.laptop.run(["clusterrun", *argv, *options, *command], cwd=here)
    assert done.returncode == 0, done.stderr
    return job_of(hosts, done.stdout.strip(), is_shared=is_shared)


def job_of(hosts: Hosts, job_id: str, *, is_shared: bool = True) -> Job:
    """Return a job by its id."""
    directory = "/shared/proj" if is_shared else f"{hosts.laptop.accounts['ann'].home}/proj"
    home = hosts.shared / "proj" if is_shared else hosts["h1"].home() / "clusterrun"
    root = (home / "runs" / "by-job" / job_id).resolve()
    project = Project(path=home, environ={})
    training = Training(project=project, root=root, steps=STEPS)
    return Job(hosts, directory, job_id, training, is_shared)


def prepare(hosts: Hosts, *, is_shared: bool) -> str:
    """Put the example on the laptop; return its directory there."""
    account = hosts.laptop.accounts["ann"]
    path = hosts.shared / "proj" if is_shared else hosts.laptop.home() / "proj"
    if not path.exists():
        hosts.laptop.run(["mkdir", "/shared/proj" if is_shared else "proj"], check=True)
        add_scripts(Project(path=path, environ={}))
        for example in EXAMPLES.glob("*.py"):
            shutil.copy(example, path)
        (path / "waiter.py").write_text(WAITER)
    return "/shared/proj" if is_shared else f"{account.home}/proj"


def nothing_left(hosts: Hosts) -> None:
    """Wait until no process, no lock and no temporary file is left on any host that is up."""
    wait_for(lambda: not hosts.processes(), "all processes to end", 30)
    found = hosts.leftovers(*FILES, OF_KILLED_CLIENT)
    assert not found, found
