"""Start the ranks of this node, and report how they ended: three ways to do it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clusterrun.errors import MESSAGE_LETTERS
from clusterrun.launch.accelerate_argv import MONITOR_INTERVAL_S
from clusterrun.node.forge.handle import Forge
from clusterrun.node.forge.ranks import WARNINGS
from clusterrun.node.forward.spool import Spool
from clusterrun.shared import files
from clusterrun.shared.own_modules import WORKER_MODULE, module_argv

NOT_FORKED = "the ranks start {}, not as forks"


@dataclass(frozen=True, kw_only=True)
class LauncherResult:
    """How the launcher ended: its exit status (negative: a signal) and the ranks that failed."""

    code: int
    failures: list[dict[str, Any]]
    last_line: str
    was_started: bool = True


@dataclass(frozen=True, kw_only=True)
class Start:
    """What the ranks of a node are started with; `store` is set on the first node alone."""

    entry: Sequence[str]
    environs: Sequence[Mapping[str, str]]
    titles: Sequence[str]
    first_rank: int
    spool: Spool
    store: tuple[str, int, int, int] | None


class NodeLauncher(ABC):
    """What starts the ranks of a node; call it from the main thread."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._processes: list[subprocess.Popen[bytes]] = []
        self._refused: LauncherResult | None = None

    @property
    def pids(self) -> Sequence[int]:
        """Processes whose ends the launcher awaits."""
        return [process.pid for process in self._processes]

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Return whether no rank of this launcher is left, or none was started."""

    def start(self) -> None:
        """Start the ranks. If that fails, `result` returns why."""
        try:
            self._begin()
        except OSError as error:
            why = error.strerror or str(error)
            self._refused = LauncherResult(code=1, failures=[], last_line=why, was_started=False)

    def revoke(self) -> None:
        """Start no ranks from now on."""
        return

    @abstractmethod
    def result(self) -> LauncherResult | None:
        """Return how the ranks ended, or which have failed while others run; else None."""

    @abstractmethod
    def _begin(self) -> None:
        """Start the ranks."""

    def _last_line(self) -> str:
        return files.last_line(self._spool.launcher_output, MESSAGE_LETTERS)

    def _run(self, argv: Sequence[str], env: Mapping[str, str], *, is_deaf: bool = False) -> None:
        """Start a process; one that `is_deaf` has the warnings blocked until it handles them."""
        blocked = WARNINGS if is_deaf else ()
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)  # a mask survives exec
        try:
            with open(self._spool.launcher_output, "ab") as output:
                process = subprocess.Popen(
                    argv,
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        self._processes.append(process)


class AccelerateLauncher(NodeLauncher):
    """`accelerate launch`, in a child process that dies with this one and ends after its ranks."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], spool: Spool) -> None:
        super().__init__(spool)
        self._arguments, self._env = arguments, env

    @property
    def is_over(self) -> bool:
        """Return whether the launcher has ended."""
        return not self._processes or self._processes[0].poll() is not None

    def _begin(self) -> None:
        # torch's error files are removed with the spool.
        words = ("--log_dir", str(self._spool.launcher_dir), *self._arguments)
        module, failures = "clusterrun.node.agent.accelerate_main", str(self._spool.failures)
        argv = module_argv(sys.executable, module, failures, *words)
        self._run(argv, self._env, is_deaf=True)

    def result(self) -> LauncherResult | None:
        """Return how the launcher ended; None while it runs."""
        if self._refused or not self.is_over:
            return self._refused
        failures: list[dict[str, Any]] = []
        with contextlib.suppress(OSError, ValueError):
            failures = list(json.loads(self._spool.failures.read_text()))
        code = self._processes[0].returncode
        return LauncherResult(code=code, failures=failures, last_line=self._last_line())


class _RankLauncher(NodeLauncher):
    """A launcher that knows how each local rank ended; like torch's, patient with others."""

    def __init__(self, start: Start) -> None:
        super().__init__(start.spool)
        self._start = start
        self._codes: Mapping[int, int] = {}
        self._failed_at = 0.0

    @property
    def _are_all_over(self) -> bool:
        return len(self._codes) == len(self._start.environs)

    def _ended(self) -> LauncherResult | None:
        failed = {local: code for local, code in self._codes.items() if code}
        if failed and not self._failed_at:
            self._failed_at = time.monotonic()
        is_overdue = failed and time.monotonic() - self._failed_at > MONITOR_INTERVAL_S
        if not self._are_all_over and not is_overdue:
            return None
        first, status = self._start.first_rank, int(bool(failed))
        entries = [{"rank": first + local, "exitcode": code} for local, code in failed.items()]
        return LauncherResult(code=status, failures=entries, last_line=self._last_line())


