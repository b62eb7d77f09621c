"""The test cluster is a real Slurm: names, GPUs, accounting, faults and a clean end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import namespaces
from tests.cluster.cluster import Cluster
from tests.cluster.shape import Shape, default_state_dir, own_slot
from tests.namespaces import ClusterError, run

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
