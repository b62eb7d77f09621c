"""Several machines as the conductor's host: which ones an attempt gets, what each is given."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clusterrun.backends.hosts import host
from clusterrun.backends.hosts.crew import Link
from clusterrun.backends.hosts.host import HostsHost
from clusterrun.backends.local import process
from clusterrun.config.choices import Cluster, Device
from clusterrun.config.hosts import HostList
from clusterrun.config.spec import JobSpec
from clusterrun.errors import ClusterrunError
from clusterrun.launch.make import make_plan
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import checkpoint_files
from clusterrun.shared.checkpoint_files import Checkpoint
from tests.launch.samples import on_slurm, slurm_facts
from tests.patience import wait_for

HOSTS = ("gpu1", "ann@gpu2:2222", "gpu3")


class FakeLink(Link):
    """A link that keeps what is sent."""

    sent: list[dict[str, Any]]

    def send(self, kind: str, /, data: bytes = b"", **fields: Any) -> None:
        self.sent = [fields]


def places(tmp_path: Path, *, unfit: tuple[str, ...]) -> dict[str, str]:
    """Start an attempt on two of three hosts; return where each finds the conductor."""
    hosts = HostList(hosts=HOSTS, slots=(0, 0, 0), source="--hosts")
    facts = slurm_facts(cluster=Cluster.SSH, hosts=hosts, workdir=str(tmp_path))
    plan = make_plan(JobSpec(script="train.py", device=Device.CPU, spare_nodes=1), facts)
    links = [
        FakeLink(name=f"gpu{n}", host=host, first="", argv=(), script=b"", is_lost=False)
        for n, host in enumerate(HOSTS, 1)
    ]
    for link in links:
        link.facts = {"client": "10.0.0.1"}
    paths = RunPaths(root=tmp_path)
    used = HostsHost(paths, plan, "H1", links, values={}, admit=lambda _: None, here="gpu1")
    used.begin(1, 7, unfit)
    words = {link.name: link.sent[0]["words"] for link in links if hasattr(link, "sent")}
    assert all((attempt, port) == ("1", "7") for attempt, _, port in words.values())
    return {name: host for name, (_, host, _) in words.items()}


def test_hosts_find_the_conductor_where_it_reached_them_from(tmp_path: Path) -> None:
    assert places(tmp_path, unfit=()) == {"gpu1": "127.0.0.1", "gpu2": "10.0.0.1"}
    assert places(tmp_path, unfit=("gpu1",)) == {"gpu2": "10.0.0.1", "gpu3": "10.0.0.1"}


def test_a_host_that_has_a_part_of_the_checkpoint_takes_part_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostsHost, "_savers", lambda _: ["gpu3"])
    assert places(tmp_path, unfit=()) == {"gpu1": "127.0.0.1", "gpu3": "10.0.0.1"}


def test_a_run_ends_with_the_shell_of_its_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = HostList(hosts=HOSTS, slots=(0, 0, 0), source="$PBS_NODEFILE")
    facts = slurm_facts(cluster=Cluster.ALLOCATION, hosts=hosts, workdir=str(tmp_path))
    plan = make_plan(JobSpec(script="train.py", device=Device.CPU), facts)
    sent: list[int] = []
    monkeypatch.setattr("os.kill", lambda _, number: sent.append(number))
    monkeypatch.setattr(host, "LAST_S", 0.05)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as shell:
        known = process.identity(shell.pid)
        assert known
        used = HostsHost(
            *(RunPaths(root=tmp_path), plan, "H1", []),
            **{"values": {}, "admit": lambda _: None, "shell": (shell.pid, known)},
        )
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
    host = HostsHost(RunPaths(root=root), plan, "H1", links, values={}, admit=lambda _: None)
    return [link.name for link in host._choose(unfit)]


def save(root: Path, nodes: dict[str, list[str]], *here: str) -> None:
    """Save a checkpoint of which the first host has some files."""
    path = RunPaths(root=root).checkpoints_dir / "step-00000008"
    path.mkdir(parents=True)
    for name in here:
        (path / name).write_text("weights")
    files = checkpoint_files.settled(path, here)
    found = Checkpoint(path=path, step=8, world_size=2, settings={}, nodes=nodes)
    checkpoint_files.mark(found, files)


def test_the_first_fit_hosts_are_used(tmp_path: Path) -> None:
    assert chosen(tmp_path) == ["h1", "h2"]
    assert chosen(tmp_path, lost="h2") == ["h1", "h3"]
    with pytest.raises(ClusterrunError, match="only 1 host of 2 can be used: h2 does not answer"):
        chosen(tmp_path, lost="h2", unfit=("h3",))


def test_a_host_that_alone_has_a_part_of_the_checkpoint_is_needed(tmp_path: Path) -> None:
    save(tmp_path, {"h1": ["a"], "h3": ["b"]}, "a")
    assert chosen(tmp_path) == ["h1", "h3"]
    with pytest.raises(ClusterrunError, match="h3 has a part of the newest checkpoint"):
        chosen(tmp_path, lost="h3")


def test_a_resume_without_a_host_that_has_a_part_of_the_checkpoint_does_not_start(
    tmp_path: Path,
) -> None:
    save(tmp_path, {"h1": ["a"], "h9": ["b"]}, "a")
    with pytest.raises(ClusterrunError, match="h9 has a part of the newest checkpoint"):
        chosen(tmp_path)


def test_a_part_that_the_first_host_has_needs_nobody(tmp_path: Path) -> None:
    save(tmp_path, {"h1": ["a"], "h2": ["b"]}, "a", "b")
    assert chosen(tmp_path, lost="h2") == ["h1", "h3"]
