"""Give these tests a real Slurm: 4 nodes × 4 GPUs, and a small one without accounting."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.fixtures import (
    cluster,
    cluster_no_accounting,
    newer_cluster,
    newer_slurm_cluster,
)
from tests.road import Project, project
from tests.slurm.jobs import submit

__all__ = ["cluster", "cluster_no_accounting", "newer_cluster", "newer_slurm_cluster", "submit"]


@pytest.fixture
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is remembered between commands out of the user's home."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))


@pytest.fixture
def nothing_left(cluster: Cluster) -> Iterator[None]:
    """Let no test pay for what an earlier one left running."""
    yield
    cluster.run(["scancel", "--me"])
    cluster.wait_no_processes(60)


@pytest.fixture(name="here")
def _here(tmp_path: Path, cluster: Cluster) -> Project:
    return project(tmp_path / "project", tmp_path / "state")  # it copies the cluster's variables
