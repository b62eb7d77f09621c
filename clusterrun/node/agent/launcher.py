"""Start the ranks of this node: what is prepared for that, and three ways to do it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from clusterrun.config.choices import Launcher
from clusterrun.errors import MESSAGE_LETTERS
from clusterrun.launch.accelerate_argv import NodeLaunch, launch_argv
from clusterrun.launch.plan import LOOPBACK, Precision
from clusterrun.node.agent.environment import of_rank, portable, rank_environment
from clusterrun.node.base.causes import NodeError, NodeExit
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.ports import candidate_ports, free_port
from clusterrun.node.base.processes import held
from clusterrun.node.forge import launchers
from clusterrun.node.forge.begin import WARNINGS
from clusterrun.node.forge.handle import Forge
from clusterrun.node.forward.forward import Forwarder
from clusterrun.node.forward.spool import Spool
from clusterrun.node.link.connection import LaunchParameters
from clusterrun.shared import files
from clusterrun.shared.own_modules import WORKER_MODULE, module_argv

NOT_FORKED = "the ranks start {}, not as forks"


class LauncherResult(NamedTuple):
    """How the launcher ended: its exit status (negative: a signal) and the ranks that failed."""

    last_line: str
    code: int = 1
    failures: Sequence[dict[str, Any]] = ()
    was_started: bool = True


class NodeLauncher(ABC):
    """What starts the ranks of a node; call it from the main thread only."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._processes: list[subprocess.Popen[bytes]] = []
        self._start_failure: LauncherResult | None = None

    @property
    def pids(self) -> Sequence[int]:
        """Processes whose ends the launcher awaits."""
        return [process.pid for process in self._processes]

    @property
    def ranks(self) -> Mapping[int, int]:
        """The processes of the ranks that this one has started itself, by rank."""
        return {}

    @property
    def is_over(self) -> bool:
        """Return whether no rank of this launcher is left, or not all could be started."""
        return self._start_failure is not None

    @abstractmethod
    def start(self) -> None:
        """Start the ranks. If that fails, `result` returns why."""

    def revoke(self) -> None:
        """Start no ranks from now on."""
        return

    def result(self) -> LauncherResult | None:
        """Return how the launcher ended; None if `ranks` shows all that there is to know."""
        return self._start_failure

    def _last_line(self) -> str:
        return files.last_line(self._spool.launcher_output, MESSAGE_LETTERS)

    def _start_process(
        self, argv: Sequence[str], env: Mapping[str, str], *, blocks_warnings: bool = False
    ) -> None:
        """Start a process unless a start has failed; with WARNINGS blocked if `blocks_warnings`."""
        if self._start_failure:
            return
        blocked = WARNINGS if blocks_warnings else ()  # until the child handles them
        try:
            with held(*blocked), open(self._spool.launcher_output, "ab") as output:
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
            self._start_failure = LauncherResult(last_line=why, was_started=False)


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
        argv = _launcher_argv("accelerate", *words, *self._arguments)
        self._start_process(argv, self._env, blocks_warnings=True)

    def result(self) -> LauncherResult | None:
        """Return how the launcher ended; None while it runs."""
        if self._start_failure or not self.is_over:
            return self._start_failure
        failures: list[dict[str, Any]] = []
        with contextlib.suppress(OSError, ValueError):
            failures = list(json.loads(self._spool.failures.read_text()))
        code = self._processes[0].returncode
        return LauncherResult(code=code, failures=failures, last_line=self._last_line())


