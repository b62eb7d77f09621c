"""Processes of ours on hosts: how another one starts them, and how both ends talk.

`submit` has a link to the controller, the controller has one to the courier of each host. A shell
there reads from its stdin what to run, so nothing of a job appears in a command line, and any login
shell will do. Then both ends send messages over its pipes: a line of JSON, then `size` bytes of
data if it has any. Data ends with a line end of its own, so a starter that passes on whole lines
holds nothing back.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any, BinaryIO, Final

from clusterrun.backends.hosts import openssh
from clusterrun.backends.hosts.mirror import DATA_BYTES, Receiver
from clusterrun.backends.slurm.host import cpus_of_nodes
from clusterrun.config.choices import Device, Starter
from clusterrun.config.hosts import FLUX_HOSTS, parse_host
from clusterrun.errors import (
    ClusterrunError,
    Exit,
    NodeExit,
    SchedulerUnreachableError,
    SubmissionError,
)
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import files, shell
from clusterrun.shared.hostlist import parse_hostlist
from clusterrun.shared.own_modules import RUN_MODULE
from clusterrun.shared.typed import decoded

MEET_S = 60.0  # for a host to start Python on a slow disk and report
ANSWER_S = 30.0
PING_S = 5.0
BYE_S = 15.0
AT_ONCE = 32
LINES = 20  # of stderr to explain why a host could not be used

READ = ("bash", "-s")  # plain words: what starts it may join and split them
_FIRST = """exec bash -c 'IFS= read -r -d "" script && eval "$script"'\n"""

# Setup lines get no input and print to stderr. The process starts with the shell's own streams;
# on ENVIRON_FD it finds the environment from before the setup lines.
_SCRIPT = """\
echo {mark}
exec 3<&0 4>&1 5< <(exec env -0) 0</dev/null 1>&2
clusterrun_setup() {{ eval "$1"; }}
clusterrun_setup {setup} || exit {setup_failed}
clusterrun_python={python}
[[ $clusterrun_python != '~/'* ]] || clusterrun_python=$HOME/${{clusterrun_python:2}}
exec "$clusterrun_python" -c {run} {module} 0<&3 1>&4 3<&- 4>&-
"""
ENVIRON_FD = 5
MARK: Final = "clusterrun-output"
_BEGIN: Final = f"{MARK}\n".encode()
_LINE_BYTES: Final = 1 << 16
HEADER_BYTES = 16 << 20  # a header may name many files
ALIVE_S = 5.0  # between two signs of life of the controller

Message = dict[str, Any]
"""Its `kind`, its raw `data`, and its fields."""


class Pipe:
    """One end of a connection; several threads may send, one receives."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self._reader, self._writer = reader, writer
        self._lock = threading.Lock()

    def send(self, kind: str, /, data: bytes = b"", **fields: Any) -> None:
        """Send a message. Raises OSError and ValueError if the other end is gone."""
        header = {**fields, "kind": kind, "size": len(data)}
        body = data + b"\n" if data else b""
        with self._lock:
            self._writer.write(json.dumps(header).encode() + b"\n" + body)
            self._writer.flush()

    def refuse(self, error: ClusterrunError) -> None:
        """Answer with an error, if the other end still listens."""
        refused = {"message": error.message, "hints": error.hints, "cause": error.cause}
        with contextlib.suppress(OSError, ValueError):
            self.send("answer", refused={**refused, "exit": int(error.exit_code)})

    def receive(self) -> Message | None:
        """Return the next message; None at the end of the stream, and for malformed input."""
        try:
            message: Message = json.loads(self._reader.readline(HEADER_BYTES))
            size, has_kind = message["size"], isinstance(message["kind"], str)
            data = b""
            if 0 < size <= files.MOST_BYTES:
                data = self._reader.read(size + 1)[:-1]  # without the line end after it
            return {**message, "data": data} if len(data) == size and has_kind else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def close(self) -> None:
        """Close both directions."""
        for stream in (self._reader, self._writer):
            with contextlib.suppress(OSError):
                stream.close()


def take_streams() -> Pipe:
    """Return the pipe of stdin and stdout; make stdin empty, and stdout the same as stderr."""
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return Pipe(open(reader, "rb"), open(writer, "wb"))


@dataclass(frozen=True, kw_only=True)
class _Refused:
    """The error with which a process answers."""

    message: str
    hints: tuple[str, ...] = ()
    cause: str | None = None
    exit: Exit = Exit.FAILED

    @property
    def error(self) -> ClusterrunError:
        """The error to raise here: one of two classes, with the exit status that was sent."""
        is_silent = self.exit is Exit.UNREACHABLE
        kind = SchedulerUnreachableError if is_silent else SubmissionError
        error = kind(self.message, hint=self.hints, cause=self.cause)
        error.exit_code = self.exit or Exit.FAILED
        return error


