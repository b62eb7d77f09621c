"""The controller of a job on several machines: the conductor's process, on the first host.

`submit` sends it the job through stdin. It reaches and examines all hosts, answers whether the job
runs, and detaches: from then on it needs the submitting machine no longer.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from clusterrun.backends.hosts import crew, judge, mirror, project, reach, start
from clusterrun.backends.hosts.crew import Link
from clusterrun.backends.hosts.frames import Pipe
from clusterrun.backends.hosts.host import HostsHost
from clusterrun.backends.hosts.locks import Holder, job_lock
from clusterrun.backends.hosts.starters import host_command
from clusterrun.backends.local.controller import detach, write_controller
from clusterrun.backends.local.job_ids import take_job_id
from clusterrun.errors import ClusterrunError, SubmissionError, UsageError
from clusterrun.launch.plan import Plan
from clusterrun.node.base.ports import candidate_ports
from clusterrun.node.base.processes import adopt_orphans
from clusterrun.node.base.stderr import say_on_stderr
from clusterrun.node.conductor.conductor import Conductor, ask_rule_book
from clusterrun.node.conductor.signals import Signals
from clusterrun.rendering.bundle import Bundle
from clusterrun.rundir import create, record
from clusterrun.rundir.known_roots import remember_root
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.shared import files
from clusterrun.shared.host_specs import node_names


@dataclass(frozen=True, kw_only=True)
class SentJob:
    """A submission; `run_dir` is the submitter's, and `is_new` if this controller created it here.

    `last_id` is the newest job id that the submitting machine knows; `must_see` are hosts that are
    refused if they do not see the run directory.
    """

    plan: Plan
    paths: RunPaths
    values: Mapping[str, str]
    last_id: int
    must_see: Sequence[str]
    must_see_hint: str
    is_new: bool


def receive(pipe: Pipe) -> SentJob:
    """Receive a submission; create its run directory if this host does not see the submitter's.

    Raises ClusterrunError.
    """
    message = pipe.receive()
    if message is None or message.kind != "submit":
        raise SubmissionError("the submission was interrupted")
    given = message.fields
    plan = Plan.from_json(given["files"]["plan.json"])
    paths = RunPaths(root=Path(given["run_dir"]))
    is_here = paths.nonce(given["nonce"]).exists()
    if not is_here and given["must_see"]:
        raise _unseen(plan.hosts[:1], paths, given["must_see_hint"])
    if not is_here:
        runs_dir = RunsDir(root=Path(plan.hosts_dir).expanduser() / "runs")
        paths = create.create_run(
            runs_dir, plan.name, paths.root.name, Bundle(files=given["files"])
        )
        now = time.time()
        record.write(record.new_record(plan, paths, argv=given["argv"], now=now))
        remember_root(runs_dir)
    pipe.send("place", is_here=is_here)
    if not is_here:
        with tempfile.TemporaryFile() as packed:
            receiver = project.ProjectReceiver(packed, paths.project)
            while (frame := pipe.receive()) is not None and not receiver.take(frame):
                continue
    return SentJob(
        plan=plan,
        paths=paths,
        values=given["values"],
        last_id=given["last_id"],
        must_see=given["must_see"],
        must_see_hint=given["must_see_hint"],
        is_new=not is_here,
    )


class Controller:
    """One job: its hosts, until it has ended on all of them."""

    def __init__(self, sent: SentJob) -> None:
        self.plan, self.paths, self._sent = sent.plan, sent.paths, sent
        names = node_names(self.plan.hosts)
        env_sh = self.paths.env_script.read_text() if self.plan.setup else ""
        script = start.script(
            "clusterrun.backends.hosts.courier", python=self.plan.python, env_sh=env_sh
        )
        self.links = [
            Link(
                name=name,
                host=host,
                first=names[0] if rank else "",
                argv=host_command(self.plan, rank),
                script=script,
            )
            for rank, (name, host) in enumerate(zip(names, self.plan.hosts, strict=True))
        ]
        self.job_id = ""
        self.nonce = secrets.token_hex(16)
        files.create(self.paths.nonce(self.nonce), "")

    def assemble(self) -> list[str]:
        """Reach all hosts and make them ready; return notes. Raises ClusterrunError."""
        self._do(self._open, self.links)
        needed = [link for link in self.links if link.host in self._sent.must_see]
        if blind := [link.host for link in needed if not link.facts["sees_home"]]:
            raise _unseen(blind, self.paths, self._sent.must_see_hint)
        notes = self._judge(self.links)
        self.job_id = take_job_id(
            self.paths_of_runs, self.paths, prefix="H", above=self._sent.last_id
        )
        for link in sorted(self.links, key=_machine):  # of two runs one gets all its locks
            self._lock(link)
        self._do(self._place, self.links)
        return notes

    @staticmethod
    def _do(deed: Callable[[Link], None], links: Sequence[Link]) -> None:
        """Do something on all hosts at once. Raises ClusterrunError."""
        _, errors = crew.on_all(links, deed)
        if errors:
            raise _first_of(errors)

    def _judge(self, links: Sequence[Link]) -> list[str]:
        """Return notes on the hosts. Raises ClusterrunError if the run can't start on them."""
        facts = {link.name: link.facts for link in links}
        ahead = {link.name: link.ahead_s for link in links}
        found = judge.problems(self.plan, facts, ahead) or self._closed_ports(links[1:])
        if found:
            raise judge.error_of(found)
        return [str(note) for note in judge.notes(self.plan, facts, ahead)]

    def _closed_ports(self, others: Sequence[Link]) -> list[judge.Problem]:
        """Return which hosts do not reach a port of this one."""
        first = self.links[0].name
        ports = candidate_ports(self.nonce, 0, self.plan.port_range).link
        with reach.listen(ports) as listener:
            port = listener.getsockname()[1]

            def problem(link: Link) -> list[judge.Problem]:
                address = link.facts["client"] or self.links[0].host
                closed = link.ask("connect", address=address, port=port)["closed"]
                return [reach.closed(link.name, first, port, closed)] if closed else []

            found, errors = crew.on_all(others, problem)
        if errors:
            raise _first_of(errors)
        return [each for problems in found for each in problems]

    @property
    def paths_of_runs(self) -> RunsDir:
        """The directory of runs of this job's home."""
        return RunsDir(root=self.paths.root.parent.parent)

    def admit(self, link: Link) -> None:
        """Make a host usable that was lost. Raises ClusterrunError."""
        self._open(link)
        try:
            self._judge((self.links[0], link))
            self._lock(link)
            self._place(link)
        except ClusterrunError:
            link.close()
            raise

    def _open(self, link: Link) -> None:
        link.open(
            home=str(self.paths.root),
            nonce=self.nonce,
            own_dir=self._own_dir,
            paths=[] if self.paths.project.is_dir() else [self.plan.workdir],
            device=self.plan.device.value,
        )

    @property
    def _own_dir(self) -> str:
        """The run directory of a host that does not see the home, as that host expands it."""
        root = self.paths.root
        return f"{self.plan.hosts_dir}/runs/{root.parent.name}/{root.name}"

    def _lock(self, link: Link) -> None:
        """Lock a host for this job, and its GPUs. Raises ClusterrunError."""
        is_known = "all" in link.facts["gpus"]
        count = judge.gpus_needed(self.plan) if is_known else 0
        run = f"{self.plan.name}/{self.paths.root.name}"
        about = {"job": self.job_id, "run": run, "host": link.name}
        locked = link.ask("lock", about=about, gpus=judge.free_gpus(link.facts), count=count)
        link.gpus = tuple(locked["gpus"])
        is_twice = job_lock(self.job_id) in locked["busy"]
        if is_twice or len(link.gpus) < count:
            raise judge.error_of(
                judge.busy(link.name, lock, Holder(**holder), self.job_id)
                for lock, holder in locked["busy"].items()
            )

    def _place(self, link: Link) -> None:
        """Have a host use the home, or bring the run to a directory of its own."""
        if link.facts["sees_home"]:
            link.ask("place", home=str(self.paths.root), is_first=not link.first)
            link.is_lost = False
            return
        link.receiver = mirror.Receiver(root=self.paths.root, nodes=[link.name], say=say_on_stderr)
        placed = link.ask(
            "place",
            root=self._own_dir,
            node=link.name,
            files=mirror.bundle(self.paths),
            known=mirror.sizes(self.paths.root, link.name),
        )
        if not placed["has_project"]:
            link.send_project(self._packed())
        link.is_lost = False

    def _packed(self) -> BinaryIO:
        """Return the project of the run, packed."""
        own, runs = self.paths.project, Path(self.plan.runs_dir)
        found = own if own.is_dir() else Path(self.plan.workdir)
        packed = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it is sent
        project.pack(project.find_project(found, leave_out=[runs]), packed)
        packed.seek(0)
        return packed

    def conduct(self, hear: Callable[[float], list[int]]) -> int:
        """Run the job's conductor to the end; no process is left on any host that answers."""
        host = HostsHost(
            self.paths,
            self.plan,
            self.job_id,
            self.links,
            values=self._sent.values,
            admit=self.admit,
        )
        decide = functools.partial(ask_rule_book, lost=host.unreachable)
        conductor = Conductor(paths=self.paths, plan=self.plan, host=host, hear=hear, decide=decide)
        try:
            return conductor.run()
        finally:
            self._close()

    def give_up(self) -> None:
        """End all couriers and remove what was written for the job."""
        self._close(forget=True)
        if self.job_id:
            self.paths_of_runs.job_link(self.job_id).unlink(missing_ok=True)
        if self._sent.is_new:
            create.remove_run(self.paths)

    def _close(self, *, forget: bool = False) -> None:
        crew.end_all(self.links, forget=forget)
        self.paths.nonce(self.nonce).unlink(missing_ok=True)


