"""The machines, their addresses, and the people who have an account there.

A person has the same uid on all machines, under different names: that is how NFS lets them use
their files in /shared from each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

LAPTOP = "laptop"
HOSTS = ("h1", "h2", "h3", "h4")
MACHINES = (LAPTOP, *HOSTS)


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
