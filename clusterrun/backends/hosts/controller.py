"""The controller of a job on several machines: the conductor's process, on the first host.

`submit` sends it the job through stdin. It reaches and examines all hosts, answers whether the job
runs, and detaches: from then on it needs the submitting machine no longer. To the conductor, each
node of a job is a host with a courier. The run directory on this machine is the run's home.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from clusterrun.backends.hosts import crew, judge, mirror, project
from clusterrun.backends.hosts.crew import Link, Message, Pipe, is_this_machine
from clusterrun.backends.local.backend import VISIBLE, identity, take_job_id
from clusterrun.backends.local.controller import (
    LocalHost,
    LocalStep,
    amend_controller,
    detach,
    write_controller,
)
from clusterrun.config.choices import Starter
from clusterrun.config.hosts import node_names, parse_host
from clusterrun.errors import ClusterrunError, NodeExit, SubmissionError, UsageError
from clusterrun.launch.plan import LOOPBACK, Plan
from clusterrun.node.base.ports import candidate_ports, own_addresses
from clusterrun.node.base.processes import adopt_orphans
from clusterrun.node.base.stderr import say_on_stderr
from clusterrun.node.conductor.agents import Agents
from clusterrun.node.conductor.conductor import Conductor
from clusterrun.node.conductor.host import Signals
from clusterrun.rendering.bundle import Bundle
from clusterrun.rundir import create, reading, record
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.rundir.record import Home, remember_root
from clusterrun.shared import checkpoint_files, files
from clusterrun.shared.amounts import format_seconds
from clusterrun.shared.finding import Finding
from clusterrun.shared.given import before_setup
from clusterrun.shared.state import JobId
from clusterrun.shared.wording import count

PROJECT_S = 600.0
GO_S = 30.0  # for the submitter to confirm that it knows of the job
LEAVE_TOGETHER_S = 20.0  # for agents to end each other over their link; then we end them
MORE_S = 5.0  # than nodes have to end on one machine: here, couriers end them
RETRY_S = 10.0  # between two tries to reach a lost host
LAST_S = 60.0  # for the ranks to save after the allocation's shell has ended


def receive(pipe: Pipe) -> tuple[RunPaths, Message]:
    """Receive a submission; create its run directory if this host does not see the submitter's.

    Return the directory here and what was sent (docs/contracts.md). Raises ClusterrunError.
    """
    given = _next_message(pipe)
    plan = Plan.from_json(given["files"]["plan.json"])
    paths = RunPaths(root=Path(given["run_dir"]))
    is_here = paths.nonce(given["nonce"]).exists()  # the submitter has just created this file
    if not is_here and given["must_see"]:  # the first host is always one of these
        raise _unseen(plan.hosts[:1], paths)
    try:
        if not is_here:
            runs_dir = RunsDir(root=Path(plan.hosts_dir).expanduser() / "runs")
            bundle = Bundle(files=given["files"])
            paths = create.create_run(runs_dir, plan.name, paths.root.name, bundle)
            plan_here = replace(plan, workdir=str(paths.project))  # it runs in a copy
            record.write(record.new_record(plan_here, paths, argv=given["argv"], now=time.time()))
        pipe.send("answer", is_here=is_here)
        if not is_here:
            with tempfile.TemporaryFile() as packed:
                while data := _next_message(pipe)["data"]:
                    packed.write(data)
                project.unpack(packed, paths.project)
    except (ClusterrunError, OSError) as error:
        if str(paths.root) != given["run_dir"]:  # it was created here
            create.remove_run(paths)
        raise judge.unwritten(plan.hosts[0], error) from error
    return paths, given


def _next_message(pipe: Pipe) -> Message:
    message = pipe.receive()
    if message is None:
        raise SubmissionError("the submission was interrupted")
    return message


@dataclass(kw_only=True)
class HostsStep(LocalStep):
    """One attempt's nodes, or those of more; `begin` starts them once there are enough hosts."""

    begin: Callable[[], Sequence[Link]]
    links: Sequence[Link] = ()
    leave_s: float = LEAVE_TOGETHER_S

    def _reap(self) -> bool:
        """Collect statuses or start nodes; return if one runs or will. Raises ClusterrunError."""
        if not self.links and not self.is_ending:
            self.links = self.begin()  # none while there are too few hosts
            return True
        self.codes = [link.code for link in self.links if link.code is not None]
        return len(self.codes) < len(self.links)

    def end(self) -> None:
        """End all nodes within the grace time."""
        if self.is_ending:
            return
        super().end()
        if not self.links:  # no node has started, so none has an exit status
            self.code = int(NodeExit.CANCELLED)
        for link in self.links:
            link.send("end")

    def kill(self) -> None:
        """Kill what is left on all hosts that can be reached."""
        for link in self.links:
            if link.code is None:
                link.send("kill")


