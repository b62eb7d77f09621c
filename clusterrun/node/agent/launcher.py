"""Start the ranks of this node: what is prepared for that, and three ways to do it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clusterrun.config.choices import Launcher
from clusterrun.errors import MESSAGE_LETTERS
from clusterrun.launch.accelerate_argv import NodeLaunch, launch_argv
from clusterrun.launch.plan import LOOPBACK, Precision
from clusterrun.node.agent.environment import of_rank, portable, rank_environment
from clusterrun.node.agent.journal import Journal
from clusterrun.node.base.causes import NodeError, NodeExit
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.ports import candidate_ports, free_port
from clusterrun.node.base.report import LaunchParameters
from clusterrun.node.forge import launchers
from clusterrun.node.forge.begin import WARNINGS
from clusterrun.node.forge.handle import Forge
from clusterrun.node.forward.spool import Spool
from clusterrun.shared import files
from clusterrun.shared.own_modules import WORKER_MODULE, module_argv

NOT_FORKED = "the ranks start {}, not as forks"


@dataclass(frozen=True, kw_only=True)
class LauncherResult:
    """How the launcher ended: its exit status (negative: a signal) and the ranks that failed."""

    code: int = 1
    failures: Sequence[dict[str, Any]] = ()
    last_line: str
    was_started: bool = True


@dataclass(frozen=True, kw_only=True)
class Start:
    """What the ranks of a node are started with; `store` is set on the first node alone.

    `ranks` has the variables of each, besides those of `env`.
    """

    entry: Sequence[str]
    env: Mapping[str, str]
    ranks: Sequence[Mapping[str, str]]
    titles: Sequence[str]
    first_rank: int
    spool: Spool
    store: tuple[str, int, int, int] | None

    def by_rank(self, pids: Sequence[int]) -> dict[int, int]:
        """Return the processes of the ranks by rank; `pids` begins with them."""
        return dict(enumerate(pids[: len(self.ranks)], self.first_rank))


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
    def ranks(self) -> Mapping[int, int]:
        """The processes of the ranks that this one has started itself, by rank."""
        return {}

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Return whether no rank of this launcher is left, or not all could be started."""

    @abstractmethod
    def start(self) -> None:
        """Start the ranks. If that fails, `result` returns why."""

    def revoke(self) -> None:
        """Start no ranks from now on."""
        return

    @abstractmethod
    def result(self) -> LauncherResult | None:
        """Return how the launcher ended; None if `ranks` shows all that there is to know."""

    def _last_line(self) -> str:
        return files.last_line(self._spool.launcher_output, MESSAGE_LETTERS)

    def _run(self, argv: Sequence[str], env: Mapping[str, str], *, is_deaf: bool = False) -> None:
        """Start a process, unless one before was refused.

        One that `is_deaf` has the warnings blocked until it handles them.
        """
        if self._refused:
            return
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
            self._processes.append(process)
        except OSError as error:
            why = error.strerror or str(error)
            self._refused = LauncherResult(last_line=why, was_started=False)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)


def _launcher_argv(*words: object) -> tuple[str, ...]:
    return module_argv(sys.executable, launchers.__name__, *map(str, (os.getpid(), *words)))


class AccelerateLauncher(NodeLauncher):
    """`accelerate launch`, in a child process that dies with this one and ends after its ranks."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], spool: Spool) -> None:
        super().__init__(spool)
        self._arguments, self._env = arguments, env

    @property
    def is_over(self) -> bool:
        """Return whether the launcher has ended."""
        return not self._processes or self._processes[0].poll() is not None

    def start(self) -> None:
        """Start the launcher; torch's error files are removed with the spool."""
        words = (str(self._spool.failures), "--log_dir", str(self._spool.launcher_dir))
        self._run(_launcher_argv("accelerate", *words, *self._arguments), self._env, is_deaf=True)

    def result(self) -> LauncherResult | None:
        """Return how the launcher ended; None while it runs."""
        if self._refused or not self.is_over:
            return self._refused
        failures: list[dict[str, Any]] = []
        with contextlib.suppress(OSError, ValueError):
            failures = list(json.loads(self._spool.failures.read_text()))
        code = self._processes[0].returncode
        return LauncherResult(code=code, failures=failures, last_line=self._last_line())


