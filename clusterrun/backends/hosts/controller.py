"""The controller of a job on several machines: the conductor's process, on the first host.

`submit` sends it the job through stdin. It reaches and examines all hosts, answers whether the job
runs, and detaches: from then on it needs the submitting machine no longer.
"""

from __future__ import annotations

import functools
import os
import secrets
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from clusterrun.backends.hosts import crew, judge, project
from clusterrun.backends.hosts.crew import Frame, Link, Pipe, host_command, is_this_machine
from clusterrun.backends.hosts.host import HostsHost
from clusterrun.backends.hosts.mirror import Receiver
from clusterrun.backends.local.backend import take_job_id
from clusterrun.backends.local.controller import detach, write_controller
from clusterrun.config.choices import Starter
from clusterrun.config.hosts import node_names, parse_host
from clusterrun.errors import ClusterrunError, SubmissionError, UsageError
from clusterrun.launch.plan import Plan
from clusterrun.node.base.ports import candidate_ports
from clusterrun.node.base.processes import adopt_orphans
from clusterrun.node.conductor.agents import Agents
from clusterrun.node.conductor.conductor import Conductor
from clusterrun.node.conductor.host import Signals
from clusterrun.rendering.bundle import Bundle
from clusterrun.rundir import create, record
from clusterrun.rundir.known_roots import remember_root
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.shared import files
from clusterrun.shared.finding import Severity
from clusterrun.shared.given import before_setup
from clusterrun.shared.job_id import JobId

PROJECT_S = 600.0
GO_S = 30.0  # for the submitter to confirm that it knows of the job


def receive(pipe: Pipe) -> tuple[RunPaths, dict[str, Any]]:
    """Receive a submission; create its run directory if this host does not see the submitter's.

    Return the directory here and what was sent (docs/contracts.md). Raises ClusterrunError.
    """
    given = _next(pipe).fields
    plan = Plan.from_json(given["files"]["plan.json"])
    paths = RunPaths(root=Path(given["run_dir"]))
    is_here = paths.nonce(given["nonce"]).exists()
    if not is_here and given["must_see"]:
        raise _unseen(plan.hosts[:1], paths)
    try:
        if not is_here:
            runs_dir = RunsDir(root=Path(plan.hosts_dir).expanduser() / "runs")
            bundle = Bundle(files=given["files"])
            paths = create.create_run(runs_dir, plan.name, paths.root.name, bundle)
            here = replace(plan, workdir=str(paths.project))
            record.write(record.new_record(here, paths, argv=given["argv"], now=time.time()))
        pipe.send("answer", is_here=is_here)
        if not is_here:
            with tempfile.TemporaryFile() as packed:
                while data := _next(pipe).data:
                    packed.write(data)
                project.unpack(packed, paths.project)
    except (ClusterrunError, OSError) as error:
        if str(paths.root) != given["run_dir"]:
            create.remove_run(paths)
        raise judge.unwritten(plan.hosts[0], error) from error
    return paths, given


def _next(pipe: Pipe) -> Frame:
    message = pipe.receive()
    if message is None:
        raise SubmissionError("the submission was interrupted")
    return message


