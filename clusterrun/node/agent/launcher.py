"""Start the ranks of this node, and say how that went; accelerate does it, behind a small door."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from clusterrun.launch.accelerate_argv import module_argv
from clusterrun.node.forward.spool import Spool

TAIL_BYTES = 4096
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # for the agent alone


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How the launcher ended: its exit code (negative: a signal) and the ranks that failed."""

    code: int
    failures: tuple[dict[str, Any], ...]
    last_words: str
    was_started: bool = True


class Launcher(Protocol):
    """What starts the ranks of one node."""

    @property
    def pid(self) -> int:
        """The launcher's own process; 0 if there is none."""

    def start(self) -> None:
        """Start the ranks; they are descendants of this process."""

    def verdict(self) -> Verdict | None:
        """Say how it went; None while ranks run."""


class AccelerateLauncher:
    """`accelerate launch`, in a process of its own that dies with this one."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], spool: Spool) -> None:
        self._arguments, self._env, self._spool = arguments, env, spool
        self._process: subprocess.Popen[bytes] | None = None
        self._refusal = ""

    @property
    def pid(self) -> int:
        """The launcher's process; 0 if it was not started."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start the launcher, its output into the spool; call this from the main thread.

        If the system refuses, on a full disk or without a process to spare, the verdict says so.
        """
        # Until the launcher ignores what is meant for the agent; a mask outlives exec.
        signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
        try:
            self._process = self._started()
        except OSError as error:
            self._refusal = error.strerror or str(error)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)

    def _started(self) -> subprocess.Popen[bytes]:
        module = "clusterrun.node.agent.accelerate_main"
        # torch keeps its error files somewhere; there they go when the job does.
        kept = ("--log_dir", str(self._spool.launcher_dir))
        words = (str(self._spool.failures), *kept, *self._arguments)
        with open(self._spool.launcher_output, "ab") as output:
            return subprocess.Popen(
                module_argv(sys.executable, module, *words),
                env=dict(self._env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def verdict(self) -> Verdict | None:
        """Say how the launcher ended; None while it runs."""
        if self._refusal:
            return Verdict(code=1, failures=(), last_words=self._refusal, was_started=False)
        code = self._process.poll() if self._process else None
        if code is None:
            return None
        return Verdict(code=code, failures=self._failures(), last_words=self._last_words())

    def _failures(self) -> tuple[dict[str, Any], ...]:
        try:
            return tuple(json.loads(self._spool.failures.read_text()))
        except (OSError, ValueError):
            return ()

    def _last_words(self) -> str:
        try:
            text = self._spool.launcher_output.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else ""
