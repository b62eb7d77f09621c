"""Give the matrix a real Slurm, and hosts with a real sshd."""

from tests.cluster.fixtures import cluster
from tests.hosts.fixtures import hosts, standing_hosts

__all__ = ["cluster", "hosts", "standing_hosts"]
