"""Give these tests four hosts with a real sshd, and a laptop."""

from tests.hosts.fixtures import hosts, standing_hosts  # noqa: F401
