"""Give these tests a real Slurm: 4 nodes × 4 GPUs, and a small one without accounting."""

from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.fixtures import (
    cluster,
    cluster_no_accounting,
    cluster_slurmdbd_stopped,
    newer_cluster,
    newer_slurm_cluster,
    no_accounting_cluster,
)
from tests.road import Project, project
from tests.slurm.jobs import submit

__all__ = [
    "cluster",
    "cluster_no_accounting",
    "cluster_slurmdbd_stopped",
    "newer_cluster",
    "newer_slurm_cluster",
    "no_accounting_cluster",
    "submit",
]


@pytest.fixture(name="here")
def _here(tmp_path: Path, cluster: Cluster) -> Project:
    return project(tmp_path / "project", tmp_path / "state")  # it copies the cluster's variables
