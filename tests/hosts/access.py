"""Who has an account where, may log in, and which host keys are known: the files of ssh.

A person has the same uid on all machines, under different names: that is how NFS lets them use
their files in /shared from each of them.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.namespaces import ClusterError

LAPTOP = "laptop"
HOSTS = ("h1", "h2", "h3", "h4")
MACHINES = (LAPTOP, *HOSTS)
SSHD_CONFIG = """\
HostKey /etc/ssh/ssh_host_ed25519_key
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PidFile none
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""


@dataclass(frozen=True)
class Account:
    """A person's account on one machine."""

    person: str
    name: str
    uid: int

    @property
    def home(self) -> str:
        return f"/home/{self.name}"


def accounts(machine: str) -> dict[str, Account]:
    """Return the accounts of a machine by person: ann has one everywhere, bob on three."""
    number = machine.removeprefix("h") if machine in HOSTS else ""
    found = {"ann": Account("ann", f"ann{number}", 7001)}
    if machine in (LAPTOP, "h1", "h2"):
        found["bob"] = Account("bob", "bob", 7002)
    return found


def address(machine: str) -> str:
    return f"10.18.0.{10 + MACHINES.index(machine)}"


def mac(machine: str) -> str:
    return f"02:18:00:00:00:{10 + MACHINES.index(machine):02x}"


@dataclass
class Access:
    """The files follow from the fields; `write` writes them all anew."""

    state_dir: Path
    revoked: set[tuple[str, str]] = field(default_factory=set)  # (client, host)
    forgotten: set[tuple[str, str]] = field(default_factory=set)  # (client, host)
    aliases: dict[str, str] = field(default_factory=dict)  # another name of a host
    known: dict[str, str] = field(default_factory=dict)  # the key that is known of each host

    def make_keys(self) -> None:
        """Make a key of each account and of each host."""
        files = [self._key(machine, a) for machine in MACHINES for a in accounts(machine).values()]
        files += [self._host_key(host) for host in HOSTS]
        make_keys(files)
        for machine in MACHINES:
            for account in accounts(machine).values():
                for name in ("id_ed25519", "id_ed25519.pub"):
                    os.chown(self._key(machine, account).with_name(name), account.uid, account.uid)

    def change_host_key(self, host: str) -> None:
        """Give a host another key, which no machine knows."""
        make_keys([self._host_key(host)])

    def write(self) -> None:
        """Write /etc/hosts and the files in ~/.ssh of each account."""
        for host in HOSTS:  # what is known of a host stays, also when it gets another key
            key = self._host_key(host).with_suffix(".pub").read_text()
            self.known.setdefault(host, " ".join(key.split()[:2]))
        for machine in MACHINES:
            put(self.etc(machine) / "hosts", self._hosts())
            for account in accounts(machine).values():
                self._write_account(machine, account)

    def reset(self) -> None:
        """Let everybody log in everywhere, as at first. Changed host keys stay, known to all."""
        for fields in (self.revoked, self.forgotten, self.aliases):
            fields.clear()
        self.known.clear()
        self.write()

    def _hosts(self) -> str:
        lines = [f"{address(name)} {' '.join(self._names(name))}" for name in MACHINES]
        return "\n".join(["127.0.0.1 localhost", *lines, ""])

    def _write_account(self, machine: str, account: Account) -> None:
        others = [host for host in HOSTS if account.person in accounts(host)]
        known = [
            f"{','.join([*self._names(host), address(host)])} {self.known[host]}\n"
            for host in HOSTS
            if (machine, host) not in self.forgotten
        ]
        config = [
            f"Host {' '.join([*self._names(host), address(host)])}\n"
            f"    User {accounts(host)[account.person].name}\n"
            for host in others
        ]
        texts = {"known_hosts": "".join(known), "config": "".join(config)}
        if machine != LAPTOP:
            allowed = [client for client in MACHINES if (client, machine) not in self.revoked]
            texts["authorized_keys"] = "".join(
                self._key(client, accounts(client)[account.person]).with_suffix(".pub").read_text()
                for client in allowed
                if account.person in accounts(client)
            )
        for name, text in texts.items():
            put(self._key(machine, account).with_name(name), text, account.uid)

    def _names(self, host: str) -> list[str]:
        return [host, *(alias for alias, of in self.aliases.items() if of == host)]

    def etc(self, machine: str) -> Path:
        return self.state_dir / machine / "etc"

    def _host_key(self, host: str) -> Path:
        return self.etc(host) / "ssh" / "ssh_host_ed25519_key"

    def _key(self, machine: str, account: Account) -> Path:
        return self.state_dir / machine / account.home[1:] / ".ssh" / "id_ed25519"


def make_keys(files: list[Path]) -> None:
    """Make key pairs, all at the same time."""
    running = []
    for file in files:
        file.unlink(missing_ok=True)
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(file)]
        running.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL))
    if any(status != 0 for status in [process.wait() for process in running]):
        raise ClusterError("ssh-keygen failed")


def put(path: Path, text: str, uid: int = 0) -> None:
    """Write a file in its place: some are mounts."""
    path.write_text(text)
    path.chmod(0o600 if uid else 0o644)
    os.chown(path, uid, uid)