class DirectLauncher(_RankLauncher):
    """Fresh interpreters with the environments that accelerate has computed on the first node."""

    @property
    def is_over(self) -> bool:
        """Return whether all ranks have ended."""
        self._look()
        return self._are_all_over or self._refused is not None

    def _begin(self) -> None:
        """Start the ranks, and the store if this node has it."""
        start, own = self._start, {"CLUSTERRUN_LAUNCHER_PID": str(os.getpid())}
        argv = module_argv(sys.executable, WORKER_MODULE, *start.entry)
        for env in start.environs:
            self._run(argv, {**env, **own})
        if start.store is not None:
            words = map(str, (os.getpid(), *start.store))
            store = module_argv(sys.executable, "clusterrun.node.forge.store", *words)
            self._run(store, os.environ, is_deaf=True)  # until it is killed

    def _look(self) -> None:
        """Note the ends of ranks; the agent, which also looks, reaps them after the attempt."""
        codes = dict(self._codes)
        for local, process in enumerate(self._processes[: len(self._start.environs)]):
            with contextlib.suppress(ChildProcessError):
                ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None:
                    is_exit = ended.si_code == os.CLD_EXITED
                    codes[local] = ended.si_status if is_exit else -ended.si_status
        self._codes = codes

    def result(self) -> LauncherResult | None:
        """Return how the ranks ended; None while all run."""
        self._look()
        for store in self._processes[len(self._start.environs) :]:
            if store.poll() is not None:
                return LauncherResult(code=1, failures=[], last_line=self._last_line())
        return self._refused or self._ended()


class ForgeLauncher(_RankLauncher):
    """Forks of this node's forge; fresh interpreters if it can't fork ranks, and a line why."""

    def __init__(self, start: Start, forge: Forge, say: Callable[[str], None]) -> None:
        super().__init__(start)
        self._forge, self._say = forge, say
        self._instead: DirectLauncher | None = None
        self._needs_forge = True
        self._is_lost = self._is_revoked = False

    @property
    def pids(self) -> Sequence[int]:
        """The forge, and ranks that it could not fork."""
        return [self._forge.pid, *(self._instead.pids if self._instead else ())]

    @property
    def is_over(self) -> bool:
        """Return whether all ranks have ended."""
        self._look()
        if self._instead is not None:
            return self._instead.is_over
        return self._are_all_over or self._forge.is_dead

    def _begin(self) -> None:
        """Order the ranks. The forge forks them when it has imported everything."""
        start, first = self._start, self._start.environs[0]
        common = {
            name: value
            for name, value in first.items()
            if all(environ.get(name) == value for environ in start.environs)
        }
        self._forge.launch(
            entry=list(start.entry),
            env=common,
            ranks=[{n: v for n, v in e.items() if n not in common} for e in start.environs],
            titles=list(start.titles),
            output=str(start.spool.launcher_output),
        )
        self._look()

    def _look(self) -> None:
        self._forge.look()
        if text := self._forge.new_output():  # of the modules that it imported
            with contextlib.suppress(OSError), open(self._start.spool.launcher_output, "ab") as log:
                log.write(text)
        if self._instead is not None:
            return
        self._codes = self._forge.codes
        if self._forge.pids and self._forge.is_dead and not self._is_lost:
            self._is_lost = True
            self._say(f"forge: {self._forge.why_closed}; its ranks are killed with it")
        if self._forge.why_closed and not self._forge.pids and not self._is_revoked:
            self._say(f"{NOT_FORKED.format('as new interpreters')}: {self._forge.why_closed}")
            store = self._start.store if self._forge.is_dead else None
            self._needs_forge = self._start.store is not store
            self._instead = DirectLauncher(replace(self._start, store=store))
            self._instead.start()

    def revoke(self) -> None:
        """Start no ranks from now on, and don't wait for what the forge imports."""
        self._is_revoked = True
        if self._forge.importing:
            self._forge.close("the last attempt ended before it had imported everything")

    def result(self) -> LauncherResult | None:
        """Return how the ranks ended; None while all run."""
        self._look()
        problem = self._forge.problem_of_store if self._start.store is not None else ""
        if problem or (self._needs_forge and self._forge.is_dead):
            ended = "the ranks' store ended with the forge" if self._instead else "the forge ended"
            why = problem or f"{ended}: {self._forge.why_closed}"
            return LauncherResult(code=1, failures=[], last_line=why)
        return self._refused or (self._instead.result() if self._instead else self._ended())
