"""Start the ranks of this node with `accelerate launch`, and report how that ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterrun.errors import MESSAGE_LETTERS
from clusterrun.launch.accelerate_argv import module_argv
from clusterrun.node.forward.spool import Spool
from clusterrun.shared import files

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # meant for the agent, not for its ranks


@dataclass(frozen=True, kw_only=True)
class LauncherResult:
    """How the launcher ended: its exit status (negative: a signal) and the ranks that failed."""

    code: int
    failures: list[dict[str, Any]]
    last_line: str
    was_started: bool = True


class Launcher:
    """`accelerate launch`, in a child process that dies with this one."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], spool: Spool) -> None:
        self._arguments, self._env, self._spool = arguments, env, spool
        self._process: subprocess.Popen[bytes] | None = None
        self._refused: LauncherResult | None = None

    @property
    def pid(self) -> int:
        """The launcher's process id; 0 if it was not started."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start the launcher with its output in the spool; call this from the main thread.

        If that fails, `result` returns why.
        """
        # Block these signals until the launcher ignores them itself; a mask survives exec.
        signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
        try:
            self._process = self._started()
        except OSError as error:
            why = error.strerror or str(error)
            self._refused = LauncherResult(code=1, failures=[], last_line=why, was_started=False)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)

    def _started(self) -> subprocess.Popen[bytes]:
        module = "clusterrun.node.agent.accelerate_main"
        # torch's error files are then removed with the spool.
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

    def result(self) -> LauncherResult | None:
        """Return how the launcher ended; None while it runs."""
        if self._process is None or (code := self._process.poll()) is None:
            return self._refused
        last_line = files.last_line(self._spool.launcher_output, MESSAGE_LETTERS)
        return LauncherResult(code=code, failures=self._failures(), last_line=last_line)

    def _failures(self) -> list[dict[str, Any]]:
        try:
            return list(json.loads(self._spool.failures.read_text()))
        except (OSError, ValueError):
            return []
