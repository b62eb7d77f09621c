"""Which hosts the next attempt gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from clusterrun.backends.hosts.crew import Link
from clusterrun.backends.hosts.host import HostsHost
from clusterrun.config.spec import Cluster
from clusterrun.errors import ClusterrunError
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import checkpoint_files
from tests.launch.samples import on_slurm

NAMES = ("h1", "h2", "h3")


def chosen(root: Path, lost: str = "", unfit: tuple[str, ...] = ()) -> list[str]:
    """Return the hosts of an attempt on two of three; the lost one is not awaited."""
    plan = on_slurm(nodes=2, gpus_per_node=1)
    plan = dataclasses.replace(plan, cluster=Cluster.SSH, hosts=NAMES, wait_for_hosts_s=0)
    links = [
        Link(name=name, host=name, first="h1", argv=(), script=b"", is_lost=name == lost)
        for name in NAMES
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
    checkpoint_files.mark(path, 8, world_size=2, settings={}, nodes=nodes, files=files)


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


def test_a_part_that_the_first_host_has_needs_nobody(tmp_path: Path) -> None:
    save(tmp_path, {"h1": ["a"], "h2": ["b"]}, "a", "b")
    assert chosen(tmp_path, lost="h2") == ["h1", "h3"]
