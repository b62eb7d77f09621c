"""Give the tests of the test cluster their cluster."""

from tests.cluster.fixtures import (
    cluster,
    cluster_no_accounting,
    newer_cluster,
    newer_slurm_cluster,
    no_accounting_cluster,
)

__all__ = [
    "cluster",
    "cluster_no_accounting",
    "newer_cluster",
    "newer_slurm_cluster",
    "no_accounting_cluster",
]
