"""The hosts of tests/hosts are what the tests of `--cluster ssh` take them for."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.hosts import HOSTS, LAPTOP, MACHINES, Hosts, machine
from tests.namespaces import ClusterError
from tests.patience import patience, wait_for

pytestmark = pytest.mark.ssh

BATCH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")


def over_ssh(
    hosts: Hosts, host: str, command: str, *, client: str = LAPTOP, user: str = "ann"
) -> subprocess.CompletedProcess[str]:
    return hosts[client].run([*BATCH, host, command], user=user)


def test_everybody_reaches_every_host(hosts: Hosts) -> None:
    for client in MACHINES:
        each = "for host; do ssh -o BatchMode=yes $host hostname & done; wait"
        done = hosts[client].run(["sh", "-c", each, "sh", *HOSTS])
        assert (sorted(done.stdout.split()), done.stderr) == (list(HOSTS), "")
    for client in (LAPTOP, "h1", "h2"):
        assert over_ssh(hosts, "h2", "id -un", client=client, user="bob").stdout == "bob\n"
    assert over_ssh(hosts, "h3", "id -un", user="bob").returncode == 255


def test_a_host_sees_its_own_processes_and_memory_files(hosts: Hosts) -> None:
    waiting = hosts["h1"].start(["sleep", "1234"])
    wait_for(lambda: hosts["h1"].processes(), "sleep to run")
    for path in ("/tmp/x", "/dev/shm/x", "/var/tmp/x"):
        hosts["h1"].run(["touch", path], check=True)
        assert hosts["h2"].run(["test", "-e", path]).returncode == 1
        assert not Path(path).exists()
    assert "sleep 1234" in hosts["h1"].run(["ps", "-eo", "args"]).stdout
    assert "sleep 1234" not in hosts["h2"].run(["ps", "-eo", "args"]).stdout
    assert hosts.leftovers() == [
        "h1: runs sleep 1234",
        *(f"h1: file {d}/x" for d in ("/tmp", "/var/tmp", "/dev/shm")),
    ]
    hosts.reset()
    assert hosts.leftovers() == []
    assert waiting.wait(10 * patience()) == -9


def test_a_cut_is_silent_and_heals(hosts: Hosts) -> None:
    talk = hosts.laptop.start([*BATCH, "h1", "cat"])
    assert talk.stdin
    assert talk.stdout
    assert echo(talk, "before") == "before\n"
    hosts.cut("h1")
    talk.stdin.write("during\n")
    talk.stdin.flush()
    begin = time.monotonic()
    assert "timed out" in hosts.laptop.run([*BATCH[:-1], "ConnectTimeout=1", "h1", "true"]).stderr
    assert time.monotonic() - begin >= 1
    assert talk.poll() is None
    hosts.heal("h1")
    assert talk.stdout.readline() == "during\n"
    assert echo(talk, "after") == "after\n"


@pytest.mark.long
def test_command_lines_are_seen_and_environments_are_not(hosts: Hosts) -> None:
    with hosts.all_command_lines() as seen:
        hosts["h4"].run(["sleep", "0.5"], env={"TOKEN": "secret-1"}, check=True)
        over_ssh(hosts, "h1", "sleep 0.25 secret-2 2>/dev/null; sleep 0.5")
    assert "sleep 0.5" in seen
    assert not any("secret-1" in line for line in seen)
    assert any("secret-2" in line for line in seen)


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


def echo(talk: subprocess.Popen[str], text: str) -> str:
    assert talk.stdin
    assert talk.stdout
    talk.stdin.write(f"{text}\n")
    talk.stdin.flush()
    return talk.stdout.readline()


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