class DirectLauncher(NodeLauncher):
    """Fresh interpreters with the environments that accelerate has computed on the first node."""

    def __init__(self, start: Start) -> None:
        super().__init__(start.spool)
        self._start = start

    @property
    def ranks(self) -> Mapping[int, int]:
        """The processes of the ranks; the agent reaps them after the attempt."""
        return self._start.by_rank([process.pid for process in self._processes])

    @property
    def is_over(self) -> bool:
        """Return whether not all ranks could be started."""
        return self._refused is not None

    def start(self) -> None:
        """Start the ranks, and the store if this node has it."""
        start, own = self._start, {"CLUSTERRUN_LAUNCHER_PID": str(os.getpid())}
        argv = module_argv(sys.executable, WORKER_MODULE, *start.entry)
        for variables in start.ranks:
            self._run(argv, {**start.env, **variables, **own})
        if start.store is not None:
            store = _launcher_argv("store", *start.store)
            self._run(store, os.environ, is_deaf=True)  # until it is killed

    def result(self) -> LauncherResult | None:
        """Return why the ranks cannot run; else None."""
        for store in self._processes[len(self._start.ranks) :]:
            if store.poll() is not None:
                return LauncherResult(last_line=self._last_line())
        return self._refused


class ForgeLauncher(DirectLauncher):
    """Forks of this node's forge; fresh interpreters if it can't fork ranks, and a line why."""

    def __init__(self, start: Start, forge: Forge, say: Callable[[str], None]) -> None:
        super().__init__(start)
        self._forge, self._say, self._has_store = forge, say, start.store is not None
        self._needs_forge, self._are_fresh, self._is_revoked = True, False, False

    @property
    def pids(self) -> Sequence[int]:
        """The forge, and ranks that it could not fork."""
        return [self._forge.pid, *super().pids]

    @property
    def ranks(self) -> Mapping[int, int]:
        """The processes of the ranks."""
        self._look()
        return super().ranks if self._are_fresh else self._start.by_rank(self._forge.pids)

    @property
    def is_over(self) -> bool:
        """Return whether the forge has ended, or not all ranks could be started."""
        self._look()
        return super().is_over if self._are_fresh else self._forge.is_dead

    def start(self) -> None:
        """Order the ranks. The forge forks them when it has imported everything."""
        start = self._start
        self._forge.launch(
            entry=list(start.entry),
            env=start.env,
            ranks=list(start.ranks),
            titles=list(start.titles),
            output=str(start.spool.launcher_output),
        )
        self._look()

    def _look(self) -> None:
        forge = self._forge
        forge.look()
        if text := forge.new_output():  # of the modules that it imported
            with contextlib.suppress(OSError), open(self._spool.launcher_output, "ab") as log:
                log.write(text)
        if forge.why_closed and not (forge.pids or self._are_fresh or self._is_revoked):
            self._are_fresh = True
            self._say(f"{NOT_FORKED.format('as new interpreters')}: {forge.why_closed}")
            self._needs_forge = self._has_store and not forge.is_dead
            if self._needs_forge:
                self._start = replace(self._start, store=None)
            super().start()

    def revoke(self) -> None:
        """Start no ranks from now on, and don't wait for what the forge imports."""
        self._is_revoked = True
        if self._forge.importing:
            self._forge.close("the last attempt ended before it had imported everything")

    def result(self) -> LauncherResult | None:
        """Return why the ranks cannot run; else None."""
        self._look()
        why = self._forge.problem_of_store if self._has_store else ""
        if not why and self._needs_forge and self._forge.is_dead:
            what = "the ranks' store ended with the forge" if self._are_fresh else "the forge ended"
            why = f"{what}: {self._forge.why_closed}"
        return LauncherResult(last_line=why) if why else super().result()


def rendezvous_port(attempt: Attempt) -> int:
    """Return a port of this node that is free now. Raises NodeError."""
    plan, root = attempt.plan, attempt.paths.root  # hosts may have it in different places
    job, fixed = f"{attempt.who.job_id}:{root.parent.name}/{root.name}", plan.main_process_port
    tried = candidate_ports(job, attempt.number, plan.port_range).rendezvous
    try:
        return free_port((fixed,) if fixed else tried)
    except OSError as error:
        where = f"{attempt.who.node}: port {fixed}" if fixed else attempt.who.node
        text = f"{where}: no port is free for the rendezvous: {error}"
        raise NodeError(NodeExit.RENDEZVOUS_FAILED, text) from error