class Controller:
    """One job: its hosts, until it has ended on all of them."""

    def __init__(self, paths: RunPaths, sent: Mapping[str, Any], pipe: Pipe) -> None:
        self.paths, self._sent = paths, sent
        self.plan = Plan.from_json(sent["files"]["plan.json"])
        self.is_new = str(paths.root) != sent["run_dir"]  # created here
        self._packed: BinaryIO | None = None
        self._packing = threading.Lock()
        plan = self.plan
        script = crew.script(
            "clusterrun.backends.hosts.courier",
            python=plan.python,
            env_sh=paths.env_script.read_text() if plan.setup else "",
        )
        pairs = list(zip(node_names(plan.hosts), plan.hosts, strict=True))
        is_given = not plan.cluster.scheduler.outlives_shell
        here = (name for name, host in pairs if not is_given or is_this_machine(host))
        self.here = next(here, "")  # "" if this machine is none of them
        self.links = []
        for rank, (name, host) in enumerate(pairs):
            is_here = name == self.here
            starter = "" if is_here or plan.starter == Starter.SSH.value else plan.starter
            link = Link(
                name=name,
                host=host,
                first="" if is_here or starter else self.here,
                starter=starter,
                argv=host_command(plan, rank, is_here=is_here),
                script=script,
            )
            self.links.append(link)
        self.job_id = JobId()
        self.nonce = secrets.token_hex(16)
        self.listener = threading.Thread(target=self._listen, args=(pipe,), daemon=True)
        self._may_go = False

    def _listen(self, pipe: Pipe) -> None:
        """Wait for the submitter's last word; all couriers end if it is gone."""
        last_word = pipe.receive()
        self._may_go = last_word is not None and last_word.kind == "go"
        if not self._may_go:
            crew.end_all(self.links)

    def assemble(self) -> list[str]:
        """Reach all hosts and make them ready; return notes. Raises ClusterrunError, OSError."""
        self.listener.start()
        files.create(self.paths.nonce(self.nonce), "")
        _on_all(self.links, self._open)
        needed = [link for link in self.links if link.host in self._sent["must_see"]]
        if blind := [link.host for link in needed if not link.facts["sees_home"]]:
            raise _unseen(blind, self.paths)
        notes = self._judge(self.links)
        above = self._sent["last_id"]  # the newest one that the submitting machine knows
        self.job_id = take_job_id(self.paths.runs_dir, self.paths, prefix="H", above=above)
        # A machine has one boot id, however it is called: of two runs, one gets all its locks.
        for link in sorted(self.links, key=lambda it: (it.facts["boot_id"], it.facts["hostname"])):
            self._lock(link)
        self._try_ports()
        _on_all(self.links, self._place)
        return notes

    def _judge(self, links: Sequence[Link]) -> list[str]:
        """Return notes on the hosts. Raises ClusterrunError if the run can't start on them."""
        found = judge.judged(self.plan, {link.name: link.facts for link in links})
        if failures := [each for each in found if each.severity is Severity.FAIL]:
            raise judge.error_of(failures)
        return [each.summary for each in found]

    def _try_ports(self) -> None:
        """Have each host reach a port of the first and the next one. Raises ClusterrunError."""
        first, *others = self.links
        after = dict(zip((link.name for link in self.links), [*others, first], strict=True))
        closed: dict[tuple[str, int, str], list[str]] = defaultdict(list)

        def connect(link: Link) -> None:
            for end in {first.name: first, after[link.name].name: after[link.name]}.values():
                if end is link:
                    continue
                known = end.facts["server"] if end.first else link.facts["client"]
                address, port = known or parse_host(end.host).host, end.facts["port"]
                if reason := link.ask("connect", address=address, port=port)["closed"]:
                    closed[end.name, port, reason].append(link.name)

        _on_all(self.links, connect)
        if closed:
            raise judge.error_of(judge.closed_port(names, *end) for end, names in closed.items())

    def admit(self, link: Link) -> None:
        """Make a host usable that was lost. Raises ClusterrunError."""
        self._open(link)
        try:
            self._judge((self.links[0], link))
            self._lock(link)
            self._place(link)
        except BaseException:
            link.close()
            raise

    def _open(self, link: Link) -> None:
        link.meet(
            name=link.name,
            home=str(self.paths.root),
            nonce=self.nonce,
            own_dir=self._own_dir,
            paths=[] if self.paths.project.is_dir() else [self.plan.workdir],
            device=self.plan.device.value,
            ports=candidate_ports(self.nonce, 0, self.plan.port_range).link,
        )

    @property
    def _own_dir(self) -> str:
        """The run directory of a host that does not see the home, as that host expands it."""
        root = self.paths.root
        return f"{self.plan.hosts_dir}/runs/{root.parent.name}/{root.name}"

    def _lock(self, link: Link) -> None:
        """Lock a host for this job, and its GPUs. Raises ClusterrunError."""
        gpus = judge.gpus_to_lock(self.plan, link.facts)
        count = judge.gpus_needed(self.plan) if gpus else 0
        job = f"{self.job_id}-{self.paths.root.name}"  # others have jobs of the same number
        about = {"run": f"{self.plan.name}/{self.paths.root.name}", "host": link.name}
        locked = link.ask("lock", job=job, about=about, gpus=gpus, count=count)
        link.gpus = tuple(locked["gpus"]) if link.facts["gpus"].get("all") else ()
        if locked["twice"]:
            raise judge.error_of([judge.twice(link.name, locked["twice"])])
        if len(locked["gpus"]) < count:
            raise judge.error_of(judge.busy(link.name, *each) for each in locked["busy"].items())

    def _place(self, link: Link) -> None:
        """Have a host use the home, or bring the run to a directory of its own."""
        is_apart, root = not link.facts["sees_home"], self.paths.root
        link.receiver = Receiver(root=root, node=link.name) if is_apart else None
        own = self._own_dir if is_apart else str(root)
        placed = link.ask("place", root=own, is_apart=is_apart, is_first=not link.first)
        if placed["needs_project"]:
            with self._packing:
                self._packed = self._packed or self._pack()
            with open(f"/proc/self/fd/{self._packed.fileno()}", "rb") as packed:  # from its start
                link.send_project(packed)
            link.answered(PROJECT_S)
        link.is_lost = False

    def _pack(self) -> BinaryIO:
        """Return the project of the run, packed."""
        own, runs = self.paths.project, Path(self.plan.runs_dir)
        found = own if own.is_dir() else Path(self.plan.workdir)
        packed = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it is sent
        project.pack(project.find_project(found, leave_out=[runs]), packed)
        return packed

    def await_go(self) -> None:
        """Wait until the submitter knows of the job. Raises SubmissionError if it is gone."""
        self.listener.join(GO_S)
        if not self._may_go:
            raise SubmissionError("the submission was interrupted")

    def conduct(self, signals: Signals) -> int:
        """Run the job's conductor to the end; no process is left on any host that answers."""
        host = HostsHost(
            self.paths,
            self.plan,
            self.job_id,
            self.links,
            values=self._sent["values"],
            admit=self.admit,
            here=self.here,
            shell=self._sent["shell"],
        )
        agents = Agents(self.paths, self.plan, self.job_id, signals.wake)
        hear = signals.wait
        conductor = Conductor(paths=self.paths, plan=self.plan, host=host, hear=hear, agents=agents)
        try:
            return conductor.run()
        finally:
            self._close()

    def give_up(self) -> None:
        """End all couriers and remove what was written for the job."""
        self._close()
        if self.job_id:
            self.paths.runs_dir.job_link(self.job_id).unlink(missing_ok=True)
        if self.is_new:
            create.remove_run(self.paths)

    def _close(self) -> None:
        crew.end_all(self.links)
        self.paths.nonce(self.nonce).unlink(missing_ok=True)


