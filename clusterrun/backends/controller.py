"""Run one job of the local backend to its end: `python -m clusterrun.backends.controller DIR ID`.

The controller is detached from the shell that submitted: it is what slurmd and the batch
script are on a cluster. It starts every simulated node, holds the time limit, passes on a
cancellation, leaves no process behind and writes the real exit status to end.json.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from clusterrun.backends import process
from clusterrun.backends.gpus import VISIBLE, split_gpus
from clusterrun.errors import ClusterrunError, NodeExit
from clusterrun.files import write_whole
from clusterrun.node.conclude import conclude
from clusterrun.node.processes import adopt_orphans, die_with_parent, kill_descendants
from clusterrun.node.recovery import Decision
from clusterrun.node.request import Reason, write_request
from clusterrun.node.stderr import say_on_stderr
from clusterrun.outcome import Next
from clusterrun.paths import RunPaths
from clusterrun.planning.plan import Plan
from clusterrun.record import register_run
from clusterrun.state import JobState

SCHEMA = "clusterrun.controller/1"
END_SCHEMA = "clusterrun.end/1"
READY = b"ready"

POLL_S = 0.05
LEAVE_TOGETHER_S = 3.0  # agents end each other over their link; then we do it
ROOM_S = 600.0  # as long as a batch script waits for a full disk
ROOM_POLL_S = 1.0
GRACE_S = 10.0  # from SIGTERM to SIGKILL, as long as Slurm's KillWait on most sites

_Done = TypeVar("_Done")


@dataclass(kw_only=True)
class Controller:
    """One job: its nodes as processes, and why they were stopped."""

    paths: RunPaths
    plan: Plan
    job_id: str
    started_at: float = field(default_factory=time.time)
    asked_to_stop: bool = False
    asked_to_save: bool = False
    attempt: int = 0
    deadline: float = 0.0
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)

    def run(self, ready: Callable[[], None]) -> None:
        """Run the job and write end.json, whatever happens."""
        adopt_orphans()
        self._listen()
        self._write_controller()
        ready()
        state, code = JobState.FAILED, 1
        try:
            state, code = self._run_nodes()
        except Exception:  # noqa: BLE001 - the last line of defence: the reason goes to the log
            _print_trouble()
        finally:
            kill_descendants()
            self._write_end(state, code)

    def _listen(self) -> None:
        """Take SIGTERM (and Ctrl-C's signal) as a wish to cancel; a lost terminal is none."""
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "asked_to_stop", True))
        signal.signal(signal.SIGUSR2, lambda *_: setattr(self, "asked_to_save", True))
        # A handler, not SIG_IGN: what is ignored stays ignored in the nodes.
        signal.signal(signal.SIGHUP, lambda *_: None)

    def _write_controller(self) -> None:
        data = {
            "schema": SCHEMA,
            "job_id": self.job_id,
            "pid": os.getpid(),
            "identity": process.identity(os.getpid()),
            "boot_id": process.boot_id(),
            "host": socket.gethostname(),
            "started_at": self.started_at,
        }
        write_whole(self.paths.controller, json.dumps(data, indent=2) + "\n")

    def _write_end(self, state: JobState, code: int) -> None:
        data = {
            "schema": END_SCHEMA,
            "state": state.value,
            "exit_code": code,
            "ended_at": time.time(),
        }
        text = json.dumps(data, indent=2) + "\n"
        self._where_there_is_room(lambda: write_whole(self.paths.end, text), even_if_cancelled=True)

    def _where_there_is_room(
        self, deed: Callable[[], _Done], *, even_if_cancelled: bool = False
    ) -> _Done:
        """Do something once the disk takes it, unless the job is cancelled meanwhile."""
        begin, is_told = time.monotonic(), False
        while True:
            try:
                return deed()
            except OSError as error:
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                is_over = time.monotonic() > begin + ROOM_S
                if not is_full or is_over or (self.asked_to_stop and not even_if_cancelled):
                    raise
                if not is_told:
                    is_told = True
                    say_on_stderr(f"{error}: waiting for room, {ROOM_S / 60:.0f} minutes at most")
            time.sleep(ROOM_POLL_S)

    # The nodes

    def _run_nodes(self) -> tuple[JobState, int]:
        """Run one attempt after the other, as long as one is to follow.

        Restarts share the time limit; the run gets a new one where Slurm would queue it again.
        """
        is_queued = True
        while True:
            try:
                self.attempt = self._where_there_is_room(lambda: take_attempt(self.paths))
            except OSError:
                if not self.asked_to_stop:
                    raise
                return JobState.CANCELLED, int(NodeExit.CANCELLED)
            if is_queued:
                self.deadline = time.monotonic() + (self.plan.time_minutes * 60 or float("inf"))
            self.codes.clear()
            state, code = self._run_attempt()
            kill_descendants()  # what an agent that was killed has left holds ports and locks
            if state is not JobState.FAILED or self.asked_to_stop:
                return state, code
            decision = self._conclude(code)
            if decision.next is Next.STOP:
                return decision.state, code
            is_queued = decision.state is JobState.TIMEOUT

    def _conclude(self, code: int) -> Decision:
        environ = {"CLUSTERRUN_LOCAL_JOB_ID": self.job_id}
        try:
            decision = conclude(self.paths.root, self.attempt, code, environ)
        except (OSError, ValueError) as error:
            _print_trouble()
            return Decision(next=Next.STOP, why=str(error))
        say_on_stderr(f"attempt {self.attempt}: {decision.next.value}: {decision.why}")
        return decision

    def _run_attempt(self) -> tuple[JobState, int]:
        gpus = split_gpus(self.plan, os.environ.get(VISIBLE))
        for rank in range(self.plan.nodes):
            self._start_node(rank, self.attempt, gpus[rank] if gpus else None)
        self._register()
        why = self._watch()
        code = exit_code(self.codes)
        if code:
            code = _agreed(self.paths, self.attempt) or code
        if why is None:
            return (JobState.FAILED if code else JobState.COMPLETED), code
        self._stop()
        code = code or exit_code(self.codes) or NodeExit.CANCELLED
        return why, int(code)

    def _start_node(self, rank: int, attempt: int, gpus: str | None) -> None:
        environ = {name: text for name, text in os.environ.items() if name != VISIBLE}
        environ["CLUSTERRUN_LOCAL_NODE_RANK"] = str(rank)
        environ["CLUSTERRUN_LOCAL_JOB_ID"] = self.job_id
        if gpus is not None:
            environ[VISIBLE] = gpus
        node = subprocess.Popen(
            ["bash", str(self.paths.node_script), str(self.paths.root), str(attempt)],
            cwd=self.plan.workdir,
            env=environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        self.running[node.pid] = node

    def _register(self) -> None:
        """Record the job where the submitting shell died before it could."""
        try:
            register_run(self.paths.root, {"CLUSTERRUN_LOCAL_JOB_ID": self.job_id})
        except (ClusterrunError, OSError, ValueError):
            _print_trouble()

    def _watch(self) -> JobState | None:
        """Wait until all nodes have ended (None), or until there is a reason to stop them."""
        warn_at = self.deadline - self.plan.warning_s
        leave_by = float("inf")
        while self._reap():
            if self.asked_to_stop:
                return JobState.CANCELLED
            if self.asked_to_save:
                self.asked_to_save = False
                self._warn()
            if time.monotonic() > warn_at:
                warn_at = float("inf")
                write_request(self.paths.request(self.attempt), Reason.TIME_LIMIT)
                self._warn()
            if time.monotonic() > self.deadline:
                return JobState.TIMEOUT
            if any(self.codes):
                leave_by = min(leave_by, time.monotonic() + LEAVE_TOGETHER_S)
            if time.monotonic() > leave_by:
                return JobState.FAILED
            time.sleep(POLL_S)
        return None

    def _reap(self) -> bool:
        """Take the exit statuses of what has ended; say whether a node still runs."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return bool(self.running)
            node = self.running.pop(pid, None)
            if node is not None:  # else an orphan that we adopted
                node.returncode = os.waitstatus_to_exitcode(status)
                self.codes.append(node.returncode)

    def _warn(self) -> None:
        """Pass on to the head's agent that something is requested of the attempt."""
        try:
            head = int(self.paths.head_pid(self.attempt).read_text(encoding="ascii"))
            os.kill(head, signal.SIGUSR2)
        except (OSError, ValueError):
            return  # it looks for requests when it starts

    def _stop(self) -> None:
        write_request(self.paths.request(self.attempt), Reason.END)
        for node in self.running.values():
            node.terminate()
        deadline = time.monotonic() + GRACE_S
        while self._reap() and time.monotonic() < deadline:
            time.sleep(POLL_S)


def take_attempt(paths: RunPaths) -> int:
    """Start the next attempt: the first whose directory this process can make."""
    paths.attempts_dir.mkdir(mode=0o700, exist_ok=True)
    attempt = paths.newest_attempt()
    while True:
        attempt += 1
        try:
            paths.attempt(attempt).mkdir(mode=0o700)
        except FileExistsError:
            continue
        return attempt


def _agreed(paths: RunPaths, attempt: int) -> int:
    """Read the exit status that the agents agreed on; 0 where they left none."""
    with contextlib.suppress(OSError, ValueError):
        return int(paths.verdict(attempt).read_text(encoding="ascii"))
    return 0


def exit_code(codes: Sequence[int]) -> int:
    """Choose the job's status from those of the nodes, in the order in which they ended.

    The first that is a rank's own wins over those that agents choose; a signal is 128 + its number.

    >>> exit_code([0, 123, 3]), exit_code([0, 123]), exit_code([-9]), exit_code([0, 0])
    (3, 123, 137, 0)
    """
    bad = [code if code > 0 else 128 - code for code in codes if code]
    own = [code for code in bad if code not in set(NodeExit)]
    return (own or bad or [0])[0]


def detach(work: Callable[[Callable[[], None]], None], output: Path) -> int:
    """Do `work` in a process that belongs to no shell or terminal; return once it says ready.

    Its output is appended to a file. Returns 1, its error on our stderr, when it failed before.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with open(reader, "rb") as pipe:
            said = pipe.read()
        if said == READY:
            return 0
        sys.stderr.write(said.decode("utf-8", "replace") or "the controller ended at once\n")
        return 1
    os.close(reader)
    os.setsid()
    try:
        _redirect(output)
        work(lambda: _say(writer, READY))
    except Exception:  # noqa: BLE001 - the one who waits, or else the log, gets it in words
        traceback.print_exc()
        _say(writer, traceback.format_exc().encode())
        return 1
    return 0


def _say(writer: int, said: bytes) -> None:
    try:
        with open(writer, "wb") as pipe:
            pipe.write(said)
    except OSError:  # said before, or nobody waits any more
        pass


def _print_trouble() -> None:
    """Print the traceback of the error at hand, unless the run's disk is full."""
    with contextlib.suppress(OSError):
        traceback.print_exc()


def _redirect(output: Path) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor, place in ((null, 0), (file, 1), (file, 2)):
        os.dup2(descriptor, place)
    os.close(null)
    os.close(file)


def main() -> int:
    """Start the controller of the run directory and job id that the command line names."""
    root, job_id = sys.argv[1:]
    paths = RunPaths(root=Path(root))
    plan = Plan.from_json(paths.plan.read_text())
    controller = Controller(paths=paths, plan=plan, job_id=job_id)
    return detach(controller.run, paths.batch_output)


if __name__ == "__main__":
    sys.exit(main())