@dataclass(eq=False)
class HostsHost(LocalHost):
    """The hosts of one job, until it has ended on all of them; only end.json records how."""

    paths: RunPaths
    plan: Plan
    sent: Mapping[str, Any]  # what the submitter sent
    links: Sequence[Link] = ()  # those of all hosts, spares last
    here: str = ""  # the name of the host on which this process runs, "" if it is none of them
    job_id: JobId = field(default_factory=JobId)
    environ: dict[str, str] = field(default_factory=dict)
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    may_go: bool = False
    _packed: BinaryIO | None = None
    _packing: threading.Lock = field(default_factory=threading.Lock)
    _next_sign: float = 0.0
    _wait_until: float = 0.0
    _opener: threading.Thread | None = None
    _is_waiting: bool = False
    _were_lost: set[str] = field(default_factory=set)
    _errors: dict[str, ClusterrunError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Set what follows from the plan and from what was sent."""
        self.time_limit_s = self.plan.time_minutes * 60 or float("inf")
        self.is_new = str(self.paths.root) != self.sent["run_dir"]  # created here
        self.shell: tuple[int, str] | None = self.sent["shell"]  # the run ends once this has ended

    def listen(self, pipe: Pipe) -> None:
        """Wait for the submitter's `go`; without it, end all couriers."""
        message = pipe.receive()
        self.may_go = message is not None and message["kind"] == "go"
        if not self.may_go:
            crew.end_all(self.links)

    def assemble(self) -> None:
        """Reach all hosts and make them ready. Raises ClusterrunError, OSError."""
        files.create(self.paths.nonce(self.nonce), "")  # hosts that see it share the home
        _on_all(self.links, self._open)
        needed = [link for link in self.links if link.host in self.sent["must_see"]]
        if blind := [link.host for link in needed if not link.facts["sees_home"]]:
            raise _unseen(blind, self.paths)
        self._judge(self.links)
        above = self.sent["last_id"]  # that of the newest job on the submitting machine
        self.job_id = take_job_id(self.paths.runs_dir, self.paths, prefix="H", above=above)
        self.environ = {"CLUSTERRUN_HOSTS_JOB_ID": self.job_id}
        # In one order for all runs: of two that need the same machines, one gets all its locks.
        for link in sorted(self.links, key=_machine):
            self._lock(link)
        self._try_ports()
        _on_all(self.links, self._place)

    def _judge(self, links: Sequence[Link]) -> None:
        """Raise ClusterrunError if the run can't start on these hosts."""
        if problems := judge.problems(self.plan, {link.name: link.facts for link in links}):
            raise judge.error_of(problems)

    def _try_ports(self) -> None:
        """Have each host connect to the first host and to the next one. Raises ClusterrunError."""
        closed: list[Finding] = []

        def connect(link: Link) -> None:
            after = self.links[(self.links.index(link) + 1) % len(self.links)]
            targets = {each.name: each for each in (self.links[0], after) if each is not link}
            for target in targets.values():
                # ssh shows both ends of a login from the first host, whose own `first` is "": it
                # is the client of `link`'s login, and any other target is the server of its own.
                by_ssh = target.facts["server"] if target.first else link.facts["client"]
                address, port = by_ssh or parse_host(target.host).host, target.facts["port"]
                if reason := link.ask("connect", address=address, port=port)["closed"]:
                    closed.append(judge.closed_port(link.name, target.name, port, reason))

        _on_all(self.links, connect)
        if closed:
            raise judge.error_of(closed)

    def admit(self, link: Link) -> None:
        """Make a lost host usable again. Raises ClusterrunError."""
        self._open(link)
        try:
            self._judge((self.links[0], link))  # it is compared with the first host
            self._lock(link)
            self._place(link)
        except BaseException:
            link.close()
            raise

    def _open(self, link: Link) -> None:
        """Start the courier of a host, and ask for the host's facts. Raises ClusterrunError."""
        link.meet(
            name=link.name,
            home=str(self.paths.root),
            nonce=self.nonce,
            own_dir=self._own_dir,
            # What must exist where the home is seen, unless the home has a copy of the project.
            paths=[] if self.paths.project.is_dir() else [self.plan.workdir],
            device=self.plan.device.value,
            ports=candidate_ports(self.nonce, 0, self.plan.port_range),  # for `_try_ports`
        )

    @property
    def _own_dir(self) -> str:
        """The run directory of a host that does not see the home, as that host expands it."""
        root = self.paths.root
        return f"{self.plan.hosts_dir}/runs/{root.parent.name}/{root.name}"

    def _lock(self, link: Link) -> None:
        """Lock a host for this job, and its GPUs. Raises ClusterrunError."""
        gpus = judge.gpus_to_lock(self.plan, link.facts)
        needed = judge.gpus_needed(self.plan) if gpus else 0
        job = f"{self.job_id}-{self.paths.root.name}"  # another user's job may have this id
        locked = link.ask("lock", job=job, gpus=gpus, count=needed)
        # Without "all", the GPUs are unknown: numbers are locked, but not passed to the ranks.
        link.gpus = tuple(locked["gpus"]) if link.facts["gpus"].get("all") else ()
        if locked["twice"]:  # this job has locked the machine already, under another name
            other = next(each for each in self.links if _machine(each) == _machine(link))
            text = f"{link.name} is the same machine as {other.name}"
            raise UsageError(text, hint="name each machine once in the list of hosts")
        if len(locked["gpus"]) < needed:
            busy = locked["busy"].items()
            raise judge.error_of(judge.busy(link.name, gpu, holder) for gpu, holder in busy)

    def _place(self, link: Link) -> None:
        """Have a host use the home, or bring the run to a directory of its own."""
        is_apart, root = not link.facts["sees_home"], self.paths.root
        link.receiver = mirror.Receiver(root=root, node=link.name) if is_apart else None
        own = self._own_dir if is_apart else str(root)
        # `first` is the host that reaches this one over ssh: "" for the first host itself.
        placed = link.ask("place", root=own, is_apart=is_apart, is_first=not link.first)
        if placed["needs_project"]:
            with self._packing:
                self._packed = self._packed or self._pack()
            # Hosts are placed at the same time, so each reads the file from a position of its own.
            with open(f"/proc/self/fd/{self._packed.fileno()}", "rb") as packed:
                link.send_project(packed)
            link.answered(PROJECT_S)
        link.is_lost = False

    def _pack(self) -> BinaryIO:
        """Return the project of the run, packed."""
        copy, runs = self.paths.project, Path(self.plan.runs_dir)
        source = copy if copy.is_dir() else Path(self.plan.workdir)
        return project.pack(project.find_project(source, leave_out=[runs]))

    def give_up(self) -> None:
        """End all couriers and remove what was written for a job that does not start."""
        self.close()
        if self.job_id:
            self.paths.runs_dir.job_link(self.job_id).unlink(missing_ok=True)
        if self.is_new:
            create.remove_run(self.paths)

    def close(self) -> None:
        """End all couriers."""
        crew.end_all(self.links)
        self.paths.nonce(self.nonce).unlink(missing_ok=True)

    # For the conductor

    def start(
        self, attempt: int, *, port: int, is_relaunch: bool, excluded: tuple[str, ...]
    ) -> HostsStep:
        """Return the step of an attempt, which starts its nodes once there are enough hosts."""
        del is_relaunch
        self._wait_until = time.monotonic() + self.plan.wait_for_hosts_s
        unfit = [name for name in excluded if name not in self._were_lost]  # lost ones may return
        begin = functools.partial(self.begin, attempt, port, unfit)
        lead_s = self.plan.warning_s + MORE_S
        return HostsStep(paths=self.paths, running={}, lead_s=lead_s, begin=begin)

    def begin(self, attempt: int, port: int, unfit: Sequence[str]) -> list[Link]:
        """Start every node; return [] while lost hosts are awaited. Raises ClusterrunError."""
        chosen = self._choose(unfit)
        if chosen and self._is_waiting:
            self._is_waiting = False
            amend_controller(self.paths, waits="")
        is_apart = any(link.is_apart for link in chosen)
        texts = {**mirror.bundle(self.paths), **self._recorded_job()} if is_apart else {}
        for rank, link in enumerate(chosen):
            link.attempt, link.code = attempt, None
            link.send(
                "start",
                attempt=attempt,
                words=[str(attempt), self._address_for(link), str(port)],  # for node.sh
                lead_s=self.plan.warning_s,
                environ=self._environ_of(link, rank, chosen),
                files=texts if link.is_apart else {},
            )
            if link.is_lost:  # since it was chosen
                link.code = int(NodeExit.NODE_LOST)
        return chosen

    def _recorded_job(self) -> dict[str, str]:
        """Record the job; return job.json, which names the home, for hosts that do not share it."""
        host = self.plan.hosts[0]
        host = socket.gethostname() if parse_host(host).host == "localhost" else host
        home = Home(host=host, run_dir=str(self.paths.root), python=sys.executable)
        with contextlib.suppress(OSError, ClusterrunError):  # a training needs no record
            own = replace(record.register_run(self.paths.root, self.environ), home=home)
            return {self.paths.record.name: reading.as_text(own, record.SCHEMA)}
        return {}

    def unreachable(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return the nodes whose host is lost."""
        links = [link for link in self.links if link.name in nodes]
        crew.on_all(links, Link.check)
        lost = tuple(link.name for link in links if link.is_lost)
        self._were_lost.update(lost)  # they are fit if they come back
        return lost

    def keep_alive(self) -> None:
        """Show readers elsewhere that this process lives; end the run if its shell has ended."""
        if time.monotonic() >= self._next_sign:
            self._next_sign = time.monotonic() + crew.ALIVE_S
            self._watch_shell()
            with contextlib.suppress(OSError):
                os.utime(self.paths.controller)

    def _watch_shell(self) -> None:
        """Save and end the run if the allocation's shell is gone: the allocation has ended."""
        if self.shell is None or identity(self.shell[0]) == self.shell[1]:
            return
        self.shell = None  # so that this happens once
        say_on_stderr("the shell of the allocation has ended, so the run ends")
        os.kill(os.getpid(), signal.SIGUSR2)  # the ranks save and exit
        end_later = threading.Timer(LAST_S, os.kill, (os.getpid(), signal.SIGTERM))
        end_later.daemon = True
        end_later.start()

    def _choose(self, unfit: Sequence[str]) -> list[Link]:
        """Return the hosts of the next attempt; [] to wait for more. Raises ClusterrunError."""
        usable = [link for link in self.links if not (link.is_lost or link.name in unfit)]
        is_enough = len(usable) >= self.plan.nodes
        needed = self._checkpoint_hosts() if is_enough else []  # it reads the disk
        missing = [name for name in needed if name not in [link.name for link in usable]]
        if is_enough and not missing:
            # Those without which the run can't resume, then the first ones of the list.
            needed_first = sorted(usable, key=lambda link: link.name not in needed)
            return sorted(needed_first[: self.plan.nodes], key=self.links.index)
        lost = [link for link in self.links if link.is_lost]
        if not usable and not self.plan.cluster.scheduler.outlives_shell:
            raise ClusterrunError("the allocation has ended: none of its hosts answers")
        if lost and time.monotonic() < self._wait_until:
            self._reach_again(lost)
            return []
        why = [str(self._errors.get(link.name, f"{link.name} does not answer")) for link in lost]
        why += [f"{name} is unfit" for name in unfit]
        problem = f"only {count(len(usable), 'host')} of {self.plan.nodes} can be used"
        if missing:
            problem = f"a part of the newest checkpoint is only on {', '.join(missing)}"
        raise ClusterrunError(f"{problem}: {', '.join(why)}")

    def _checkpoint_hosts(self) -> list[str]:
        """Return the hosts that have files of the newest checkpoint that this one lacks."""
        newest, _ = checkpoint_files.newest(self.paths.checkpoints_dir, contents=False)
        if newest is None or not newest.nodes:  # `nodes` is empty if all hosts share the files
            return []
        _, here = checkpoint_files.read_marker(newest.path)  # the files of this host
        return [name for name, parts in newest.nodes.items() if {*parts} - {*here}]

    def _reach_again(self, lost: Sequence[Link]) -> None:
        """Reach lost hosts in the background, one try at a time; say once that the run waits."""
        if self._opener is not None and self._opener.is_alive():
            return
        if not self._is_waiting:
            self._is_waiting = True
            patience = format_seconds(self.plan.wait_for_hosts_s)
            waits = f"waiting up to {patience} for {', '.join(link.name for link in lost)}"
            say_on_stderr(waits)
            amend_controller(self.paths, waits=waits)

        def open_lost() -> None:
            self._errors = crew.on_all(lost, self.admit)
            time.sleep(RETRY_S)

        self._opener = threading.Thread(target=open_lost, daemon=True)
        self._opener.start()

    def _address_for(self, link: Link) -> str:
        """Return the address at which a host reaches this machine: the one seen by ssh, if any."""
        if link.name == self.here:
            return LOOPBACK
        if client := link.facts["client"]:
            return str(client)
        if self.here:
            hosts = dict(zip(node_names(self.plan.hosts), self.plan.hosts, strict=True))
            return parse_host(hosts[self.here]).host
        # The others may not know the name of a machine that only starts the run.
        return ",".join((socket.gethostname(), *own_addresses()))

    def _environ_of(self, link: Link, rank: int, chosen: Sequence[Link]) -> dict[str, str]:
        """Return the variables of a host's agent, which is `rank` among the chosen hosts."""
        environ: dict[str, Any] = {
            **self.sent["values"],  # of the variables in the plan's `pass_env`
            **self.environ,
            "CLUSTERRUN_HOSTS_NODE_RANK": str(rank),
            "CLUSTERRUN_HOSTS_NODES": ",".join(node.name for node in chosen),
        }
        if any(node.is_apart for node in chosen):
            # 1: this host has a directory of its own. A name: it shares that host's directory.
            environ["CLUSTERRUN_HOSTS_APART"] = "1" if link.is_apart else self.links[0].name
        if link.gpus:
            environ[VISIBLE] = ",".join(link.gpus)
        return environ


def _machine(link: Link) -> tuple[str, str]:
    """Return what identifies a host's machine, under whichever name it was reached."""
    return link.facts["boot_id"], link.facts["hostname"]


def _unseen(hosts: Sequence[str], paths: RunPaths) -> UsageError:
    text = f"{', '.join(hosts)} can't see the run directory {paths.root}"
    return UsageError(text, hint="name a --run-dir that all hosts share, or hosts that see it")


def _on_all(links: Sequence[Link], act: Callable[[Link], None]) -> None:
    """Call `act` for all hosts at once. Raises ClusterrunError, which names the hosts that fail."""
    if errors := crew.on_all(links, act):
        (_, error), *others = errors.items()
        if others:
            error.message += f" (errors also on {', '.join(name for name, _ in others)})"
        raise error


def links_of(plan: Plan, paths: RunPaths) -> tuple[list[Link], str]:
    """Return a link for each host, and the name of the one on which this process runs, or ""."""
    script = crew.script("clusterrun.backends.hosts.courier", plan, paths)
    names = node_names(plan.hosts)
    here = names[0]  # over ssh; in an allocation, this machine may be any host or none
    if not plan.cluster.scheduler.outlives_shell:
        own = (name for name, host in zip(names, plan.hosts, strict=True) if is_this_machine(host))
        here = next(own, "")
    links = []
    for name, host in zip(names, plan.hosts, strict=True):
        is_here = name == here
        starter = "" if is_here or plan.starter == Starter.SSH.value else plan.starter
        link = Link(
            name=name,
            host=host,
            first="" if is_here or starter else here,  # the host that reaches it over ssh
            starter=starter,
            argv=crew.host_command(plan, host, is_here=is_here),
            script=script,
        )
        links.append(link)
    return links, here


def conduct(
    paths: RunPaths, sent: Mapping[str, Any], pipe: Pipe, ready: Callable[[], None]
) -> None:
    """Make the hosts ready, answer the submitter, let the parent exit (`ready`) and run the job."""
    signals = Signals()
    adopt_orphans()
    plan = Plan.from_json(sent["files"]["plan.json"])
    links, here = links_of(plan, paths)
    host = HostsHost(paths, plan, sent, links, here)
    listener = threading.Thread(target=host.listen, args=(pipe,), daemon=True)
    try:
        listener.start()
        host.assemble()
        write_controller(paths)
        pipe.send("answer", job_id=host.job_id, run_dir=str(paths.root), python=sys.executable)
        listener.join(GO_S)  # it ends with the submitter's `go`
        if not host.may_go:
            raise SubmissionError("the submission was interrupted")
    except BaseException as error:
        host.give_up()
        if not isinstance(error, (ClusterrunError, OSError)):
            raise
        if isinstance(error, OSError):
            error = judge.unwritten(plan.hosts[0], error)
        pipe.refuse(error)
        listener.join(GO_S)  # until the submitter has read it
        ready()  # the parent reports no error: the submitter knows it
        return
    if host.is_new:
        remember_root(paths.runs_dir)
    pipe.close()
    ready()
    agents = Agents(paths, plan, host.job_id, signals.wake)
    try:
        Conductor(paths=paths, plan=plan, host=host, hear=signals.wait, agents=agents).run()
    finally:
        host.close()


def main() -> int:
    """Receive a submission and run it in a process of its own."""
    os.environ.update(before_setup(crew.ENVIRON_FD))
    pipe = crew.take_streams()
    try:
        paths, sent = receive(pipe)
    except ClusterrunError as error:
        pipe.refuse(error)
        return int(error.exit_code)
    return detach(functools.partial(conduct, paths, sent, pipe), paths.batch_output)


if __name__ == "__main__":
    sys.exit(main())
