"""Nodes give a sign of life where Slurm's daemon takes a connection."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from clusterrun.node.recovery import reach
from clusterrun.node.recovery.reach import known_address, unreachable


@pytest.fixture(name="scontrol")
def _scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for scontrol; it prints what a test writes into the file, whatever it is asked."""
    program, says = tmp_path / "bin" / "scontrol", tmp_path / "says"
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\ncat {says}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setattr(reach, "CONNECT_S", 0.5)
    return says


@pytest.mark.parametrize(
    "words",
    [
        "SlurmdPort  = PORT\nNodeName=n1 NodeAddr=127.0.0.1\nNodeName=n2 NodeAddr=127.0.0.2",
        "SlurmdPort = 1\nNodeName=n1 NodeAddr=127.0.0.1 Port=PORT\nNodeName=n2 NodeAddr=127.0.0.2",
    ],
)
def test_a_node_without_a_daemon_is_named(scontrol: Path, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        scontrol.write_text(words.replace("PORT", str(server.getsockname()[1])) + "\n")
        assert unreachable(["n1", "n2"]) == ("n2",)


def test_nothing_is_known_where_slurm_is_silent(scontrol: Path) -> None:
    scontrol.with_name("bin").joinpath("scontrol").write_text("#!/bin/bash\nexit 1\n")
    assert unreachable(["no-such-host.invalid"]) == ()


def test_nothing_is_known_where_not_even_this_node_answers(scontrol: Path) -> None:
    scontrol.write_text("SlurmdPort = 1\nNodeName=n1 NodeAddr=127.0.0.1\n")
    assert unreachable(["n1"]) == ()


def test_no_node_is_no_question(scontrol: Path) -> None:
    assert unreachable([]) == ()


def test_a_name_that_resolves_is_not_asked_for(scontrol: Path) -> None:
    scontrol.write_text("NodeName=localhost NodeAddr=192.0.2.1\n")
    assert known_address("localhost") == "localhost"


def test_a_node_whose_name_is_unknown_is_at_its_address_in_slurm(scontrol: Path) -> None:
    scontrol.write_text("NodeName=cloud-1 Arch=x86_64 NodeAddr=192.0.2.1 NodeHostName=ip-1\n")
    assert known_address("cloud-1.invalid") == "192.0.2.1"
    scontrol.write_text("")
    assert known_address("cloud-1.invalid") == "cloud-1.invalid"
