"""The fixtures that give tests hosts with a real sshd; a conftest imports them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster import packages
from tests.cluster.shape import own_slot
from tests.hosts.hosts import Hosts, default_state_dir, refusal


@pytest.fixture(scope="session")
def standing_hosts() -> Iterator[Hosts]:
    """Bring up four hosts and a laptop for the session, in the place of what was left."""
    if os.geteuid() != 0:
        pytest.skip("the hosts need root")
    if missing := packages.missing_programs(packages.OF_HOSTS):
        pytest.skip(f"missing {', '.join(missing)}: python -m tests.cluster install")
    if refused := refusal():
        pytest.skip(f"no namespaces here: {refused}")
    hosts = Hosts(default_state_dir(own_slot()))
    hosts.up()
    yield hosts
    hosts.down()


@pytest.fixture
def hosts(standing_hosts: Hosts) -> Iterator[Hosts]:
    """Give a test all machines up and as new: no program, no file, no fault of another test."""
    if not standing_hosts.is_up:
        standing_hosts.up()
    yield standing_hosts
    standing_hosts.reset()