@dataclass(kw_only=True)
class Link:
    """A process of ours on a host."""

    name: str
    argv: Sequence[str]  # starts a shell there that reads `script`
    script: bytes
    env: Mapping[str, str] | None = None
    host: str = ""
    first: str = ""  # the name of the host that reaches this one over ssh, "" if none does
    starter: str = ""  # what starts the process instead of ssh, "" for ssh
    is_lost: bool = True
    is_met: bool = False  # until then, what it reports is only kept, to explain a refusal
    process: subprocess.Popen[bytes] | None = None
    attempt: int = 0  # of the courier's node
    code: int | None = 0  # how this node ended, None while it runs
    receiver: Receiver | None = None  # of files, if the host does not share the run directory
    facts: dict[str, Any] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    _heard: threading.Event = field(default_factory=threading.Event)
    _answers: queue.Queue[Message | None] = field(default_factory=queue.Queue)
    _lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES))

    @property
    def is_apart(self) -> bool:
        """Return whether the host keeps a run directory of its own."""
        return self.receiver is not None

    def start(self) -> None:
        """Start the process. Raises SchedulerUnreachableError."""
        self._answers, self.is_met = queue.Queue(), False
        self._lines.clear()
        pipe = subprocess.PIPE
        try:
            process = self.process = subprocess.Popen(
                self.argv,
                env=self.env,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
            )
        except OSError as error:
            text = f"cannot start {self.argv[0]}"
            raise SchedulerUnreachableError(text, cause=str(error)) from error
        assert process.stdin
        assert process.stdout
        self.pipe = Pipe(process.stdout, process.stdin)
        self._stderr = threading.Thread(target=self._read_stderr, args=(process,), daemon=True)
        self._stderr.start()
        threading.Thread(target=self._receive, args=(process,), daemon=True).start()
        with contextlib.suppress(OSError):  # if it is gone, there will be no answer
            process.stdin.write(self.script)

    def meet(self, **wanted: Any) -> None:
        """Start the courier and ask for the host's facts. Raises ClusterrunError."""
        self.start()
        self.facts = self.ask("facts", within_s=MEET_S, **wanted)["facts"]
        if not self.first:  # no ssh of ours: SSH_CONNECTION is about a login of the user
            self.facts |= {"client": "", "server": ""}
        self.facts["ahead_s"] = self.facts["time"] - time.time()
        self.is_met = True
        threading.Thread(target=self._show_life, args=(self.process,), daemon=True).start()

    def send(self, kind: str, /, data: bytes = b"", **fields: Any) -> bool:
        """Send a message; return False if the host is lost, or was never reached."""
        with contextlib.suppress(OSError, ValueError):
            if self.process is not None:
                self.pipe.send(kind, data, **fields)
                return True
        return False

    def send_project(self, packed: BinaryIO) -> None:
        """Send a packed project; a part without data is the end."""
        while data := packed.read(DATA_BYTES):
            self.send("project", data)
        self.send("project")

    def ask(self, kind: str, *, within_s: float = ANSWER_S, **fields: Any) -> Message:
        """Send a message and return the answer. Raises ClusterrunError as `answered` does."""
        self.send(kind, **fields)
        return self.answered(within_s)

    def answered(self, within_s: float) -> Message:
        """Return the next answer. Raises ClusterrunError if it is a refusal, or there is none."""
        answer = None
        with contextlib.suppress(queue.Empty):
            answer = self._answers.get(timeout=within_s)
        if answer is None:
            raise self.end_and_explain()
        if refused := answer.get("refused"):
            try:
                raise decoded(_Refused, refused).error
            except ValueError as wrong:
                raise openssh.nonsense(self.name) from wrong
        return answer

    def end_and_explain(self) -> ClusterrunError:
        """End the process; return the error that says why it does not answer."""
        code = self.close(openssh.LAST_WORDS_S)
        self._stderr.join(openssh.LAST_WORDS_S)  # until it has read all lines
        said = "\n".join(self._lines)
        return openssh.why(self.name, code, said, first=self.first, starter=self.starter)

    def check(self) -> None:
        """Mark the host as lost, and end its courier, unless the courier answers."""
        self._heard.clear()
        self.send("alive")
        if self.is_lost or not self._heard.wait(PING_S):
            self.close(within_s=0.0)

    def close(self, within_s: float = BYE_S) -> int:
        """Let the process end; return the exit status of the command that reached the host."""
        process = self.process
        if process is None:
            return 0
        self.send("bye")
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        try:
            return process.wait(within_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # setup lines may hang
            return process.wait()
        finally:
            self.is_lost = True

    def handle(self, message: Message) -> None:
        """Handle a message from the process: an answer, its node's end, or files for the home."""
        self._heard.set()
        kind = message["kind"]
        if kind == "answer":
            self._answers.put(message)
        elif kind == "ended" and message["attempt"] == self.attempt:  # not an earlier one
            self.code = message["code"]
        elif kind == "ask" and self.receiver and (wanted := self.receiver.wants()):
            self.send("wants", **wanted)
        elif kind == "file" and self.receiver:
            self.receiver.take(message["path"], int(message["at"]), message["data"])

    def _receive(self, process: subprocess.Popen[bytes]) -> None:
        """Handle all messages; after the last one the host is lost, and so is a running node."""
        pipe = self.pipe
        assert process.stdout
        # A login script may print lines of its own before the output of the module.
        while (line := process.stdout.readline(_LINE_BYTES)) and not line.endswith(_BEGIN):
            continue
        try:
            while (message := pipe.receive()) is not None:
                self.handle(message)
        except Exception as error:  # noqa: BLE001 - do not use a host that breaks the rules
            sys.stderr.write(f"clusterrun: {self.name}: {error}\n")
            process.kill()
        if self.process is process:  # it was not started again
            if self.code is None:
                self.code = int(NodeExit.NODE_LOST)
            self.is_lost = True
            self._answers.put(None)

    def _read_stderr(self, process: subprocess.Popen[bytes]) -> None:
        """Keep the last lines of stderr; print each line once the courier has answered."""
        assert process.stderr
        for line in process.stderr:
            text = line.decode(errors="replace")
            self._lines.append(text.rstrip("\n"))
            if self.is_met:
                sys.stderr.write(text)
                sys.stderr.flush()

    def _show_life(self, process: subprocess.Popen[bytes]) -> None:
        """Show the courier that this process lives, also while other hosts are made ready."""
        while self.process is process and process.poll() is None:
            self.send("alive")
            time.sleep(ALIVE_S)


def on_all(links: Sequence[Link], act: Callable[[Link], object]) -> dict[str, ClusterrunError]:
    """Call `act` for all hosts at once; return the errors by host."""
    errors = {}
    with ThreadPoolExecutor(min(AT_ONCE, max(1, len(links)))) as pool:
        done = {link.name: pool.submit(act, link) for link in links}
        for name, each in done.items():
            try:
                each.result()
            except ClusterrunError as error:
                errors[name] = error
    return errors


def end_all(links: Sequence[Link]) -> None:
    """End all couriers at once, within BYE_S; a slower one is killed."""
    for link in links:
        link.send("bye")
    until = time.monotonic() + BYE_S
    for link in links:
        link.close(max(0.5, until - time.monotonic()))  # 0.5 s even if others used up the time


# What starts a process of ours on a host


def script(module: str, plan: Plan, paths: RunPaths) -> bytes:
    """Return what the shell reads to run a module of ours after the job's setup lines."""
    text = _SCRIPT.format(
        mark=MARK,
        setup_failed=openssh.SETUP_FAILED,
        setup=shlex.quote(paths.env_script.read_text() if plan.setup else ""),
        python=shlex.quote(plan.python),
        run=shlex.quote(RUN_MODULE),
        module=module,
    )
    return f"{_FIRST}{text}\0".encode()  # _FIRST reads up to the NUL, and runs that


def host_command(plan: Plan, host: str, *, is_here: bool) -> list[str]:
    """Return the command that starts a shell on a host. Raises ClusterrunError."""
    if is_here:
        return list(READ)
    starter = Starter(plan.starter or Starter.SSH)
    if starter is Starter.SSH:
        return openssh.ssh(host, READ)
    name = parse_host(host).host
    if starter is Starter.SRUN:
        no_gpus = ("--gres=none",) if plan.device is Device.CPU else ()
        return [*_srun(name), *no_gpus, *READ]
    if starter is Starter.BLAUNCH:
        return ["blaunch", name, *READ]
    return ["flux", "exec", f"--rank={_flux_rank(name)}", "--dir=/", *READ]


def _srun(name: str) -> list[str]:
    """Return srun's command for a step that shares all of the job's resources on a node."""
    listed = os.environ.get("SLURM_JOB_NODELIST")
    nodes = parse_hostlist(listed) if listed else []
    counts = cpus_of_nodes(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    cpus = dict(zip(nodes, counts, strict=False)).get(name)
    return [
        *("srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={name}", "--mem=0"),
        *("--unbuffered", "--quiet", *((f"--cpus-per-task={cpus}",) if cpus else ())),
    ]


def _flux_rank(name: str) -> int:
    """Return a host's rank in the Flux instance of this allocation. Raises SubmissionError."""
    ranks = parse_hostlist(shell.run(FLUX_HOSTS).stdout.strip())
    if name not in ranks:
        known = ", ".join(dict.fromkeys(ranks))
        raise SubmissionError(f"{name} is not in this Flux instance", hint=f"use one of: {known}")
    return ranks.index(name)


def is_this_machine(host: str) -> bool:
    """Return whether a host is this machine, for this user: its address can be listened on here."""
    spec = parse_host(host)
    if spec.user or spec.port:
        return False
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, UnicodeError):
            socket.create_server((spec.host, 0), family=family).close()
            return True
    return spec.host in ("localhost", socket.gethostname())
