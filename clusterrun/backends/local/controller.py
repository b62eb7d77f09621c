"""Run one job of the local backend to its end: `controller RUN_DIR JOB_ID`.

The controller is the conductor's process, detached from the submitting shell. It takes the place
of a cluster's slurmd and batch script, and leaves no process behind.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from clusterrun.backends.local.backend import SCHEMA, VISIBLE, Controlling, identity
from clusterrun.errors import NodeExit
from clusterrun.launch.plan import LOOPBACK, Plan
from clusterrun.node.base.processes import adopt_orphans, die_with_parent, kill_descendants
from clusterrun.node.conductor.agents import Agents
from clusterrun.node.conductor.conductor import Conductor
from clusterrun.node.conductor.host import Host, Signals
from clusterrun.rundir.end import Reason, write_request
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.reading import as_text, read_plan
from clusterrun.rundir.record import register_run
from clusterrun.shared.files import read_json, write_whole

READY = b"ready"
LEAVE_TOGETHER_S = 3.0  # for agents to end each other over their link; then we end them
GRACE_S = 10.0  # from SIGTERM to SIGKILL, after the time that ranks have to save


def conduct(paths: RunPaths, plan: Plan, job_id: str, ready: Callable[[], None]) -> None:
    """Run a job's conductor; call `ready` once the job can be found and cancelled."""
    signals = Signals()
    adopt_orphans()
    write_controller(paths)
    ready()
    host = LocalHost(paths, plan, job_id)
    agents = Agents(paths, plan, job_id, signals.wake)
    Conductor(paths=paths, plan=plan, host=host, hear=signals.wait, agents=agents).run()


def write_controller(paths: RunPaths) -> None:
    """Record this process as the controller of a run."""
    pid, host, now = os.getpid(), socket.gethostname(), time.time()
    own = Controlling(pid=pid, identity=identity(pid) or "", host=host, started_at=now)
    write_whole(paths.controller, as_text(own, SCHEMA))


def amend_controller(paths: RunPaths, **fields: Any) -> None:
    """Change fields of controller.json: that it was killed (`is_gone`), or what it `waits` for."""
    if data := read_json(paths.controller):
        write_whole(paths.controller, json.dumps({**data, **fields}, indent=2) + "\n")


def detach(work: Callable[[Callable[[], None]], None], output: Path) -> int:
    """Run `work` in a child without a terminal; the parent returns 0 once it is ready.

    The child prints to `output`, and also returns from here, once `work` has ended. If the child
    fails before it is ready, the parent prints the error to stderr and returns 1.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with open(reader, "rb") as pipe:
            message = pipe.read()
        if message == READY:
            return 0
        text = message.decode("utf-8", "replace") or "the controller exited immediately\n"
        sys.stderr.write(text)
        return 1
    os.close(reader)
    os.setsid()
    with open(writer, "wb") as pipe:
        try:
            null = os.open(os.devnull, os.O_RDONLY)
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for descriptor, place in ((null, 0), (file, 1), (file, 2)):
                os.dup2(descriptor, place)
            os.close(null)
            os.close(file)
            work(lambda: _send(pipe, READY))
        except Exception:  # noqa: BLE001 - any error goes to the submitter and to the log
            traceback.print_exc()
            _send(pipe, traceback.format_exc().encode())
            return 1
    return 0


def _send(pipe: BinaryIO, message: bytes) -> None:
    """Write the first message and close the pipe; its reader may be gone."""
    with contextlib.suppress(OSError, ValueError), pipe:  # ValueError: it is closed
        pipe.write(message)


# This machine as the conductor's host: each node of a job is a process, nothing is queued


@dataclass(kw_only=True)
class LocalStep:
    """The nodes of one attempt or more, which end together; `lead_s` is for ranks to save."""

    paths: RunPaths
    running: dict[int, subprocess.Popen[bytes]]
    lead_s: float = 0.0
    leave_s: float = LEAVE_TOGETHER_S
    codes: list[int] = field(default_factory=list)  # of the nodes that have ended
    code: int = 0  # the exit status at the time of `end`, 0 if no node had failed
    end_by: float = float("inf")  # when the other nodes are ended, after one has failed
    is_ending: bool = False  # set by `end`
    kill_by: float = float("inf")  # when the grace time is over

    def poll(self) -> int | None:
        """Return the exit status once all nodes have ended or the grace time is over; else None."""
        now = time.monotonic()
        if not self._reap() or now > self.kill_by:  # `_reap` fills `codes`
            return self.code or exit_code(self.codes)
        if any(self.codes):  # a node has failed: the others get `leave_s` to end
            self.end_by = min(self.end_by, now + self.leave_s)
        if now > self.end_by:
            self.end()
        return None

    def end(self) -> None:
        """End all nodes within the grace time."""
        if self.is_ending:
            return
        self.is_ending = True
        self.code = exit_code(self.codes)  # before the exits that this causes
        self.kill_by = time.monotonic() + GRACE_S + self.lead_s
        write_request(self.paths.request(self.paths.newest_attempt()), Reason.END)
        for pid in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)  # Popen.terminate() would reap it unseen

    def kill(self) -> None:
        """Kill the processes that are left, which would hold ports and locks."""
        kill_descendants()

    def _reap(self) -> bool:
        """Collect exit statuses; return whether a node still runs."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return bool(self.running)
            node = self.running.pop(pid, None)
            if node is not None:  # else it is an orphan that this process has adopted
                node.returncode = os.waitstatus_to_exitcode(status)
                self.codes.append(node.returncode)


