"""Several machines as the conductor's host: each node of a job is a host with a courier."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clusterrun.backends.hosts import crew, mirror
from clusterrun.backends.hosts.crew import ALIVE_S, Link
from clusterrun.backends.local.backend import VISIBLE, identity
from clusterrun.backends.local.controller import LocalStep, amend_controller
from clusterrun.config.hosts import parse_host
from clusterrun.errors import ClusterrunError, NodeExit
from clusterrun.launch.plan import LOOPBACK, Plan
from clusterrun.node.base.ports import own_addresses
from clusterrun.node.base.stderr import say_on_stderr
from clusterrun.node.conductor.host import Host
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import Home, as_text, register_run
from clusterrun.shared import checkpoint_files
from clusterrun.shared.durations import format_seconds
from clusterrun.shared.wording import count

LEAVE_TOGETHER_S = 20.0  # for agents to end each other over their link; then we end them
MORE_S = 5.0  # than the nodes of one machine have to end: couriers end them
RETRY_S = 10.0  # between two tries to reach a lost host
LAST_S = 60.0  # for the ranks to save after the allocation's shell has ended


@dataclass(kw_only=True)
class HostsStep(LocalStep):
    """One attempt's nodes, or those of more; they start once there are enough."""

    host: HostsHost
    attempt: int
    excluded: tuple[str, ...]
    port: int
    links: Sequence[Link] = ()
    leave_s: float = LEAVE_TOGETHER_S

    def _reap(self) -> bool:
        """Collect exit statuses; return whether a node runs, or is to start.

        Raises ClusterrunError if too few hosts can be used.
        """
        if not self.links and self.kill_by == float("inf"):
            self.links = self.host.begin(self.attempt, self.port, self.excluded)
            return True
        self.codes = [link.code for link in self.links if link.code is not None]
        return len(self.codes) < len(self.links)

    def end(self) -> None:
        """End all nodes within the grace time."""
        if self.kill_by < float("inf"):
            return
        super().end()
        if not self.links:
            self.code, self.kill_by = int(NodeExit.CANCELLED), 0.0
        for link in self.links:
            link.send("end")

    def kill(self) -> None:
        """Kill what is left on all hosts that can be reached."""
        for link in self.links:
            if link.code is None:
                link.send("kill")


