"""Four hosts and a laptop on one switch, in one slot of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import namespaces
from tests.hosts.access import HOSTS, LAPTOP, MACHINES, SSHD_CONFIG, Access, accounts, mac
from tests.hosts.machine import Machine, mark
from tests.namespaces import Process, run, whole_path
from tests.patience import patience, wait_for


def default_state_dir(slot: int) -> Path:
    """Return where the hosts in `slot` keep everything."""
    base = os.environ.get("CLUSTERRUN_TEST_HOSTS_DIR", "/tmp/clusterrun-hosts")
    return Path(base if slot == 0 else f"{base}-{slot}")


def refusal() -> str:
    """Return why this machine can't have such hosts; empty if it can."""
    script = "ip link add v0 type veth peer name v1 && mount -t tmpfs none /mnt"
    return namespaces.refusal("net", "uts", "ipc", "mount", "pid", script=script)


# The file by which a directory is known to be one of these.
OURS = "clusterrun-test-hosts"


class Hosts:
    """All machines of one slot. They need no name or file of the real machine but `state_dir`."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.machines = {name: Machine(name, state_dir) for name in MACHINES}
        self.access = Access(state_dir)
        self.sharing: tuple[str, ...] = MACHINES
        self._switch_process: subprocess.Popen[bytes] | None = None

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    @property
    def laptop(self) -> Machine:
        return self.machines[LAPTOP]

    @property
    def shared(self) -> Path:
        """Where the real machine finds /shared."""
        return self.state_dir / "shared"

    # -- up and down

    def up(self, sharing: tuple[str, ...] = MACHINES) -> None:
        """Bring all machines up, in the place of what an earlier session left."""
        self.down()
        namespaces.check_empty(self.state_dir)
        self.sharing = sharing
        self._write_files()
        self.access.make_keys()
        self.access.write()
        self._switch_process = self._start_switch()
        self.boot(*MACHINES)

    def down(self) -> None:
        """End everything; nothing remains, whatever state it was in."""
        namespaces.kill(namespaces.marked(mark(self.state_dir)))
        if self._switch_process is not None:
            self._switch_process.wait()
        if (self.state_dir / OURS).exists():
            shutil.rmtree(self.state_dir)

    @property
    def is_up(self) -> bool:
        return all(machine.is_up for machine in self.machines.values())

    def share(self, *names: str) -> None:
        """Let only these machines see /shared; those for which that is a change are rebooted."""
        changed = [name for name in MACHINES if (name in names) != (name in self.sharing)]
        self.sharing = names
        for name in changed:
            self.crash(name)
        self.boot(*changed)

    def reset(self) -> None:
        """Undo all that a test has done: no program, no file, no fault remains."""
        for name in MACHINES:
            if self[name].is_up:
                self[name].thaw()
                self[name].kill_programs()
                self[name].restore_disks()
                self.open_ports(name)
        self.share(*MACHINES)
        self.boot(*(name for name in MACHINES if not self[name].is_up))
        for name in MACHINES:
            self.heal(name)
            self._empty(name)
        empty(self.shared)
        self.access.reset()

    def _write_files(self) -> None:
        self.state_dir.mkdir(parents=True, exist_ok=True)
        (self.state_dir / OURS).touch()
        self.shared.mkdir()
        self.shared.chmod(0o1777)
        for name in MACHINES:
            etc = self.access.etc(name)
            (etc / "ssh").mkdir(parents=True)
            (self[name].directory / "root").mkdir()
            for file, text in etc_files(name).items():
                (etc / file).write_text(text)
            for account in self[name].accounts.values():
                home = self[name].directory / account.home[1:]
                (home / ".ssh").mkdir(parents=True, mode=0o700)
                home.chmod(0o700)
                for path in (home, home / ".ssh"):
                    os.chown(path, account.uid, account.uid)

    def _start_switch(self) -> subprocess.Popen[bytes]:
        script = "ip link add br0 type bridge && ip link set br0 up && echo up && exec sleep inf"
        switch = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", script],
            env={**os.environ, "PATH": whole_path(), namespaces.MARK: mark(self.state_dir)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert switch.stdout
        switch.stdout.readline()
        switch.stdout.close()
        (self.state_dir / "switch").write_text(str(switch.pid))
        return switch

    @property
    def _switch(self) -> int:
        return int((self.state_dir / "switch").read_text())

    def _at_switch(self, *argv: str, check: bool = True) -> None:
        run(["nsenter", f"--net=/proc/{self._switch}/ns/net", *argv], check=check)

    def boot(self, *names: str) -> None:
        """Start machines, also lost ones: same homes and addresses, other boot ids, empty /tmp."""
        for name in names:
            shared = self.shared if name in self.sharing else None
            self[name].boot(shared=shared, switch=self._switch)
        for name in names:
            self[name].wait()

    def _empty(self, name: str) -> None:
        for account in self[name].accounts.values():
            empty(self[name].home(account.person), besides=".ssh")
        for directory in ("/tmp", "/var/tmp", "/dev/shm"):
            empty(self[name].path(directory))

    # -- faults

    def cut(self, name: str) -> None:
        """Cut a machine off: its peers see silence, and its own cable looks fine."""
        self._at_switch("bridge", "link", "set", "dev", name, "state", "0")

    def heal(self, name: str) -> None:
        """Undo `cut`."""
        self._at_switch("bridge", "link", "set", "dev", name, "state", "3")

    def cut_between(self, one: str, other: str) -> None:
        """Cut the link between two machines only."""
        self._set_neighbour(one, other, "02:18:00:00:00:ff")
        self._set_neighbour(other, one, "02:18:00:00:00:ff")

    def heal_between(self, one: str, other: str) -> None:
        """Undo `cut_between`."""
        self._set_neighbour(one, other, mac(other))
        self._set_neighbour(other, one, mac(one))

    def _set_neighbour(self, name: str, peer: str, lladdr: str) -> None:
        argv = ["ip", "neigh", "replace", self[peer].address, "lladdr", lladdr, "dev", "eth0"]
        self[name].as_root([*argv, "nud", "permanent"])

    def close_ports(self, name: str, ports: str, *, silently: bool = True) -> None:
        """Let a host's firewall drop, or reject, what comes to these ports, as "1024-65535"."""
        verdict = "drop" if silently else "reject with tcp reset"
        hook = "{ type filter hook input priority 0; }"
        self[name].as_root(["nft", f"add table ip walls; add chain ip walls input {hook}"])
        rule = f'iifname "eth0" tcp dport {ports} tcp flags syn / syn,ack {verdict}'
        self[name].as_root(["nft", f"add rule ip walls input {rule}"])

    def open_ports(self, name: str) -> None:
        """Undo `close_ports`."""
        self[name].as_root(["nft", "delete table ip walls"], check=False)

    def crash(self, name: str) -> None:
        """Lose a machine as a power cut does: peers see silence. Its home stays, its memory not."""
        if self._has_port(name):  # else it has crashed
            self.cut(name)
        self[name].kill()
        self._at_switch("ip", "link", "delete", name, check=False)
        wait_for(lambda: not self._has_port(name), f"the cable of {name} to go", every_s=0.01)

    def _has_port(self, name: str) -> bool:
        devices = Path(f"/proc/{self._switch}/net/dev").read_text()
        return re.search(rf"^\s*{name}:", devices, re.MULTILINE) is not None

    # -- who may log in, and which host keys are known

    def revoke(self, client: str, host: str) -> None:
        """Let a host refuse the keys of all users of `client`."""
        self.access.revoked.add((client, host))
        self.access.write()

    def forget(self, client: str, host: str) -> None:
        """Take a host out of the known_hosts of all users of `client`."""
        self.access.forgotten.add((client, host))
        self.access.write()

    def change_host_key(self, host: str) -> None:
        """Give a host another key than the one that everybody knows."""
        self.access.change_host_key(host)
        self[host].reload_sshd()

    def add_name(self, name: str, host: str) -> None:
        """Give a host another name, everywhere, by which its key is known."""
        self.access.aliases[name] = host
        self.access.write()

    # -- what remains

    def processes(self) -> dict[str, list[Process]]:
        """Return what runs on each machine besides the system, where anything does."""
        found = {name: machine.processes() for name, machine in self.machines.items()}
        return {name: programs for name, programs in found.items() if programs}

    def leftovers(self, *besides: str) -> list[str]:
        """Return what remains on all machines after a run, one line each.

        Programs, and every file in /tmp, /var/tmp, /dev/shm, /run/lock, /shared and the homes that
        no pattern in `besides` names.
        """
        found = [
            f"{name}: runs {' '.join(program.argv) or program.name}"
            for name, programs in self.processes().items()
            for program in programs
        ]
        for name, machine in self.machines.items():
            if machine.is_up:
                found += [f"{name}: file {file}" for file in files(machine)]
        return [line for line in found if not any(re.search(b, line) for b in besides)]

    @contextmanager
    def all_command_lines(self) -> Iterator[set[str]]:
        """Collect the command lines of all machines for a while, some ten times a second."""
        found: set[str] = set()
        ended = threading.Event()

        def collect() -> None:
            while not ended.wait(0.02 * patience()):
                for machine in self.machines.values():
                    found.update(" ".join(p.argv) for p in machine.all_processes())

        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            ended.set()
            thread.join()


