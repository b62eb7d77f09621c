"""Several machines as the conductor's host: what each node of an attempt is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusterrun.backends.hosts.crew import Link
from clusterrun.backends.hosts.host import HostsHost
from clusterrun.config.hosts import HostList
from clusterrun.config.spec import Cluster, Device, JobSpec
from clusterrun.launch.make import make_plan
from clusterrun.rundir.paths import RunPaths
from tests.launch.samples import slurm_facts

HOSTS = ("gpu1", "ann@gpu2:2222", "gpu3")


class FakeLink(Link):
    """A link that keeps what is sent."""

    sent: list[dict[str, Any]]

    def send(self, kind: str, /, data: bytes = b"", **fields: Any) -> None:
        self.sent = [fields]


def heads(tmp_path: Path, *, unfit: tuple[str, ...]) -> dict[str, str]:
    """Start an attempt on two of three hosts; return the head's address that each is given."""
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
    host = HostsHost(paths, plan, "H1", links, values={}, admit=lambda _: None, here="gpu1")
    host.begin(1, unfit)
    return {
        link.name: link.sent[0]["environ"]["CLUSTERRUN_HOSTS_HEAD"]
        for link in links
        if hasattr(link, "sent")
    }


def test_the_first_host_has_the_address_by_which_it_reached_the_others(tmp_path: Path) -> None:
    assert heads(tmp_path, unfit=()) == {"gpu1": "10.0.0.1", "gpu2": "10.0.0.1"}


def test_another_head_has_its_own_name(tmp_path: Path) -> None:
    assert heads(tmp_path, unfit=("gpu1",)) == {"gpu2": "gpu2", "gpu3": "gpu2"}
