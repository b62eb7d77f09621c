"""The hosts of tests/hosts are what the tests of `--cluster ssh` take them for."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.commands import ClusterError
from tests.hosts import HOSTS, LAPTOP, MACHINES, Hosts, machine
from tests.patience import patience, wait_for

pytestmark = pytest.mark.ssh

BATCH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
# What a machine tells of itself, a word each.
FACTS = "hostname; id -un; id -u; pwd; cat /proc/sys/kernel/random/boot_id /etc/machine-id"


def over_ssh(
    hosts: Hosts, host: str, command: str, *, client: str = LAPTOP, user: str = "ann"
) -> subprocess.CompletedProcess[str]:
    return hosts[client].run([*BATCH, host, command], user=user)


@pytest.mark.long
def test_each_host_has_its_own_name_user_home_and_boot_id(hosts: Hosts) -> None:
    told = {host: over_ssh(hosts, host, FACTS).stdout.split() for host in HOSTS}
    for n, host in enumerate(HOSTS, 1):
        assert told[host][:4] == [host, f"ann{n}", "7001", f"/home/ann{n}"]
    for which in (4, 5):
        assert len({facts[which] for facts in told.values()}) == len(HOSTS)


def test_everybody_reaches_every_host(hosts: Hosts) -> None:
    for client in MACHINES:
        each = "for host; do ssh -o BatchMode=yes $host hostname & done; wait"
        done = hosts[client].run(["sh", "-c", each, "sh", *HOSTS])
        assert (sorted(done.stdout.split()), done.stderr) == (list(HOSTS), "")
    for client in (LAPTOP, "h1", "h2"):
        assert over_ssh(hosts, "h2", "id -un", client=client, user="bob").stdout == "bob\n"
    assert over_ssh(hosts, "h3", "id -un", user="bob").returncode == 255


@pytest.mark.long
def test_the_checkout_and_its_python_serve_every_user(hosts: Hosts) -> None:
    argv = ["python", "-c", "import clusterrun, sys; print(sys.executable, clusterrun.__file__)"]
    told = {m: hosts[m].run(argv, check=True).stdout for m in MACHINES}
    assert len(set(told.values())) == 1
    over = over_ssh(hosts, "h3", f"{sys.prefix}/bin/clusterrun --version")
    assert over.stdout.startswith("clusterrun")


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


@pytest.mark.long
def test_the_keys_of_a_host_and_of_a_user_count(hosts: Hosts) -> None:
    hosts.revoke(LAPTOP, "h1")
    assert "Permission denied" in over_ssh(hosts, "h1", "true").stderr
    assert over_ssh(hosts, "h1", "true", client="h2").returncode == 0
    hosts.forget(LAPTOP, "h2")
    assert "Host key verification failed" in over_ssh(hosts, "h2", "true").stderr
    hosts.change_host_key("h3")
    wait_for(lambda: "HAS CHANGED" in over_ssh(hosts, "h3", "true").stderr, "another key")
    hosts.add_name("gpu4", "h4")
    hosts.add_name("new4", "h4", known=False)
    assert over_ssh(hosts, "gpu4", "hostname").stdout == "h4\n"
    assert "verification failed" in over_ssh(hosts, "new4", "true").stderr
    assert "Could not resolve hostname" in over_ssh(hosts, "h9", "true").stderr
    hosts.reset()
    for host in HOSTS:
        assert over_ssh(hosts, host, "hostname").stdout == f"{host}\n"
    assert over_ssh(hosts, "gpu4", "true").returncode == 255


@pytest.mark.long
def test_shared_is_one_directory_where_it_is_seen(hosts: Hosts) -> None:
    hosts.laptop.run(["sh", "-c", "umask 77; echo hello > /shared/x"], check=True)
    for name in MACHINES:
        assert hosts[name].run(["cat", "/shared/x"]).stdout == "hello\n"
    assert hosts["h1"].run(["cat", "/shared/x"], user="bob").returncode == 1
    hosts.share("h1", "h2")
    assert [m for m in MACHINES if hosts[m].run(["test", "-e", "/shared"]).returncode == 0] == [
        "h1",
        "h2",
    ]
    assert hosts["h2"].run(["cat", "/shared/x"]).stdout == "hello\n"


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
def test_two_hosts_can_lose_each_other_alone(hosts: Hosts) -> None:
    hosts.cut_between("h1", "h2")
    short = [*BATCH[:-1], "ConnectTimeout=1", "h2", "true"]
    assert "timed out" in hosts["h1"].run(short).stderr
    assert hosts["h3"].run(short).returncode == 0
    hosts.heal_between("h1", "h2")
    assert hosts["h1"].run(short).returncode == 0


@pytest.mark.long
def test_a_crash_is_silent_and_a_boot_brings_back_the_home(hosts: Hosts) -> None:
    host = hosts["h2"]
    before = over_ssh(hosts, "h2", FACTS).stdout.split()
    host.run(["touch", "/home/ann2/kept", "/tmp/lost"], check=True)
    talk = hosts.laptop.start([*BATCH, "h2", "cat"])
    assert talk.stdin
    assert echo(talk, "before") == "before\n"
    hosts.crash("h2")
    talk.stdin.write("during\n")
    talk.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        talk.wait(1 * patience())
    assert not host.is_up
    hosts.boot("h2")
    after = over_ssh(hosts, "h2", FACTS).stdout.split()
    assert (after[:4], after[5]) == (before[:4], before[5])
    assert after[4] != before[4]
    assert host.run(["ls", "/home/ann2", "/tmp"]).stdout.split() == ["/home/ann2:", "kept", "/tmp:"]


@pytest.mark.long
def test_a_firewall_closes_ports(hosts: Hosts) -> None:
    serve = "import socket; s = socket.create_server(('', 3456)); print(flush=True); input()"
    server = hosts["h1"].start(["python", "-c", serve])
    assert server.stdout
    assert server.stdout.readline() == "\n"
    connect = "import socket; socket.create_connection(('h1', 3456), 1)"
    assert hosts["h2"].run(["python", "-c", connect]).returncode == 0
    for silently, told in ((True, "timed out"), (False, "refused")):
        hosts.close_ports("h1", "1024-65535", silently=silently)
        assert told in hosts["h2"].run(["python", "-c", connect]).stderr
        assert over_ssh(hosts, "h1", "true").returncode == 0
        hosts.open_ports("h1")
    assert hosts["h2"].run(["python", "-c", connect]).returncode == 0


@pytest.mark.long
def test_a_disk_is_full_and_a_name_is_looped(hosts: Hosts) -> None:
    hosts["h1"].small_disk("/home/ann1/clusterrun", 1)
    argv = ["dd", "if=/dev/zero", "of=clusterrun/x", "bs=1M", "count=2"]
    assert "No space left" in hosts["h1"].run(argv).stderr
    hosts.loop_own_name("h1")
    assert hosts["h1"].run(["getent", "hosts", "h1"]).stdout.split()[:2] == ["127.0.1.1", "h1"]
    hosts.reset()
    assert hosts["h1"].run(["getent", "hosts", "h1"]).stdout.split() == ["10.18.0.11", "h1"]
    assert hosts.leftovers() == []


@pytest.mark.long
def test_a_signal_reaches_the_program_and_not_its_starter(hosts: Hosts) -> None:
    code = (
        "import time\ntry: print(flush=True); time.sleep(99)\nexcept KeyboardInterrupt: exit(130)"
    )
    process = hosts.laptop.start(["python", "-c", code])
    assert process.stdout
    assert process.stdout.readline() == "\n"
    hosts.laptop.signal(process, signal.SIGINT)
    assert process.wait(10 * patience()) == 130
    with pytest.raises(subprocess.TimeoutExpired):
        hosts.laptop.run(["sleep", "99"], timeout_s=0.1)
    assert hosts.processes() == {}


@pytest.mark.long
def test_a_frozen_host_accepts_and_never_answers(hosts: Hosts) -> None:
    hosts["h3"].freeze()
    short = [*BATCH[:-1], "ConnectTimeout=1", "h3", "true"]
    assert "banner exchange" in hosts.laptop.run(short).stderr
    hosts["h3"].thaw()
    assert over_ssh(hosts, "h3", "true").returncode == 0


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


@pytest.mark.long
def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ClusterError, match="holds other files"):
        Hosts(tmp_path).up()
    Hosts(tmp_path).down()
    assert (tmp_path / "thesis.tex").exists()


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
