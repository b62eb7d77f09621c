"""The controller's connections to the couriers of its hosts."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from clusterrun.backends.hosts import judge, mirror, openssh, project, start
from clusterrun.backends.hosts.courier import ALIVE_S
from clusterrun.backends.hosts.start import Frame, Pipe
from clusterrun.errors import ClusterrunError, NodeExit, SchedulerUnreachableError, SubmissionError
from clusterrun.node.base.stderr import say_on_stderr

AT_ONCE = 32
MEET_S = 60.0  # for a host to start Python on a slow disk and report
ANSWER_S = 30.0
BYE_S = 15.0
PING_S = 5.0
LAST_WORDS_S = 2.0  # for ssh to print why it failed
PROJECT_S = 600.0
LINES = 20  # of stderr to explain why a host could not be used


@dataclass(kw_only=True)
class Link:
    """One host's courier; `argv` starts a shell there that reads `script`.

    `first` is the name of the host that reaches this one over ssh, "" if none does;
    `starter` is what starts the courier instead of ssh. `code` is how its node ended in `attempt`,
    None while it runs; `ahead_s` is how far its clock is ahead. `receiver` gets the files of a host
    that does not share the run directory.
    """

    name: str
    host: str
    first: str
    argv: Sequence[str]
    script: bytes
    starter: str = ""
    attempt: int = 0
    code: int | None = 0
    is_lost: bool = True
    receiver: mirror.Receiver | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    ahead_s: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    _answers: queue.Queue[Frame | None] = field(default_factory=queue.Queue)
    _lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES))
    _is_met: bool = False
    _heard: threading.Event = field(default_factory=threading.Event)

    @property
    def is_apart(self) -> bool:
        """Return whether the host keeps a run directory of its own."""
        return self.receiver is not None

    def open(self, **wanted: Any) -> None:
        """Start the courier and ask for the host's facts. Raises ClusterrunError."""
        self._answers, self._is_met = queue.Queue(), False
        self._lines.clear()
        try:
            process = self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise SchedulerUnreachableError(
                f"cannot start {self.argv[0]}", cause=str(error)
            ) from error
        assert process.stdin
        assert process.stdout
        self._pipe = Pipe(process.stdout, process.stdin)
        speaker = threading.Thread(target=self._pass_on, args=(process,), daemon=True)
        speaker.start()
        threading.Thread(target=self._receive, args=(process,), daemon=True).start()
        try:
            process.stdin.write(self.script)
            self.facts = self.ask("facts", within_s=MEET_S, **wanted)["facts"]
            if not self.first:  # SSH_CONNECTION is about a login of the user
                self.facts |= {"client": "", "server": ""}
        except (OSError, ClusterrunError) as error:
            code = self.close(within_s=LAST_WORDS_S)
            speaker.join(LAST_WORDS_S)
            said = "\n".join(self._lines)
            reached = {"first": self.first, "starter": self.starter}
            raise openssh.why(self.name, code, said, **reached) from error
        self.ahead_s = self.facts["time"] - time.time()
        self._is_met = True
        threading.Thread(target=self._show_life, args=(process,), daemon=True).start()

    def ask(self, kind: str, *, within_s: float = ANSWER_S, **fields: Any) -> dict[str, Any]:
        """Send a message and return the answer. Raises SchedulerUnreachableError without one."""
        self.send(kind, **fields)
        return self._answered(within_s)

    def _answered(self, within_s: float) -> dict[str, Any]:
        with contextlib.suppress(queue.Empty):
            answer = self._answers.get(timeout=within_s)
            if answer is not None and "failed" not in answer.fields:
                return answer.fields
            if answer is not None:
                why = answer.fields["failed"]
                raise SubmissionError(
                    f"{self.name}: cannot write the run", cause=why, hint=judge.ELSEWHERE
                )
        raise SchedulerUnreachableError(f"{self.name} does not answer")

    def send(self, kind: str, /, data: bytes = b"", **fields: Any) -> None:
        """Send a message; do nothing if the host is lost, or was never reached."""
        with contextlib.suppress(OSError, ValueError):
            if self.process is not None:
                self._pipe.send(kind, data, **fields)

    def send_project(self, packed: BinaryIO) -> None:
        """Bring the project to the host. Raises SchedulerUnreachableError."""
        try:
            project.send_project(self._pipe, packed)
        except (OSError, ValueError) as error:
            raise SchedulerUnreachableError(f"{self.name} is lost", cause=str(error)) from error
        self._answered(PROJECT_S)

    def check(self) -> None:
        """Give the host up unless its courier answers."""
        self._heard.clear()
        self.send("alive")
        if self.is_lost or not self._heard.wait(PING_S):
            self.close(within_s=0.0)

    def close(self, within_s: float = BYE_S) -> int:
        """Let the courier end; return the exit status of the command that reached the host."""
        process = self.process
        if process is None:
            return 0
        self.send("bye")
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        try:
            return process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            self.is_lost = True

    def _show_life(self, process: subprocess.Popen[bytes]) -> None:
        """Show the courier that this process lives, also while others are made ready."""
        while self.process is process and process.poll() is None:
            self.send("alive")
            time.sleep(ALIVE_S)

    def _receive(self, process: subprocess.Popen[bytes]) -> None:
        pipe = self._pipe
        start.skip_greeting(process.stdout)  # type: ignore[arg-type]
        try:
            while (message := pipe.receive()) is not None:
                self._heard.set()
                self._take(message)
        except Exception as error:  # noqa: BLE001 - do not use a host that breaks the rules
            say_on_stderr(f"{self.name}: {error}")
            process.kill()
        if self.process is process:
            self.is_lost = True
            if self.code is None:
                self.code = int(NodeExit.NODE_LOST)
            self._answers.put(None)

    def _take(self, message: Frame) -> None:
        if message.kind == "answer":
            self._answers.put(message)
        elif message.kind == "ended" and message.fields["attempt"] == self.attempt:
            self.code = message.fields["code"]
        elif message.kind == "ask" and self.receiver and (wanted := self.receiver.wants()):
            self.send("wants", **wanted)
        elif message.kind == "file" and self.receiver:
            self.receiver.take(message)

    def _pass_on(self, process: subprocess.Popen[bytes]) -> None:
        """Print what the host reports; until it has met us, keep it to explain a refusal."""
        assert process.stderr
        for line in process.stderr:
            text = line.decode(errors="replace")
            if self._is_met:
                sys.stderr.write(text)
                sys.stderr.flush()
            else:
                self._lines.append(text.rstrip("\n"))


def on_all(links: Sequence[Link], deed: Callable[[Link], object]) -> dict[str, ClusterrunError]:
    """Do something with all hosts at once; return the errors by host."""

    def one(link: Link) -> dict[str, ClusterrunError]:
        try:
            deed(link)
        except ClusterrunError as error:
            return {link.name: error}
        return {}

    with ThreadPoolExecutor(min(AT_ONCE, max(1, len(links)))) as pool:
        return {name: each for found in pool.map(one, links) for name, each in found.items()}


def end_all(links: Sequence[Link], *, forget: bool = False) -> None:
    """Let all couriers end at once; with `forget` they remove what they wrote for this job."""
    for link in links:
        link.send("bye", forget=forget)
    until = time.monotonic() + BYE_S
    for link in links:
        link.close(max(0.5, until - time.monotonic()))
