"""Give the tests of the test cluster their cluster."""

from tests.cluster.fixtures import cluster, newer_cluster, newer_slurm_cluster  # noqa: F401
