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
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from clusterrun.node.base.processes import die_with_parent, fork, held, openmp_threads
from clusterrun.node.forge import launchers, ranks
from clusterrun.node.forge.begin import receive, send
from clusterrun.node.forge.project import Changes, ProjectFiles, RankStart, read_early
from clusterrun.node.forge.ranks import Closed
from clusterrun.shared.files import raise_descriptor_limit
from clusterrun.shared.given import note_given
from clusterrun.shared.own_modules import WORKER_MODULE

KILL_S = 5.0
IDLE_S = 10.0  # after which it imports, for the next attempt, what each rank imports itself
SHOWN = 3  # variables in a message


class ForgeProcess:
    """What was imported, and the processes that were forked."""

    def __init__(self, link: socket.socket, plan: Mapping[str, Any], *, is_alone: bool) -> None:
        self._link, self._plan, self._is_alone = link, plan, is_alone
        self._handlers = ranks.Handlers()
        self._first_environ = dict(os.environ)
        self._first_modules = set(sys.modules)
        self._children: list[int] = []  # reaped at the end: the agent looks, too
        self._why_closed = "its modules are not imported"  # "" once it is open
        self._project = ProjectFiles(plan["entry"])
        self._changes = Changes(self._project)
        self._may_import_late = mmap.mmap(-1, 1)  # a flag that rank 0 of this node sets

    def _tell(self, event: str, **fields: Any) -> None:
        """Send an answer; if the agent is gone, exit."""
        try:
            send(self._link, {"event": event, **fields})
        except OSError:
            os._exit(1)

    def _order(self) -> dict[str, Any]:
        try:
            return receive(self._link)
        except (OSError, ValueError):
            os._exit(0)  # the agent has closed the socket

    def load(self, *, is_head: bool) -> None:
        """Import everything, and report whether forks can become ranks."""
        gc.disable()  # all that is imported stays
        strategy = self._plan["strategy"]
        of_ranks = ranks.deepspeed_imports(strategy, self._project.imported)
        try:
            if not is_head:  # fail before any import; the head needs the libraries to answer
                self._check_variables(of_ranks)
            libraries = ["torch", "torch.distributed", "accelerate"]
            if strategy.startswith("zero"):
                libraries.append("deepspeed")
            ranks.preload(libraries, self._importing)
            self._tell("imported")
            if is_head:  # answer now: a module that is imported below may fail
                self._obey_up_to("variables")
            if self._plan["launcher"] == "direct":
                raise Closed("launch.launcher is direct")
            if not self._is_alone:
                why = "Python starts threads before any import"
                raise Closed(why, "remove them from sitecustomize or a .pth file")
            self._check_variables((*of_ranks, *sys.modules))
            ranks.preload(of_ranks, self._importing)
        except Exception as error:  # noqa: BLE001 - the ranks can always start another way
            self._close(error)
        else:
            self._why_closed = ""
            self._tell("open")
        gc.freeze()

    def _importing(self, name: str) -> None:
        self._tell("importing", module=name)

    def _close(self, error: Exception) -> None:
        why = error if isinstance(error, Closed) else Closed(f"{type(error).__name__}: {error}")
        self._why_closed = str(why)
        self._tell("closed", why=str(why))

    def _obey_up_to(self, last: str) -> None:
        while (order := self._order())["order"] != last:
            self._obey(order)
        self._obey(order)

    def _check_variables(self, modules: Iterable[str]) -> None:
        """Raise Closed if the script may set a variable that these modules read at their import."""
        if place := self._changes.place:
            hint = "pass the variables with --env NAME=VALUE, and remove this line"
            raise Closed(f"{place} may set any variable, including one that an import reads", hint)
        if names := read_early(self._changes.names, modules):
            shown = ", ".join(names[:SHOWN])
            hint = f"pass it with --env {names[0]}=VALUE, and remove it from the script"
            raise Closed(f"the script may set {shown} before an import that reads it", hint)

    def serve(self) -> None:
        """Follow orders; return in each rank."""
        while not self._follow():
            continue

    def _follow(self) -> bool:
        """Follow the next order, or import while none comes; return whether this is now a rank."""
        if select.select([self._link], [], [], IDLE_S)[0]:
            return self._obey(self._order())
        if self._may_import_late[0]:
            self._import_late()
        return False

    def _import_late(self) -> None:
        """Import what ranks import when they begin to train, which takes a second or more."""
        self._may_import_late[0] = 0
        try:
            late = ranks.late_imports(self._project, self._changes.names)
            ranks.preload(late, lambda _: None)
        except Exception as error:  # noqa: BLE001 - its ranks must live, and the next can start anew
            self._close(error)
        gc.freeze()

    def _obey(self, order: dict[str, Any]) -> bool:
        """Follow an order; return whether this is now a rank."""
        match order["order"]:
            case "variables":
                self._find_variables(order)
            case "store":
                address, port, nodes, timeout_s = order["place"]
                report_open = partial(self._tell, "store")
                host = partial(launchers.host_store, address, port, nodes, timeout_s, report_open)
                self._run_in_fork(host, "store")
            case "launch":
                return self._launch(order)
            case "end":
                self._kill_all()
                self._tell("ended")
        return False

    # The environment and the store: forks that never become ranks

    def _find_variables(self, order: Mapping[str, Any]) -> None:
        """Answer, from a fork, what `accelerate launch` adds to the ranks' environment."""
        env = order["env"]

        def find() -> NoReturn:
            os.environ.update(env)
            launchers.capture(order["arguments"], env, answer)

        def answer(found: list[dict[str, str]]) -> NoReturn:
            self._tell("variables", common=launchers.common(found))
            os._exit(0)

        self._run_in_fork(find, "variables")

    def _run_in_fork(self, work: Callable[[], NoReturn], event: str) -> None:
        """Run `work` in a fork that dies with the forge; `event` reports it if it fails."""
        parent, pid = os.getpid(), fork()
        if pid:
            self._children.append(pid)
            return
        try:
            die_with_parent(parent)
            work()
        except BaseException as error:  # noqa: BLE001 - also SystemExit of an argument parser
            self._tell(event, problem=f"{type(error).__name__}: {error}")
        finally:
            os._exit(1)

    # The ranks

    def _launch(self, order: dict[str, Any]) -> bool:
        """Fork the ranks; return whether this is one of them."""
        if self._why_closed:
            return False
        self._may_import_late[0] = 0
        try:
            for environ in order["ranks"]:
                environ.update({**order["env"], **environ})
                ranks.check_environment(self._first_environ, environ)
            added = ranks.added_path(self._first_environ, order["ranks"][0])
            ranks.check_modules(self._project, added, set(sys.modules) - self._first_modules)
            pids = self._fork_ranks(order)
        except Closed as error:
            self._close(error)
            return False
        if pids:
            self._tell("started", pids=pids)
        return not pids

    def _fork_ranks(self, order: Mapping[str, Any]) -> list[int]:
        """Fork all ranks; return their pids, or in a rank []. Raises Closed before any begins."""
        imported, launcher = set(sys.modules) - self._first_modules, os.getpid()
        gate, problem, pids = os.pipe(), "", list[int]()  # each rank waits for a byte in the pipe
        for local, environ in enumerate(order["ranks"]):
            with held(*ranks.LEFT_TO_AGENT):  # they wait until the rank has its own handlers
                try:
                    pid = fork()
                except OSError as error:
                    problem = f"the forge cannot fork: {error.strerror}"
                    break
                if pid == 0:
                    _wait_for_all(*gate)
                    self._link.close()
                    what = (order["entry"], environ, self._first_environ, order["output"])
                    ranks.become(*what, order["titles"][local], launcher)
                    if local == 0:
                        self._check_when_joined(imported)
                    self._handlers.restore()
                    return []
            pids.append(pid)
        self._children += pids
        if not problem:
            os.write(gate[1], bytes(len(pids)))  # without a byte, each rank exits
        for end in gate:
            os.close(end)
        if problem:
            raise Closed(problem, "raise the limit on processes (ulimit -u)")
        return pids

    def _check_when_joined(self, imported: Collection[str]) -> None:
        """Have this rank check, when it joins its world, what its script has changed too late."""
        start = RankStart(imported)

        def check() -> None:
            with contextlib.suppress(Exception):  # it must not end a training
                missed = start.missed()
                # What came in time for the imports so far may be too late for one of datasets.
                is_changed = missed or start.changed() or start.has_own(["datasets"])
                self._may_import_late[0] = 0 if is_changed else 1  # for the next attempt
                if missed and os.environ.get("RANK") == "0":
                    sys.stderr.write(f"clusterrun: {missed}; use --set launch.launcher=direct\n")

        importlib.import_module(WORKER_MODULE).when_joined.append(check)

    def _kill_all(self) -> None:
        """Kill and reap all that was forked, unless it can't be killed."""
        left = set(self._children)
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # a zombie at worst: nobody else reaps them
        deadline = time.monotonic() + KILL_S
        while left and time.monotonic() < deadline:
            left = {pid for pid in left if not os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.001 if left else 0)
        self._children = []


def serve(
    run_dir: Path,
    agent: int,
    link: socket.socket,
    before: Mapping[str, str],  # the environment before the setup lines
    *,
    is_head: bool,
    is_alone: bool,  # the agent that has forked this process had no other thread
) -> None:
    """Be the forge of one node; return in each rank that it forks."""
    die_with_parent(agent)
    raise_descriptor_limit()
    plan = json.loads((run_dir / "plan.json").read_text())
    ranks.set_first_title(f"clusterrun: forge of {run_dir}")  # finds no title in a changed environ
    note_given(os.environ, before)
    # What `rank_environment` sets: libraries read it when they are imported.
    names = [variable["name"] for variable in plan["env"]]
    os.environ.update(openmp_threads(names, ranks=plan["procs_per_node"], nodes=plan["nodes"]))
    importlib.import_module(WORKER_MODULE).leave_last()  # registered first, it runs last
    forge = ForgeProcess(link, plan, is_alone=is_alone)
    forge.load(is_head=is_head)
    forge.serve()


def _wait_for_all(gate: int, opener: int) -> None:
    """Wait, in a rank, until all ranks have been forked; exit if one could not be."""
    os.close(opener)
    if not os.read(gate, 1):
        os._exit(1)
    os.close(gate)
