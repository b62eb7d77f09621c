"""Give the chaos suite a real Slurm."""

from tests.cluster.fixtures import cluster

__all__ = ["cluster"]
