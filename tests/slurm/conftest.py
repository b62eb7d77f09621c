"""Give these tests a real Slurm: 4 nodes × 4 GPUs, and a small one without accounting."""

from tests.cluster.fixtures import (
    cluster,
    cluster_no_accounting,
    cluster_slurmdbd_stopped,
    newer_cluster,
    newer_slurm_cluster,
    no_accounting_cluster,
)
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