def etc_files(machine: str) -> dict[str, str]:
    """Return the files that a machine has in the place of the real machine's."""
    people = accounts(machine).values()
    names = re.sub(r"^hosts:.*\n", "", Path("/etc/nsswitch.conf").read_text(), flags=re.MULTILINE)
    return {
        "passwd": Path("/etc/passwd").read_text()
        + "".join(f"{a.name}:*:{a.uid}:{a.uid}:{a.person}:{a.home}:/bin/bash\n" for a in people),
        "group": Path("/etc/group").read_text() + "".join(f"{a.name}:x:{a.uid}:\n" for a in people),
        "nsswitch.conf": f"{names}hosts: files\n",
        "hostname": f"{machine}\n",
        "hosts": "",
        "machine-id": f"{os.urandom(16).hex()}\n",
        "ssh/sshd_config": SSHD_CONFIG if machine in HOSTS else "",
        "ssh/ssh_config": "",
    }


def files(machine: Machine) -> Iterator[str]:
    """Yield the files of a machine in which runs may leave something."""
    places = ["/tmp", "/var/tmp", "/dev/shm", "/run/lock", "/shared"]
    places += [account.home for account in machine.accounts.values()]
    for place in places:
        top = machine.path(place)
        for directory, below, names in os.walk(top):
            own = top.stat().st_dev  # what is mounted there, such as the checkout, is no file of it
            below[:] = [name for name in below if os.lstat(f"{directory}/{name}").st_dev == own]
            for name in names:
                path = Path(place) / (Path(directory) / name).relative_to(top)
                if not (".ssh" in path.parts and name in SSH_FILES):
                    yield str(path)


SSH_FILES = {"authorized_keys", "config", "id_ed25519", "id_ed25519.pub", "known_hosts"}


def empty(directory: Path, besides: str = "") -> None:
    """Remove what is in a directory, and never what is mounted there, such as the checkout."""
    device = directory.stat().st_dev
    for path in directory.iterdir():
        if path.name != besides:
            _remove(path, device)


def _remove(path: Path, device: int) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    elif path.stat().st_dev == device:
        for child in path.iterdir():
            _remove(child, device)
        with contextlib.suppress(OSError):  # it holds a mount
            path.rmdir()