class RankLauncher(NodeLauncher):
    """Starts ranks as forks of the forge, which imports torch once; if it can't, as interpreters.

    On the first node, accelerate computed their environments, and the forge may host their store.
    """

    def __init__(
        self,
        attempt: Attempt,
        parameters: LaunchParameters,
        env: Mapping[str, str],
        spool: Spool,
        forge: Forge | None,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(spool)
        plan, who, count = attempt.plan, attempt.who, attempt.plan.procs_per_node
        self._job_id, self._entry, self._env = who.job_id, plan.entry, env
        self._numbers = range(who.node_rank * count, (who.node_rank + 1) * count)
        self._variables = [of_rank(attempt, parameters, env, spool, n) for n in range(count)]
        self._hosts_store = who.is_first and is_store_used(parameters.variables)
        self._store = (parameters.address, parameters.port, plan.nodes, plan.rendezvous_timeout_s)
        self._forge, self._say = forge, say
        self._needs_forge = forge is not None  # the attempt ends with it
        self._is_parent = False  # of the ranks, instead of the forge
        self._is_revoked = False  # no rank may start any more

    @property
    def pids(self) -> Sequence[int]:
        """The forge, and ranks that it could not fork."""
        return [*([self._forge.pid] if self._forge else []), *super().pids]

    @property
    def ranks(self) -> Mapping[int, int]:
        """The processes of the ranks; the forge reaps its forks, the agent those it has started."""
        self._follow_forge()
        pids = self._forge.pids if self._forge and not self._is_parent else super().pids
        return dict(zip(self._numbers, pids, strict=False))  # the store's pid may follow

    @property
    def is_over(self) -> bool:
        """Return whether the forge has ended, or not all ranks could be started."""
        self._follow_forge()
        return self._forge.is_dead if self._forge and not self._is_parent else super().is_over

    def start(self) -> None:
        """Start the ranks, or order them: the forge forks them when it has imported everything."""
        if self._forge is None:
            self._start_interpreters()
            return
        command = " ".join(self._entry)
        self._forge.launch(
            entry=list(self._entry),
            env=self._env,
            ranks=self._variables,
            titles=[f"{command} [job {self._job_id} rank {n}]" for n in self._numbers],
            output=str(self._spool.launcher_output),
        )
        self._follow_forge()

    def _start_interpreters(self) -> None:
        """Start an interpreter for each rank, then the store if no forge hosts it on this node."""
        self._is_parent, own = True, {"CLUSTERRUN_LAUNCHER_PID": str(os.getpid())}
        argv = module_argv(sys.executable, WORKER_MODULE, *self._entry)
        for variables in self._variables:
            self._start_process(argv, {**self._env, **variables, **own})
        if self._hosts_store and not self._needs_forge:  # a forge that is needed hosts it
            store = _launcher_argv("store", *self._store)
            self._start_process(store, os.environ, blocks_warnings=True)  # it runs until killed

    def _follow_forge(self) -> None:
        """Take the forge's answers; if it cannot fork the ranks, start interpreters instead."""
        if (forge := self._forge) is None:
            return
        forge.take_answers()
        if text := forge.new_output():  # of the modules that it imported
            with contextlib.suppress(OSError), open(self._spool.launcher_output, "ab") as log:
                log.write(text)
        were_started = bool(forge.pids) or self._is_parent
        if forge.why_closed and not were_started and not self._is_revoked:
            self._say(f"{NOT_FORKED.format('as new interpreters')}: {forge.why_closed}")
            self._needs_forge = self._hosts_store and not forge.is_dead  # now only for the store
            self._start_interpreters()

    def revoke(self) -> None:
        """Start no ranks from now on, and don't wait for what the forge imports."""
        self._is_revoked = True
        if self._forge and self._forge.importing:
            self._forge.close("the last attempt ended before the forge had imported everything")

    def result(self) -> LauncherResult | None:
        """Return why the ranks can't run on, as when their store has ended; None while they can."""
        self._follow_forge()
        forge = self._forge
        if forge and self._hosts_store and forge.problem_of_store:
            return LauncherResult(last_line=forge.problem_of_store)
        if forge and self._needs_forge and forge.is_dead:
            what = "the ranks' store" if self._is_parent else "the ranks"
            return LauncherResult(last_line=f"{what} ended with the forge: {forge.why_closed}")
        stores = self._processes[len(self._numbers) :]  # at most one, started after the ranks
        if any(store.poll() is not None for store in stores):
            return LauncherResult(last_line=self._last_line())
        return super().result()


def rendezvous_port(attempt: Attempt) -> int:
    """Return a port of this node that is free now. Raises NodeError."""
    plan, root, fixed = attempt.plan, attempt.paths.root, attempt.plan.main_process_port
    run = f"{root.parent.name}/{root.name}"  # not the whole path: it may differ between hosts
    derived = candidate_ports(f"{attempt.who.job_id}:{run}", attempt.number, plan.port_range)
    try:
        return free_port((fixed,) if fixed else derived)
    except OSError as error:
        what = f"port {fixed} is not free" if fixed else "no port is free"
        text = f"{attempt.who.node}: {what} for the rendezvous: {error}"
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
    """Have the forge host the store of the ranks, before they look for it; return its port."""
    port = rendezvous_port(attempt)
    forge.host_store((LOOPBACK, port, attempt.plan.nodes, attempt.plan.rendezvous_timeout_s))
    return port


def is_store_used(variables: Mapping[str, str]) -> bool:
    """Return whether the ranks expect that their launcher hosts the store."""
    return variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


async def launch_variables(
    attempt: Attempt, spool: Spool, forge: Forge
) -> tuple[dict[str, str], str]:
    """Return what `accelerate launch` sets, for `of_rank` to complete, or why that is unknown."""
    precision = attempt.plan.precision
    stand_in = LaunchParameters(
        address=LOOPBACK,
        port=1,  # accelerate checks that nothing listens there
        # For HEAD, any value will do: each node replaces it with the decided one (`of_rank`).
        precision=Precision.BF16.value if precision is Precision.HEAD else precision.value,
    )
    arguments = ("--log_dir", str(spool.launcher_dir), *launch_arguments(attempt, stand_in))
    env = rank_environment(os.environ, attempt, stand_in, spool.root)
    found, why = await forge.variables(env, arguments)
    return portable(found, env, attempt.paths.root, os.getcwd()), why


async def _prepare_in_forge(
    attempt: Attempt, spool: Spool, forge: Forge
) -> tuple[int, dict[str, str], str]:
    """Return the port of the store that the forge hosts, and what `launch_variables` returns.

    The port is 0 if the forge is not to host a store. Nearly all runs need one, so the forge hosts
    it before accelerate has answered.
    """
    port = host_store(attempt, forge) if attempt.plan.world_size > 1 else 0
    variables, why = await launch_variables(attempt, spool, forge)
    if variables and not is_store_used(variables):
        port = 0  # rank 0 hosts the store itself
    elif variables and not port:
        port = host_store(attempt, forge)
    return port, variables, why


async def prepare_launch(
    attempt: Attempt, spool: Spool, forge: Forge | None, journal: Forwarder
) -> tuple[int, Mapping[str, str]]:
    """Return the port where the ranks meet, and accelerate's variables; 0 and {} on other nodes.

    Without variables, each node starts `accelerate launch`. Raises NodeError if no port is free.
    """
    if not attempt.who.is_first:
        return 0, {}
    plan, port, variables = attempt.plan, 0, dict[str, str]()
    why = "the forge could not be started"
    if forge is not None:
        port, variables, why = await _prepare_in_forge(attempt, spool, forge)
        journal.event("forge", problem=why)
    if why and plan.launcher is not Launcher.ACCELERATE:
        journal.say_not_forked(f"{NOT_FORKED.format('with accelerate launch')}: {why}")
    if not variables and plan.is_smoke:  # accelerate may not start where nodes are checked
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")  # for of_rank
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
    """Return what starts this node's ranks; `say` gets why they are no forks."""
    plan = attempt.plan
    env = rank_environment(os.environ, attempt, parameters, spool.root)
    if not parameters.variables:
        if forge is not None:
            forge.close("accelerate launch starts the ranks")
        return AccelerateLauncher(launch_arguments(attempt, parameters), env, spool)
    spool.launcher_dir.mkdir(mode=0o700, exist_ok=True)  # for torch's error files
    say_why = say if plan.launcher is Launcher.FORGE else lambda _: None  # no other is to fork
    return RankLauncher(attempt, parameters, env, spool, forge, say_why)
