"""An agent's first act: fork the forge, which imports torch while the agent imports the rest.

Both share the start of one interpreter. The forge has what this module imports: it stays light.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from clusterrun.shared.files import unnamed_file
from clusterrun.shared.given import PIPE, before_setup, note_given
from clusterrun.shared.own_modules import WORKER_MODULE

PACKET_BYTES = 1 << 20
_NODE_RANKS = ("CLUSTERRUN_LOCAL_NODE_RANK", "CLUSTERRUN_HOSTS_NODE_RANK", "SLURM_NODEID")
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
INSTEAD = "use --set launch.launcher=accelerate"
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # node.sh ignores them until the agent handles them
_started: list[Started] = []


class Started(NamedTuple):
    """A forge that has begun: its process, the agent's end of the link, and its output."""

    pid: int
    link: socket.socket
    output: int


def begin(run_dir: str) -> Callable[[], None] | None:
    """Fork the forge of this process, if the run has one on this node; return None.

    In a rank that the forge has forked, return what the rank is to run. Note what the environment
    was `before` the setup lines of env.sh, which passes it through a pipe.
    """
    _restore_signals()
    before = before_setup(int(os.environ[PIPE])) if PIPE in os.environ else {}
    is_head = next((os.environ[name] for name in _NODE_RANKS if name in os.environ), "") == "0"
    with contextlib.suppress(Exception):  # the agent reports an unreadable plan
        launcher = json.loads(Path(run_dir, "plan.json").read_text())["launcher"]
        is_needed = launcher == "forge" or (launcher == "direct" and is_head)  # to ask accelerate
        if is_needed and (run := _fork(run_dir, before, is_head=is_head)):
            return run
    note_given(os.environ, before)
    return None


def _restore_signals() -> None:
    """Restore signals that were ignored at the start, as by nohup, but not node.sh's WARNINGS."""
    for number in signal.valid_signals() - {*_PYTHON_IGNORES, *WARNINGS}:
        if signal.getsignal(number) is signal.SIG_IGN:
            is_int = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_int else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def take_started_forge() -> Started | None:
    """Return the forge that `begin` has started, if any; later calls return None."""
    return _started.pop() if _started else None


def _fork(run_dir: str, before: Mapping[str, str], *, is_head: bool) -> Callable[[], None] | None:
    """Fork the forge; return None, and in each rank that it forks what the rank is to run."""
    # Packets arrive whole, even if the forge and its forks send some at the same time.
    agent_end, forge_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (agent_end, forge_end):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
    output, agent = unnamed_file(), os.getpid()
    is_alone = len(os.listdir("/proc/self/task")) == 1  # no other thread
    if pid := os.fork():
        forge_end.close()
        _started.append(Started(pid, agent_end, output))
        return None
    try:
        agent_end.close()
        os.setsid()
        _close_inherited(output)
        process: Any = importlib.import_module("clusterrun.node.forge.process")
        process.serve(Path(run_dir), agent, forge_end, before, is_head=is_head, is_alone=is_alone)
        worker: Any = importlib.import_module(WORKER_MODULE)
    except BaseException:  # noqa: BLE001 - the callers' handlers are meant for the agent
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    run: Callable[[], None] = worker.main
    return run


def _close_inherited(output: int) -> None:
    """Close what the shell has left open, read nothing from stdin, and print to `output`."""
    empty = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((empty, output, output)):
        os.dup2(source, target)
    os.close(empty)
    os.close(output)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) > 2 and os.get_inheritable(int(name)):  # not one that Python has opened
                os.close(int(name))


def send(end: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message. Raises OSError, also if it is too long."""
    end.send(json.dumps(message).encode())


def receive(end: socket.socket, flags: int = 0) -> dict[str, Any]:
    """Return the next message. Raises OSError or, when the other end is closed, ValueError."""
    message: dict[str, Any] = json.loads(end.recv(PACKET_BYTES, flags))
    return message