def launch_arguments(attempt: Attempt, parameters: LaunchParameters) -> tuple[str, ...]:
    """Return the arguments of `accelerate launch` on this node."""
    plan, paths = attempt.plan, attempt.paths
    where = NodeLaunch(
        config_file=str(paths.accelerate),
        deepspeed_file=str(paths.deepspeed) if plan.deepspeed else "",
        machine_rank=attempt.who.node_rank,
        address=parameters.address,
        port=parameters.port,
        precision=parameters.precision,
    )
    return launch_argv(plan, where, python=sys.executable)


def host_store(attempt: Attempt, forge: Forge) -> int:
    """Have the forge host the ranks' store before they are started; return its port.

    Ranks that find no store try again half a second later.
    """
    port = rendezvous_port(attempt)
    forge.host_store((LOOPBACK, port, attempt.plan.nodes, attempt.plan.rendezvous_timeout_s))
    return port


def is_store_used(variables: Mapping[str, str]) -> bool:
    """Return whether the ranks expect that their launcher hosts the store."""
    return variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


async def launch_variables(
    attempt: Attempt, spool: Spool, forge: Forge
) -> tuple[dict[str, str], str]:
    """Return what `accelerate launch` adds on the first node, or why that is unknown.

    It is asked before the nodes have met; `of_rank` replaces what depends on that.
    """
    precision = attempt.plan.precision
    asked = LaunchParameters(
        address=LOOPBACK,
        port=1,  # accelerate checks that nothing listens there
        interface="",
        precision=Precision.BF16.value if precision is Precision.HEAD else precision.value,
    )
    kept = ("--log_dir", str(spool.launcher_dir))
    words = (*kept, *launch_arguments(attempt, asked))
    env = rank_environment(os.environ, attempt, asked, spool.root)
    found, why = await forge.variables(env, words)
    return portable(found, env, attempt.paths.root, os.getcwd()), why


async def prepare_launch(
    attempt: Attempt, spool: Spool, forge: Forge | None, journal: Journal
) -> tuple[int, Mapping[str, str]]:
    """Return, on the first node only, where the ranks meet, and variables: those of accelerate.

    If these are known, the ranks' store is already there. Raises NodeError if no port is free.
    """
    plan, port, variables = attempt.plan, 0, dict[str, str]()
    if not attempt.who.is_first:
        return port, variables
    why = "no process could be forked for that"
    if forge is not None:
        if plan.world_size > 1:
            port = host_store(attempt, forge)
        variables, why = await launch_variables(attempt, spool, forge)
        if variables and is_store_used(variables) != bool(port):
            port = 0 if port else host_store(attempt, forge)
        journal.event("forge", problem=why)
    if why and plan.launcher is not Launcher.ACCELERATE:
        journal.say_not_forked(f"{NOT_FORKED.format('by accelerate launch')}: {why}")
    if not variables and plan.is_smoke:  # accelerate may not start where nodes are checked
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
        sizes = {"WORLD_SIZE": plan.world_size, "LOCAL_WORLD_SIZE": plan.procs_per_node}
        variables = {**dict.fromkeys(names, ""), **{n: str(size) for n, size in sizes.items()}}
    return port or rendezvous_port(attempt), variables


def launcher_of(
    attempt: Attempt,
    parameters: LaunchParameters,
    spool: Spool,
    forge: Forge | None,
    say: Callable[[str], None],
) -> NodeLauncher:
    """Return what starts this node's ranks."""
    plan, who = attempt.plan, attempt.who
    env = rank_environment(os.environ, attempt, parameters, spool.root)
    if not parameters.variables:
        if forge is not None:
            forge.close("accelerate launch starts the ranks")
        return AccelerateLauncher(launch_arguments(attempt, parameters), env, spool)
    spool.launcher_dir.mkdir(mode=0o700, exist_ok=True)  # for torch's error files
    command, count = " ".join(plan.entry), plan.procs_per_node
    first = who.node_rank * count
    is_host = who.is_first and is_store_used(parameters.variables)
    host = (parameters.address, parameters.port, plan.nodes, plan.rendezvous_timeout_s)
    start = Start(
        entry=plan.entry,
        env=env,
        ranks=[of_rank(attempt, parameters, env, spool, n) for n in range(count)],
        titles=[f"{command} [job {who.job_id} rank {first + n}]" for n in range(count)],
        first_rank=first,
        spool=spool,
        store=host if is_host else None,
    )
    if forge is None:
        return DirectLauncher(start)
    is_asked = plan.launcher is Launcher.FORGE
    return ForgeLauncher(start, forge, say if is_asked else lambda _: None)