def _unseen(hosts: Sequence[str], paths: RunPaths, hint: str) -> UsageError:
    return UsageError(f"{', '.join(hosts)} can't see the run directory {paths.root}", hint=hint)


def _machine(link: Link) -> tuple[str, str]:
    """Return what identifies a machine, however it is called."""
    return link.facts["boot_id"], link.facts["hostname"]


def _first_of(errors: Mapping[str, ClusterrunError]) -> ClusterrunError:
    """Return the error of one host, which also names the other hosts that have errors."""
    first, *others = errors.items()
    error = first[1]
    if others:
        error.message += f" (errors also on {', '.join(name for name, _ in others)})"
    return error


def conduct(sent: SentJob, pipe: Pipe, ready: Callable[[], None]) -> None:
    """Assemble the hosts, answer the submitter, then run the job."""
    signals = Signals()
    adopt_orphans()
    controller = Controller(sent)
    try:
        notes = controller.assemble()
        write_controller(sent.paths, controller.job_id)
        pipe.send(
            "ready",
            job_id=controller.job_id,
            run_dir=str(sent.paths.root),
            python=sys.executable,
            notes=notes,
        )
    except BaseException as error:
        controller.give_up()
        if not isinstance(error, ClusterrunError):
            raise
        with contextlib.suppress(OSError):
            pipe.send("refused", **_as_data(error))
        ready()
        return
    pipe.close()
    ready()
    controller.conduct(signals.wait)


def _as_data(error: ClusterrunError) -> dict[str, Any]:
    return {
        "message": error.message,
        "hints": list(error.hints),
        "cause": error.cause,
        "exit": int(error.exit_code),
    }


def main(argv: Sequence[str] = ()) -> int:
    """Receive a submission and run it in a process of its own."""
    del argv
    os.environ.update(start.environ_before_setup())
    reader, writer = start.take_streams()
    pipe = Pipe(open(reader, "rb"), open(writer, "wb"))  # noqa: SIM115 - closed by `conduct`
    try:
        sent = receive(pipe)
    except ClusterrunError as error:
        pipe.send("refused", **_as_data(error))
        return int(error.exit_code)
    return detach(functools.partial(conduct, sent, pipe), sent.paths.batch_output)


if __name__ == "__main__":
    sys.exit(main())
