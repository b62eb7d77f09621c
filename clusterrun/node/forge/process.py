"""The forge's process: it imports, then follows orders.

Each order and each answer is one packet of JSON (docs/contracts.md). A fork leaves `serve` to
become a rank.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from clusterrun.node.base.cpus import allocated_cpus, openmp
from clusterrun.node.base.processes import die_with_parent
from clusterrun.node.forge import environment, preload, ranks, store
from clusterrun.node.forge.packets import receive, send
from clusterrun.node.forge.preload import Closed, fork
from clusterrun.node.forge.script import RankStart, ScriptSource, read_early
from clusterrun.node.forge.script_imports import AUTO, installed_imports
from clusterrun.shared.descriptors import raise_descriptor_limit
from clusterrun.shared.own_modules import WORKER_MODULE

KILL_S = 5.0
IDLE_S = 10.0  # after which it imports, for the next attempt, what each rank imports itself
_UNKNOWN, _ALIKE, _CHANGED = range(3)  # whether a script has set what an import had missed


class ForgeProcess:
    """What was imported, and the processes that were forked."""

    def __init__(self, link: socket.socket, plan: Mapping[str, Any], *, is_alone: bool) -> None:
        self._link, self._plan, self._is_alone = link, plan, is_alone
        self._handlers = ranks.Handlers()
        self._before = dict(os.environ)
        self._modules = set(sys.modules)
        self._children: dict[int, int] = {}  # by pid: the local rank
        self._helpers: list[int] = []
        self._watched: dict[int, int] = {}  # by pidfd: the pid
        self._waiting: list[dict[str, Any]] = []
        self._why_closed = "its modules are not imported"
        self._listed = _listed(plan)
        self._preloaded = (*preload.by_ranks(plan["strategy"]), *self._listed)
        self._late_at = 0.0
        self._page = mmap.mmap(-1, 1)  # shared with the ranks

    def _tell(self, event: str, **fields: Any) -> None:
        """Send an answer; if the agent is gone, exit."""
        try:
            send(self._link, {"event": event, **fields})
        except OSError:
            os._exit(1)

    def _orders(self) -> list[dict[str, Any]]:
        try:
            return [receive(self._link)]
        except (OSError, ValueError):
            os._exit(0)  # the agent has closed the socket

    def load(self, *, is_head: bool) -> None:
        """Import everything, and report whether forks can become ranks.

        The head's agent asks for the variables first, which a bad module must not prevent.
        """
        gc.disable()  # all of it stays
        early = read_early(ScriptSource(self._plan["entry"]).variables(), self._preloaded)
        why = f"the script may set {', '.join(early)} before it imports what reads it"
        try:
            if early and not is_head:
                raise Closed(why)
            preload.preload(preload.libraries(self._plan["strategy"]), self._importing)
            self._tell("imported")
            self._obey_early(None if is_head else 0)
            if self._plan["launcher"] == "direct":
                raise Closed("launch.launcher is direct")
            if not self._is_alone:
                raise Closed("Python starts threads before any import, as by sitecustomize")
            if early:
                raise Closed(why)
            preload.preload(preload.by_ranks(self._plan["strategy"]), self._importing)
            self._await_helpers()
            preload.preload(self._listed, self._importing)
        except Closed as error:
            self._close(str(error))
        except Exception as error:  # noqa: BLE001 - the ranks can always start another way
            self._close(f"{type(error).__name__}: {error}")
        else:
            self._why_closed = ""
            self._tell("open")
        _worker().freeze()

    def _importing(self, name: str) -> None:
        self._tell("importing", module=name)

    def _close(self, why: str) -> None:
        self._why_closed = why
        self._tell("closed", why=why)

    def _obey_early(self, waits_s: float | None) -> None:
        """Begin with orders that need no more modules: their forks work meanwhile."""
        while select.select([self._link], [], [], waits_s)[0]:
            waits_s = 0
            for order in self._orders():
                if order["order"] == "variables":
                    self._find_variables(order)
                else:
                    self._waiting.append(order)

    def _await_helpers(self) -> None:
        """Let the variables be found first: a module of the user may end this process, and them."""
        for pid in self._helpers if self._listed else []:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def serve(self) -> None:
        """Follow orders; return in each rank."""
        while True:
            for order in self._waiting:
                if self._obey(order):
                    return
            poll = select.poll()
            for descriptor in (self._link.fileno(), *self._watched):
                poll.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in poll.poll(self._patience_ms())]
            if not ready:
                self._import_late()
            for descriptor in self._watched.keys() & ready:
                self._ended(descriptor)
            self._waiting = self._orders() if self._link.fileno() in ready else []

    def _patience_ms(self) -> float | None:
        return max(0.0, self._late_at - time.monotonic()) * 1000 if self._late_at else None

    def _import_late(self) -> None:
        """Import what torch imports when an optimizer is made, which takes a second."""
        self._late_at = 0.0
        if self._page[0] == _UNKNOWN:
            self._late_at = time.monotonic() + IDLE_S
        if self._page[0] != _ALIKE:
            return
        try:
            preload.preload(preload.late(), lambda _: None)
        except Closed as error:
            self._close(str(error))
        _worker().freeze()

    def _obey(self, order: dict[str, Any]) -> bool:
        """Follow an order; return whether this is now a rank."""
        kind = order["order"]
        if kind == "variables":
            self._find_variables(order)
        elif kind == "store":
            self._host_store(order)
        elif kind == "launch":
            return self._launch(order)
        elif kind == "end":
            self._end()
        return False

    # The environment and the store: forks that never become ranks

    def _find_variables(self, order: Mapping[str, Any]) -> None:
        given = order["env"]

        def find() -> NoReturn:
            os.environ.update(given)
            environment.capture(order["arguments"], given, answer)

        def answer(found: list[environment.Variables]) -> NoReturn:
            self._tell("variables", common=environment.common(found))
            os._exit(0)

        self._help(find, "variables")

    def _host_store(self, order: Mapping[str, Any]) -> None:
        def host() -> NoReturn:
            address, port, nodes, timeout_s = order["place"]
            store.host(address, port, nodes, timeout_s, lambda: self._tell("store"))

        self._help(host, "store")

    def _help(self, work: Callable[[], NoReturn], name: str) -> None:
        """Run `work` in a fork that dies with the forge, and report if it fails."""
        parent, pid = os.getpid(), fork()
        if pid:
            self._helpers.append(pid)
            return
        try:
            die_with_parent(parent)
            work()
        except BaseException as error:  # noqa: BLE001 - also SystemExit of an argument parser
            self._tell(name, problem=f"{type(error).__name__}: {error}")
        finally:
            os._exit(1)

    # The ranks

    def _launch(self, order: dict[str, Any]) -> bool:
        """Fork the ranks; return whether this is one of them."""
        try:
            self._check(order)
        except Closed as error:
            self._close(str(error))
        if self._why_closed:
            return False
        self._page[0] = _UNKNOWN
        imported = set(sys.modules) - self._modules
        for local, environ in enumerate(order["ranks"]):
            with self._handlers.held():
                pid = fork()
                if pid == 0:
                    self._become(order, environ, order["titles"][local])
                    self._compare_when_joined(imported)
                    self._handlers.restore()
            if pid == 0:
                return True
            self._children[pid] = local
            self._watch(pid)
        self._tell("started", pids=list(self._children))
        self._late_at = time.monotonic() + IDLE_S
        return False

    def _check(self, order: dict[str, Any]) -> None:
        if self._why_closed:
            return
        for environ in order["ranks"]:
            environ.update({n: v for n, v in order["env"].items() if n not in environ})
            ranks.check_environment(self._before, environ)
        added = ranks.added_path(self._before, order["ranks"][0])
        ranks.check_modules(order["entry"], added, set(sys.modules) - self._modules)

    def _become(self, order: Mapping[str, Any], environ: Mapping[str, str], title: str) -> None:
        self._link.close()
        for descriptor in self._watched:
            os.close(descriptor)
        ranks.become(order["entry"], environ, self._before, order["output"], title)

    def _compare_when_joined(self, imported: Collection[str]) -> None:
        """Have the rank look, once it has made its imports, whether they would have differed."""
        start = RankStart(self._preloaded, imported)

        def compare() -> None:
            missed = start.missed()
            self._page[0] = max(self._page[0], _CHANGED if missed else _ALIKE)
            if missed and os.environ.get("RANK", "0") == "0":
                sys.stderr.write(f"clusterrun: {missed}; use --launcher direct\n")

        _worker().when_joined.append(compare)

    def _watch(self, pid: int) -> None:
        with contextlib.suppress(OSError):  # Linux before 5.3: the agent polls
            self._watched[os.pidfd_open(pid)] = pid

    def _ended(self, descriptor: int) -> None:
        """Report how a rank ended; it is reaped at the end, so that the agent can also look."""
        pid = self._watched.pop(descriptor)
        os.close(descriptor)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            self._tell("exited", local_rank=self._children[pid], code=code)

    def _end(self) -> None:
        """Kill and reap all that was forked, and report what can't be killed."""
        for descriptor in self._watched:
            os.close(descriptor)
        left = {*self._children, *self._helpers}
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # a zombie at worst: nobody else reaps them
        deadline = time.monotonic() + KILL_S
        while left and time.monotonic() < deadline:
            left = {pid for pid in left if not os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.001 if left else 0)
        self._children, self._helpers, self._watched = {}, [], {}
        self._tell("ended", left=sorted(left))


