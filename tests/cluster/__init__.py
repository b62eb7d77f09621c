"""A real Slurm on one machine: every node is a network namespace with a slurmd of its own.

python -m tests.cluster install
eval "$(python -m tests.cluster up --nodes 4 --gpus-per-node 4)"
srun -N4 hostname
python -m tests.cluster down

`up --newer-slurm` makes it of Slurm 24.11, whatever version the system has.
"""

from tests.cluster.cluster import Cluster
from tests.cluster.shape import Shape
from tests.namespaces import ClusterError

__all__ = ["Cluster", "ClusterError", "Shape"]