def _unseen(hosts: Sequence[str], paths: RunPaths) -> UsageError:
    text = f"{', '.join(hosts)} can't see the run directory {paths.root}"
    return UsageError(text, hint="name a --run-dir that all hosts share, or hosts that see it")


def _on_all(links: Sequence[Link], deed: Callable[[Link], None]) -> None:
    """Do something on all hosts at once. Raises ClusterrunError."""
    errors = crew.on_all(links, deed)
    for error in errors.values():
        _, *others = errors
        if others:
            error.message += f" (errors also on {', '.join(others)})"
        raise error


def conduct(
    paths: RunPaths, sent: Mapping[str, Any], pipe: Pipe, ready: Callable[[], None]
) -> None:
    """Assemble the hosts, answer the submitter, then run the job."""
    signals = Signals()
    adopt_orphans()
    controller = Controller(paths, sent, pipe)
    try:
        notes = controller.assemble()
        write_controller(paths)
        pipe.send(
            "answer",
            job_id=controller.job_id,
            run_dir=str(paths.root),
            python=sys.executable,
            notes=notes,
        )
        controller.await_go()
    except BaseException as error:
        controller.give_up()
        if not isinstance(error, (ClusterrunError, OSError)):
            raise
        if isinstance(error, OSError):
            error = judge.unwritten(controller.plan.hosts[0], error)
        pipe.refuse(error)
        controller.listener.join(GO_S)
        ready()
        return
    if controller.is_new:
        remember_root(paths.runs_dir)
    pipe.close()
    ready()
    controller.conduct(signals)


def main() -> int:
    """Receive a submission and run it in a process of its own."""
    os.environ.update(before_setup(crew.ENVIRON))
    pipe = crew.take_streams()
    try:
        paths, sent = receive(pipe)
    except ClusterrunError as error:
        pipe.refuse(error)
        return int(error.exit_code)
    return detach(functools.partial(conduct, paths, sent, pipe), paths.batch_output)


if __name__ == "__main__":
    sys.exit(main())
