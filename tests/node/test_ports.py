"""Ports: differing between jobs, below the ephemeral range, and proven free."""

from __future__ import annotations

from clusterrun.node.ports import candidate_ports, free_port, listening_socket


def test_p2_ports_differ_between_jobs_attempts_and_purposes() -> None:
    firsts = {
        candidate_ports(job, attempt, purpose)[0]
        for job in ("4711", "4712", "L1")
        for attempt in (1, 2)
        for purpose in ("link", "rendezvous")
    }
    assert len(firsts) == 12
    assert candidate_ports("4711", 1, "link") == candidate_ports("4711", 1, "link")


def test_p2_ports_stay_below_the_range_that_linux_hands_out() -> None:
    ports = {port for job in range(500) for port in candidate_ports(str(job), 1, "link")}
    assert min(ports) >= 20000
    assert max(ports) < 32768
    assert len(ports) > 5000


def test_p2_a_port_in_use_is_passed_over() -> None:
    ports = candidate_ports("test of ports", 1, "link")
    first = free_port(ports)
    with listening_socket(first):
        assert free_port(ports) != first
    assert free_port(ports) == first


def test_all_interfaces_are_listened_on() -> None:
    port = free_port(candidate_ports("test of interfaces", 1, "link"))
    with listening_socket(port) as taken:
        assert taken.getsockname()[0] in ("::", "0.0.0.0")
    with listening_socket(port, "127.0.0.1") as taken:
        assert taken.getsockname()[0] == "127.0.0.1"
