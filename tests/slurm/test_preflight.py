"""A node without room for temporary files, on a real Slurm: it is left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.namespaces import small_disk
from tests.road import LIGHT, Project

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.long,
    pytest.mark.timeout(400),
]

HELLO = "import os; print('rank', os.environ['RANK'])"


@pytest.fixture(name="here")
def _here(here: Project) -> Project:
    (here.path / "hello.py").write_text(HELLO)
    return here


@pytest.fixture(name="broken")
def _broken(tmp_path: Path, cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """Have the second node write its temporary files to a disk of 8 MiB; return the options."""
    node = cluster.shape.node_names[1]
    with small_disk(tmp_path / "small", 8) as disk:
        yield ("--setup", f"[[ $SLURMD_NODENAME != {node} ]] || export TMPDIR={disk.root}")


@pytest.mark.parametrize(
    ("option", "next_step"),
    [
        (("--set", "slurm.spare_nodes=1"), "relaunch"),
        (("--on-interrupt", "successor"), "successor"),
    ],
)
def test_a_broken_node_is_left_out_if_preflight_is_enforced(
    cluster: Cluster,
    here: Project,
    broken: tuple[str, ...],
    option: tuple[str, ...],
    next_step: str,
) -> None:
    node = cluster.shape.node_names[1]
    options = (*option, "--set", "launch.preflight=enforce", *broken)
    job_id = here.submit("-N2", "--gpus-per-node", "1", *options, *LIGHT, "hello.py")
    here.ok("status", job_id, "--wait", "--exit-status")
    first, second = here.json("status", job_id)["attempts"]
    assert (first["cause"], first["next"], first["exclude"]) == ("preflight", next_step, [node])
    assert first["why"] == f"{node} is left out: failed in preflight"
    assert second["cause"] == "completed"
    assert node not in second["nodes"]
    assert {event["attempt"] for event in here.events_of(job_id, "rank_start")} == {2}