def serve(run_dir: Path, agent: int, link: socket.socket, *, is_head: bool, is_alone: bool) -> None:
    """Be the forge of one node; return in each rank that it forks.

    `is_alone`: the agent that has forked this process had no other thread.
    """
    die_with_parent(agent)
    raise_descriptor_limit()
    plan = json.loads((run_dir / "plan.json").read_text())
    _set_threads(plan)
    ranks.set_first_title(f"clusterrun: forge of {run_dir}")
    _worker().leave_last()
    forge = ForgeProcess(link, plan, is_alone=is_alone)
    forge.load(is_head=is_head)
    forge.serve()


def _listed(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modules of `launch.preload`, with those of the script in place of `auto`."""
    entry, listed = plan["entry"], plan["preload"]
    each = (installed_imports(entry) if name == AUTO else [name] for name in listed)
    return tuple(chain.from_iterable(each))


def _worker() -> Any:
    return importlib.import_module(WORKER_MODULE)


def _set_threads(plan: Mapping[str, Any]) -> None:
    """Set what `rank_environment` sets: libraries read it when they are imported."""
    names = [variable["name"] for variable in plan["env"]]
    nodes = plan["nodes"] if "CLUSTERRUN_LOCAL_NODE_RANK" in os.environ else 1
    cpus = allocated_cpus(os.environ)
    ranks_per_node = plan["procs_per_node"]
    os.environ.update(openmp(names, cpus, ranks=ranks_per_node, simulated_nodes=nodes))
