"""The test cluster is a real Slurm: names, GPUs, accounting, faults and a clean end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import namespaces
from tests.cluster.cluster import Cluster
from tests.cluster.shape import Shape, default_state_dir, own_slot
from tests.namespaces import ClusterError, run
from tests.patience import wait_for

pytestmark = pytest.mark.slurm

SPARE = 2


@pytest.fixture(scope="module")
def small() -> Iterator[Cluster]:
    """Take down at the end what the tests brought up."""
    state_dir = default_state_dir(own_slot(SPARE))
    lent = Cluster(
        shape=Shape(state_dir=state_dir, slot=own_slot(SPARE), nodes=2, accounting=False)
    )
    yield lent
    lent.down()


@pytest.fixture
def spare(cluster: Cluster, small: Cluster) -> Cluster:
    """Have a small cluster up beside the shared one, to hurt."""
    small.up()
    return small


def _traces(shape: Shape) -> dict[str, object]:
    """Return everything that a cluster of this shape would leave on the machine."""
    links = run(["ip", "-o", "link"]).stdout.split()
    return {
        "processes": namespaces.marked(shape.bridge),
        "namespaces": sorted(Path("/run/netns").glob(f"{shape.bridge}-*")),
        "links": [
            word
            for word in links
            if word == f"{shape.bridge}:" or word.startswith(f"cr{shape.slot}n")
        ],
        "mounts": f"{shape.state_dir}/" in Path("/proc/self/mounts").read_text(),
        "names": f" {shape.bridge}-head\n" in Path("/etc/hosts").read_text(),
        "devices": shape.device_dir.exists(),
        "files": shape.state_dir.exists(),
    }


def _eventually(fact: Callable[[], bool], timeout_s: float = 20) -> None:
    wait_for(fact, timeout_s=timeout_s)


@pytest.mark.long
def test_a_powered_off_node_comes_back_and_works(spare: Cluster) -> None:
    node = spare.nodes[1]
    job_id = spare.sbatch("-N2", "-o", "/dev/null", "--wrap=srun sleep 299")
    spare.wait_job(job_id, "RUNNING")
    spare.power_off(node)
    assert spare.problems() == [f"slurmd-{node} does not run"]
    assert spare.processes(infrastructure=True)[node] == []
    spare.run(["scancel", job_id])
    time.sleep(12)  # MessageTimeout is 10 s: from here on Slurm has failed to end the lost job
    spare.heal()
    assert spare.run(["srun", "-w", node, "hostname"], timeout_s=15).stdout == f"{node}\n"


def test_a_cluster_whose_processes_were_all_killed_is_made_anew(spare: Cluster) -> None:
    assert Cluster.running(spare.shape.state_dir) == spare
    namespaces.kill(namespaces.marked(spare.shape.bridge))
    assert Cluster.existing(spare.shape.state_dir) == spare
    assert Cluster.running(spare.shape.state_dir) is None
    assert spare.up()
    assert spare.run(["srun", "-w", spare.nodes[1], "hostname"]).stdout == f"{spare.nodes[1]}\n"


def test_down_leaves_nothing(spare: Cluster) -> None:
    job_id = spare.sbatch("-N2", "-o", "/dev/null", "--wrap=srun setsid sleep 299")
    spare.wait_job(job_id, "RUNNING")
    assert all(_traces(spare.shape).values())
    spare.down()
    assert not any(_traces(spare.shape).values()), _traces(spare.shape)


def test_down_never_deletes_a_directory_that_is_not_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    stranger = Cluster(shape=Shape(state_dir=tmp_path, slot=own_slot(SPARE)))
    with pytest.raises(ClusterError, match="holds other files"):
        stranger.up()
    stranger.down()
    assert (tmp_path / "thesis.tex").exists()
