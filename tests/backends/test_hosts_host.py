"""Several machines as the conductor's host: which ones an attempt gets, how each is reached."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from clusterrun.backends.environment import scrubbed
from clusterrun.backends.hosts import backend, controller, crew
from clusterrun.backends.hosts.backend import OF_STARTERS, HostsBackend
from clusterrun.backends.hosts.controller import HostsHost
from clusterrun.backends.hosts.crew import Link
from clusterrun.backends.local.backend import identity
from clusterrun.backends.select import submit_or_remove
from clusterrun.config.choices import Cluster, Device, Starter
from clusterrun.config.hosts import HostList
from clusterrun.config.spec import JobSpec
from clusterrun.errors import ClusterrunError, NodeExit
from clusterrun.launch.make import make_plan
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.shared import checkpoint_files, shell
from clusterrun.shared.checkpoint_files import Checkpoint
from tests.launch.samples import on_slurm, slurm_facts
from tests.patience import wait_for

HOSTS = ("gpu1", "ann@gpu2:2222", "gpu3")
SENT = {"run_dir": "", "values": {}, "shell": None}  # of what the submitter sends


def planned(*hosts: str, source: str = "--hosts", spare_nodes: int = 0, **facts: Any) -> Plan:
    """Plan a job on CPUs of these hosts."""
    listed = HostList(hosts=hosts, slots=(0,) * len(hosts), source=source)
    spec = JobSpec(script="train.py", device=Device.CPU, spare_nodes=spare_nodes)
    return make_plan(spec, slurm_facts(**{"cluster": Cluster.SSH, "hosts": listed, **facts}))


class FakeLink(Link):
    """A link that keeps what is sent."""

    sent: list[dict[str, Any]]

    def send(self, kind: str, /, data: bytes = b"", **fields: Any) -> None:
        self.sent = [fields]


def places(tmp_path: Path, *, unfit: tuple[str, ...]) -> dict[str, str]:
    """Start an attempt on two of three hosts; return where each finds the conductor."""
    plan = planned(*HOSTS, spare_nodes=1, workdir=str(tmp_path))
    links = [
        FakeLink(name=f"gpu{n}", host=host, first="", argv=(), script=b"", is_lost=False)
        for n, host in enumerate(HOSTS, 1)
    ]
    for link in links:
        link.facts = {"client": "10.0.0.1"}
    used = HostsHost(RunPaths(root=tmp_path), plan, SENT, links, here="gpu1")
    used.begin(1, 7, unfit)
    words = {link.name: link.sent[0]["words"] for link in links if hasattr(link, "sent")}
    assert all((attempt, port) == ("1", "7") for attempt, _, port in words.values())
    return {name: host for name, (_, host, _) in words.items()}


def test_hosts_find_the_conductor_where_it_reached_them_from(tmp_path: Path) -> None:
    assert places(tmp_path, unfit=()) == {"gpu1": "127.0.0.1", "gpu2": "10.0.0.1"}
    assert places(tmp_path, unfit=("gpu1",)) == {"gpu2": "10.0.0.1", "gpu3": "10.0.0.1"}


def test_a_run_ends_with_the_shell_of_its_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = {"cluster": Cluster.ALLOCATION, "workdir": str(tmp_path)}
    plan = planned(*HOSTS, source="$PBS_NODEFILE", **about)
    sent: list[int] = []
    monkeypatch.setattr("os.kill", lambda _, number: sent.append(number))
    monkeypatch.setattr(controller, "LAST_S", 0.05)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as cat:
        known = identity(cat.pid)
        assert known
        used = HostsHost(RunPaths(root=tmp_path), plan, {**SENT, "shell": (cat.pid, known)})
        used.keep_alive()
        assert sent == []
    used._next_sign = 0.0
    used.keep_alive()
    wait_for(lambda: sent == [signal.SIGUSR2, signal.SIGTERM], "both signals")


def chosen(root: Path, lost: str = "", unfit: tuple[str, ...] = ()) -> list[str]:
    """Return the hosts of an attempt on two of three; the lost one is not awaited."""
    plan = on_slurm(nodes=2, gpus_per_node=1)
    plan = dataclasses.replace(
        plan, cluster=Cluster.SSH, hosts=("h1", "h2", "h3"), wait_for_hosts_s=0
    )
    links = [
        Link(name=name, host=name, first="h1", argv=(), script=b"", is_lost=name == lost)
        for name in ("h1", "h2", "h3")
    ]
    host = HostsHost(RunPaths(root=root), plan, SENT, links)
    return [link.name for link in host._choose(unfit)]


def save(root: Path, nodes: dict[str, list[str]], *here: str) -> None:
    """Save a checkpoint of which the first host has some files."""
    path = RunPaths(root=root).checkpoints_dir / "step-00000008"
    path.mkdir(parents=True)
    for name in here:
        (path / name).write_text("weights")
    files = checkpoint_files.sync(path, here)
    found = Checkpoint(path=path, step=8, world_size=2, settings={}, nodes=nodes)
    checkpoint_files.mark(found, files)


def test_the_first_fit_hosts_are_used(tmp_path: Path) -> None:
    assert chosen(tmp_path) == ["h1", "h2"]
    assert chosen(tmp_path, lost="h2") == ["h1", "h3"]
    with pytest.raises(ClusterrunError, match="only 1 host of 2 can be used: h2 does not answer"):
        chosen(tmp_path, lost="h2", unfit=("h3",))


def test_a_host_that_alone_has_a_part_of_the_checkpoint_is_needed(tmp_path: Path) -> None:
    alone, gone, copied = (tmp_path / name for name in ("alone", "gone", "copied"))
    save(alone, {"h1": ["a"], "h3": ["b"]}, "a")
    assert chosen(alone) == ["h1", "h3"]
    save(gone, {"h1": ["a"], "h9": ["b"]}, "a")
    for root, lost, needed in ((alone, "h3", "h3"), (gone, "", "h9")):
        with pytest.raises(ClusterrunError, match=f"newest checkpoint is only on {needed}"):
            chosen(root, lost=lost)
    save(copied, {"h1": ["a"], "h2": ["b"]}, "a", "b")  # the first host has all
    assert chosen(copied, lost="h2") == ["h1", "h3"]


# The connection to a courier; a stand-in answers

COURIER = """\
import json, sys
def send(**fields):
    print(json.dumps({**fields, "size": 0}), flush=True)
