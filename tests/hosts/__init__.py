"""Four hosts with a real sshd, and a laptop, on one machine: each is a set of namespaces.

python -m tests.hosts up
python -m tests.hosts shell laptop
ssh h1 hostname
python -m tests.hosts down
"""

from tests.hosts.access import HOSTS, LAPTOP, MACHINES
from tests.hosts.hosts import Hosts
from tests.hosts.machine import Machine

__all__ = ["HOSTS", "LAPTOP", "MACHINES", "Hosts", "Machine"]
