"""The test cluster is a real Slurm: names, GPUs, accounting, faults and a clean end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import namespaces
from tests.cluster import __main__ as program
from tests.cluster.cluster import Cluster
from tests.cluster.newer import VERSION
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


# A newer Slurm


@pytest.mark.slurm
def test_commands_and_jobs_of_the_newer_cluster_use_the_newer_slurm(newer_cluster: Cluster) -> None:
    assert f" {VERSION}." in run(["scontrol", "--version"]).stdout
    asked = ["srun", "-N2", "--gpus-per-node=4", "sh", "-c", "scontrol --version; hostname"]
    lines = newer_cluster.run(asked).stdout.splitlines()
    assert set(newer_cluster.nodes[:2]) < set(lines)
    assert len([line for line in lines if f" {VERSION}." in line]) == 2
    controller = newer_cluster.run(["scontrol", "show", "config"]).stdout
    assert f"SLURM_VERSION           = {VERSION}." in controller


def test_what_up_prints_can_be_evaluated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Cluster, "up", lambda _: False)
    monkeypatch.setattr(program, "_need_root", lambda: None)
    monkeypatch.setattr("sys.argv", ["tests.cluster", "up", "--slot", "99"])
    assert program.main() == 0
    told = capsys.readouterr().out
    assert told.splitlines()[-1] == program.NEXT
    for line in ('eval "$1"', "eval $1"):
        done = run(["bash", "-c", f'{line}; echo "$SLURM_CONF"', "bash", told])
        assert done.stderr == ""
        assert done.stdout.endswith("-99/slurm.conf\n")