def start_node(
    paths: RunPaths, words: Sequence[str], directory: Path, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start `node.sh RUN_DIR ATTEMPT HOST PORT`, which ends with this process. Raises OSError."""
    return subprocess.Popen(
        ["bash", str(paths.node_script), str(paths.root), *words],
        cwd=directory,
        env=environ,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )


class LocalHost(Host):
    """One job on this machine; only end.json records how it ended."""

    def __init__(self, paths: RunPaths, plan: Plan, job_id: str) -> None:
        self.paths, self.plan, self.job_id = paths, plan, job_id
        self.environ = {"CLUSTERRUN_LOCAL_JOB_ID": job_id}
        self.time_limit_s = plan.time_minutes * 60 or float("inf")

    def start(
        self, attempt: int, *, port: int, is_relaunch: bool, excluded: tuple[str, ...]
    ) -> LocalStep:
        """Start every node; they find the conductor at `port`. Raises OSError."""
        del is_relaunch, excluded  # a simulated node is never lost on its own
        step = LocalStep(paths=self.paths, running={}, lead_s=self.plan.warning_s)
        words = (str(attempt), LOOPBACK, str(port))
        per_node = self.plan.gpus_per_node
        for rank in range(self.plan.nodes):
            own = {**self.environ, "CLUSTERRUN_LOCAL_NODE_RANK": str(rank)}
            if gpus := self.plan.gpu_ids[rank * per_node : (rank + 1) * per_node]:
                own[VISIBLE] = ",".join(gpus)
            node = start_node(self.paths, words, Path(self.plan.workdir), {**os.environ, **own})
            step.running[node.pid] = node
        return step

    def register(self) -> None:
        """Record the job if the submitting shell died before it could."""
        register_run(self.paths.root, self.environ)


def exit_code(codes: Sequence[int]) -> int:
    """Return the job's exit status; `codes` are those of its nodes, in the order of their ends.

    A rank's status takes precedence over an agent's; a signal is 128 + its number.

    >>> exit_code([0, 123, 3]), exit_code([0, 123]), exit_code([-9]), exit_code([0, 0])
    (3, 123, 137, 0)
    """
    failures = [code if code > 0 else 128 - code for code in codes if code]
    of_ranks = [code for code in failures if code not in set(NodeExit)]
    return (of_ranks or failures or [0])[0]


def main() -> int:
    """Start the controller; the two arguments are run directory and job id."""
    root, job_id = sys.argv[1:]
    paths = RunPaths(root=Path(root))
    plan = read_plan(paths)
    return detach(functools.partial(conduct, paths, plan, job_id), paths.batch_output)


if __name__ == "__main__":
    sys.exit(main())
