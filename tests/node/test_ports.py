"""Ports: differing between jobs, below the ephemeral range, and proven free."""

from __future__ import annotations

import pytest

from clusterrun.node.base.ports import candidate_ports, free_port, listening_socket

WITHIN = (20000, 29999)


def test_ports_differ_between_jobs_attempts_and_purposes() -> None:
    firsts = {
        ports[0]
        for job in ("4711", "4712", "L1")
        for attempt in (1, 2)
        for ports in candidate_ports(job, attempt, WITHIN)
    }
    assert len(firsts) == 12
    assert candidate_ports("4711", 1, WITHIN) == candidate_ports("4711", 1, WITHIN)


@pytest.mark.parametrize("within", [WITHIN, (40000, 40001), (1024, 1040), (3000, 3796)])
def test_ports_stay_in_their_range_and_no_two_purposes_want_the_same(
    within: tuple[int, int],
) -> None:
    for job in range(100):
        link, rendezvous = candidate_ports(str(job), 1, within)
        size = min(32, within[1] - within[0] + 1)
        assert link
        assert rendezvous
        assert len({*link, *rendezvous}) == size
        assert within[0] <= min(*link, *rendezvous) < max(*link, *rendezvous) <= within[1]


def test_a_port_in_use_is_passed_over() -> None:
    ports = candidate_ports("test of ports", 1, WITHIN).link
    first = free_port(ports)
    with listening_socket(first):
        assert free_port(ports) != first
    assert free_port(ports) == first


def test_all_interfaces_are_listened_on() -> None:
    port = free_port(candidate_ports("test of interfaces", 1, WITHIN).link)
    with listening_socket(port) as taken:
        assert taken.getsockname()[0] in ("::", "0.0.0.0")
    with listening_socket(port, "127.0.0.1") as taken:
        assert taken.getsockname()[0] == "127.0.0.1"
