"""Ports between hosts: reached, closed, and what users read of it."""

from __future__ import annotations

from clusterrun.backends.hosts.reach import can_connect, closed, listen
from tests.ports import free_port


def test_a_port_is_reached_while_somebody_listens() -> None:
    with listen((free_port(), 0)) as first, listen((first.getsockname()[1], free_port())) as second:
        ports = [each.getsockname()[1] for each in (first, second)]
        assert ports[0] != ports[1]
        assert [can_connect("127.0.0.1", port) for port in ports] == ["", ""]
    assert can_connect("127.0.0.1", ports[0]) == "Connection refused"


def test_closed_ports_are_named() -> None:
    problem = closed(["gpu2", "gpu3"], "gpu1", 20001, "timed out")
    assert str(problem) == "gpu[2-3]: port 20001 of gpu1 cannot be reached (timed out)"
    assert "--port-range" in problem.hint
