"""The hosts of tests/hosts are what the tests of `--cluster ssh` take them for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.hosts import LAPTOP, Hosts, machine
from tests.namespaces import ClusterError

pytestmark = pytest.mark.ssh

BATCH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")


def over_ssh(
    hosts: Hosts, host: str, command: str, *, client: str = LAPTOP, user: str = "ann"
) -> subprocess.CompletedProcess[str]:
    return hosts[client].run([*BATCH, host, command], user=user)


def test_down_leaves_no_trace(hosts: Hosts, tmp_path: Path) -> None:
    """Also where a process of a run still holds a directory; the other slot is not touched."""
    before = traces()
    second = Hosts(tmp_path / "second")
    second.up()
    second["h1"].start(["sleep", "1234"])
    assert over_ssh(second, "h1", "hostname").stdout == "h1\n"
    assert over_ssh(hosts, "h1", "hostname").stdout == "h1\n"
    Hosts(tmp_path / "second").down()
    assert not (tmp_path / "second").exists()
    assert traces() == before
    assert over_ssh(hosts, "h1", "hostname").stdout == "h1\n"


def traces() -> list[str]:
    """Return what a machine could leave: devices, mounts and directories."""
    devices = [path.name for path in Path("/sys/class/net").iterdir()]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return sorted([*devices, *mounts, *map(str, Path("/").iterdir())])


def test_a_checkout_in_a_directory_of_the_hosts_is_never_emptied(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in /tmp, which each host has for itself, and which is emptied after each test."""
    tmp_path.chmod(0o755)
    kept = tmp_path / "checkout" / "kept"
    kept.parent.mkdir()
    kept.touch()
    needed = [*machine.needed_directories(), str(kept.parent)]
    monkeypatch.setattr(machine, "needed_directories", lambda: needed)
    hosts.crash("h4")
    hosts.boot("h4")
    assert hosts["h4"].path(kept).exists()
    with pytest.raises(ClusterError, match="Read-only file system"):
        hosts["h4"].as_root(["rm", str(kept)])
    hosts.reset()
    assert kept.exists()
    assert hosts["h4"].path(kept).exists()
