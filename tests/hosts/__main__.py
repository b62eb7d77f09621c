"""The command line of the hosts; runs as root."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from tests.cluster.shape import own_slot
from tests.hosts.access import LAPTOP, MACHINES
from tests.hosts.hosts import Hosts, default_state_dir
from tests.hosts.machine import CD, environment
from tests.namespaces import ClusterError


def _up(hosts: Hosts, asked: argparse.Namespace) -> int:
    begin = time.monotonic()
    hosts.up(tuple(name for name in MACHINES if name not in asked.no_shared.split(",")))
    print(f"up in {time.monotonic() - begin:.1f} s; next: python -m tests.hosts shell {LAPTOP}")
    return 0


def _down(hosts: Hosts, asked: argparse.Namespace) -> int:
    hosts.down()
    return 0


def _shell(hosts: Hosts, asked: argparse.Namespace) -> int:
    machine = hosts[asked.machine]
    account = machine.accounts[asked.user]
    who = [f"--setgid={account.uid}", f"--setuid={account.uid}", "--"]
    argv = asked.command or ["bash", "-i"]
    env = {**environment(account), "TERM": os.environ.get("TERM", "dumb")}
    whole = machine.enter([*who, "sh", "-c", CD, account.home, *argv])
    return subprocess.run(whole, env=env, check=False).returncode


def main() -> int:
    """Run one verb; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument("--slot", type=int, default=own_slot())
    verbs = parser.add_subparsers(required=True)
    up = verbs.add_parser("up", help="bring all machines up")
    up.add_argument("--no-shared", default="", metavar="NAMES", help="machines without /shared")
    up.set_defaults(verb=_up)
    down = verbs.add_parser("down", help="end everything")
    down.set_defaults(verb=_down)
    shell = verbs.add_parser("shell", help="a shell, or a command, on a machine")
    shell.add_argument("--user", default="ann", choices=["ann", "bob"])
    shell.add_argument("machine", choices=MACHINES)
    shell.add_argument("command", nargs=argparse.REMAINDER)
    shell.set_defaults(verb=_shell)
    for each in (up, down, shell):
        each.add_argument("--slot", type=int, default=argparse.SUPPRESS)
    asked = parser.parse_args()
    try:
        if os.geteuid() != 0:
            raise ClusterError("the hosts need root")
        return int(asked.verb(Hosts(default_state_dir(asked.slot)), asked))
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