@dataclass(eq=False)
class HostsHost(Host):
    """The hosts of one job; only end.json records how it ended.

    `links` are those of all hosts, spares last; `values` are the variables passed by name. `admit`
    makes a lost host usable again, or raises ClusterrunError. `here` is the name of the host on
    which this process runs, if it is one of them; the run ends after the process `shell`.
    """

    paths: RunPaths
    plan: Plan
    job_id: str
    links: Sequence[Link]
    values: Mapping[str, str]
    admit: Callable[[Link], None]
    here: str = ""
    shell: tuple[int, str] | None = None
    _next_sign: float = 0.0
    _wait_until: float = 0.0
    _opener: threading.Thread | None = None
    _is_waiting: bool = False
    _were_lost: set[str] = field(default_factory=set)
    _errors: dict[str, ClusterrunError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Tell the conductor what it needs of the job."""
        self.environ = {"CLUSTERRUN_HOSTS_JOB_ID": self.job_id}
        self.time_limit_s = self.plan.time_minutes * 60 or float("inf")

    def start(
        self, attempt: int, *, port: int, is_relaunch: bool, excluded: tuple[str, ...]
    ) -> HostsStep:
        """Start an attempt: its nodes start as soon as there are enough hosts."""
        del is_relaunch
        self._wait_until = time.monotonic() + self.plan.wait_for_hosts_s
        unfit = [name for name in excluded if name not in self._were_lost]
        return HostsStep(
            paths=self.paths,
            running={},
            lead_s=self.plan.warning_s + MORE_S,
            host=self,
            attempt=attempt,
            port=port,
            excluded=tuple(unfit),
        )

    def begin(self, attempt: int, port: int, unfit: Sequence[str]) -> list[Link]:
        """Start every node; return none while lost hosts are awaited. Raises ClusterrunError."""
        chosen = self._choose(unfit)
        if chosen and self._is_waiting:
            self._is_waiting = False
            amend_controller(self.paths, waits="")
        is_apart = any(link.is_apart for link in chosen)
        files = {**mirror.bundle(self.paths), **self._record()} if is_apart else {}
        for rank, link in enumerate(chosen):
            link.attempt, link.code = attempt, None
            link.send(
                "start",
                attempt=attempt,
                words=[str(attempt), self._address_for(link), str(port)],
                lead_s=self.plan.warning_s,
                environ=self._environ_of(link, rank, chosen),
                files=files if link.is_apart else {},
            )
            if link.is_lost:  # since it was chosen
                link.code = int(NodeExit.NODE_LOST)
        return chosen

    def _record(self) -> dict[str, str]:
        """Return job.json for hosts that have only a part of the run: it names the home."""
        host = self.plan.hosts[0]
        host = socket.gethostname() if parse_host(host).host == "localhost" else host
        home = Home(host=host, run_dir=str(self.paths.root), python=sys.executable)
        with contextlib.suppress(OSError, ClusterrunError):  # a training needs no record
            record = dataclasses.replace(register_run(self.paths.root, self.environ), home=home)
            return {self.paths.record.name: as_text(record)}
        return {}

    def unreachable(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return the nodes whose host is lost."""
        asked = [link for link in self.links if link.name in nodes]
        crew.on_all(asked, Link.check)
        lost = tuple(link.name for link in asked if link.is_lost)
        self._were_lost.update(lost)  # they are fit if they come back
        return lost

    def keep_alive(self) -> None:
        """Show readers on other machines that this process lives."""
        if time.monotonic() >= self._next_sign:
            self._next_sign = time.monotonic() + ALIVE_S
            self._watch_shell()
            with contextlib.suppress(OSError):
                os.utime(self.paths.controller)

    def _watch_shell(self) -> None:
        """Save and end the run if the allocation's shell is gone: the allocation has ended."""
        if self.shell is None or identity(self.shell[0]) == self.shell[1]:
            return
        self.shell = None
        say_on_stderr("the shell of the allocation has ended, so the run ends")
        os.kill(os.getpid(), signal.SIGUSR2)
        last = threading.Timer(LAST_S, os.kill, (os.getpid(), signal.SIGTERM))
        last.daemon = True
        last.start()

    def register(self) -> None:
        """Record the job if its submitter was lost before it could."""
        register_run(self.paths.root, self.environ)

    def _choose(self, unfit: Sequence[str]) -> list[Link]:
        """Return the hosts of the next attempt, the first ones that are fit; none to wait.

        Raises ClusterrunError if too few are left.
        """
        usable = [link for link in self.links if not (link.is_lost or link.name in unfit)]
        is_enough = len(usable) >= self.plan.nodes
        savers = self._savers() if is_enough else []  # it reads the disk
        missing = [n for n in savers if n not in [link.name for link in usable]]
        if is_enough and not missing:
            first = sorted(usable, key=lambda link: link.name not in savers)[: self.plan.nodes]
            return sorted(first, key=self.links.index)
        lost = [link.name for link in self.links if link.is_lost]
        if not usable and not self.plan.cluster.scheduler.outlives_shell:
            raise ClusterrunError("the allocation has ended: none of its hosts answers")
        if lost and time.monotonic() < self._wait_until:
            self._await(lost)
            return []
        why = [str(self._errors.get(name, f"{name} does not answer")) for name in lost]
        why += [f"{name} is unfit" for name in unfit]
        few = f"only {count(len(usable), 'host')} of {self.plan.nodes} can be used"
        if missing:
            few = f"{', '.join(missing)} has a part of the newest checkpoint that no other host has"
        raise ClusterrunError(f"{few}: {', '.join(why)}")

    def _savers(self) -> list[str]:
        """Return the hosts that have files of the newest checkpoint which this one lacks."""
        newest, _ = checkpoint_files.newest(self.paths.checkpoints_dir, contents=False)
        if newest is None or not newest.nodes:
            return []
        _, here = checkpoint_files.read_marker(newest.path)
        return [name for name, files in newest.nodes.items() if {*files} - {*here}]

    def _await(self, names: Sequence[str]) -> None:
        """Try now and then to reach lost hosts, in the background."""
        if self._opener is not None and self._opener.is_alive():
            return
        if not self._is_waiting:
            self._is_waiting = True
            patience = format_seconds(self.plan.wait_for_hosts_s)
            waits = f"waiting up to {patience} for {', '.join(names)}"
            say_on_stderr(waits)
            amend_controller(self.paths, waits=waits)
        lost = [link for link in self.links if link.name in names]

        def open_lost() -> None:
            self._errors = crew.on_all(lost, self.admit)
            time.sleep(RETRY_S)

        self._opener = threading.Thread(target=open_lost, daemon=True)
        self._opener.start()

    def _address_for(self, link: Link) -> str:
        """Return where a host reaches this machine: as it was reached over ssh, if it was.

        Of a machine that only starts the run, the name may not be known: then all its addresses.
        """
        if link.name == self.here:
            return LOOPBACK
        if link.facts["client"] or self.here:
            return str(link.facts["client"] or parse_host(self.plan.hosts[0]).host)
        return ",".join((socket.gethostname(), *own_addresses()))

    def _environ_of(self, link: Link, rank: int, chosen: Sequence[Link]) -> dict[str, str]:
        environ: dict[str, Any] = {
            **self.values,
            "CLUSTERRUN_HOSTS_JOB_ID": self.job_id,
            "CLUSTERRUN_HOSTS_NODE_RANK": str(rank),
            "CLUSTERRUN_HOSTS_NODES": ",".join(node.name for node in chosen),
        }
        if any(node.is_apart for node in chosen):
            # Hosts that share the home's directory keep one part of a checkpoint together.
            environ["CLUSTERRUN_HOSTS_APART"] = "1" if link.is_apart else self.links[0].name
        if link.gpus:
            environ[VISIBLE] = ",".join(link.gpus)
        return environ