print("clusterrun-output", flush=True)
for line in sys.stdin:
    kind = json.loads(line)["kind"]
    if kind == "facts":
        send(kind="answer", facts={"time": 0.0})
    elif kind == "alive":
        send(kind="answer", alive=True)
    elif kind == "wrong":
        send(kind="ended")
"""


@pytest.fixture(name="link")
def _link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr(crew, "ALIVE_S", 0.05)
    link = Link(name="h1", argv=(sys.executable, "-c", COURIER), script=b"")
    link.meet()
    link.is_lost = False
    yield link
    link.close()


def test_a_host_that_sends_nonsense_is_lost(link: Link) -> None:
    link.code = None
    link.send("wrong")
    wait_for(lambda: link.code == NodeExit.NODE_LOST, "the end of the link")
    assert link.is_lost


def test_the_end_of_an_earlier_attempt_does_not_end_this_one(link: Link) -> None:
    link.attempt, link.code = 2, None
    link.handle({"kind": "ended", "code": 137, "attempt": 1})
    assert link.code is None
    link.handle({"kind": "ended", "code": 0, "attempt": 2})
    assert link.code == 0


# A first host, here this machine, that does not start the controller


def refusal(tmp_path: Path, setup: str) -> ClusterrunError:
    """Submit a job with this setup line; return why it is refused."""
    plan = planned("localhost", workdir=str(tmp_path))
    paths = RunPaths(root=tmp_path / "runs" / "train" / "1")
    paths.root.mkdir(parents=True)
    paths.env_script.write_text(f"{setup}\n")
    hosts = HostsBackend(runs_dir=RunsDir(root=tmp_path / "runs"))
    with pytest.raises(ClusterrunError) as refused:
        submit_or_remove(hosts, dataclasses.replace(plan, setup=(setup,)), paths)
    assert not paths.root.exists()
    return refused.value


def test_a_host_whose_setup_lines_do_not_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "MEET_S", 1.0)
    assert str(refusal(tmp_path, "sleep 1018")) == "localhost: it does not answer"
    words = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    assert ["sleep", "1018"] not in words


# What starts a shell on the hosts of an allocation


def command(starter: Starter) -> str:
    about = {"cluster": Cluster.ALLOCATION, "starter": starter}
    plan = planned("n1", "n2", "n3", source="$SLURM_JOB_NODELIST", **about)
    return " ".join(crew.host_command(plan, "n3", is_here=False))


def test_a_starter_gets_the_host_and_srun_all_that_the_allocation_has_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "8(x2),4")
    done = shell.Completed(rc=0, stdout="n9,n[1,3]\n", stderr="")
    monkeypatch.setattr(shell, "run", lambda _: done)
    assert command(Starter.BLAUNCH) == "blaunch n3 bash -s"
    assert command(Starter.FLUX) == "flux exec --rank=2 --dir=/ bash -s"
    assert command(Starter.SRUN) == (
        "srun --overlap --nodes=1 --ntasks=1 --nodelist=n3 --mem=0 --unbuffered --quiet "
        "--cpus-per-task=4 --gres=none bash -s"
    )


def test_srun_sees_its_job_and_not_the_sizes_of_its_steps() -> None:
    given = {"SLURM_JOB_ID": "1", "SLURM_GPUS": "4", "SLURM_NTASKS": "4", "RANK": "0", "HOME": "/"}
    kept = scrubbed(given, keep=OF_STARTERS)
    assert kept == {"SLURM_JOB_ID": "1", "HOME": "/"}
