"""Let the agent ask this rank for its flight recorder, even while the main thread hangs.

A thread sleeps in a read of a pipe, and costs nothing. It starts when the rank has joined a
process group: before, nothing is recorded. It cannot answer while the main thread holds the GIL.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from clusterrun.rank.emit import own_rank

_started: list[int] = []  # the pid


def listen() -> None:
    """Start the thread, once."""
    spool = os.environ.get("CLUSTERRUN_SPOOL")
    if not spool or _started == [os.getpid()]:
        return
    _started[:] = [os.getpid()]
    with contextlib.suppress(OSError, RuntimeError):  # a rank trains without it
        ours = os.path.join(spool, f"rank_{own_rank()}.ask")
        with contextlib.suppress(FileExistsError):
            os.mkfifo(ours, 0o600)
        pipe = os.open(ours, os.O_RDWR | os.O_CLOEXEC)
        # Not a threading.Thread: the script may wait for all of these, or count them.
        _thread.start_new_thread(_answer, (pipe, spool, own_rank()))


def _answer(pipe: int, spool: str, rank: int) -> None:
    while os.read(pipe, 64):
        with contextlib.suppress(Exception):
            write_dumps(spool, rank)


def write_dumps(spool: str, rank: int) -> None:
    """Write what torch's recorders have: NCCL's, and the one of the other backends."""
    nccl, other = _dump("_dump_nccl_trace"), _dump("_dump_fr_trace")
    if nccl and other:
        _write(spool, f"flight_cpu_rank_{rank}", other)
    _write(spool, f"flight_rank_{rank}", nccl or other or b"")  # last: the agent waits for it


def _dump(name: str) -> bytes | None:
    bindings: Any = sys.modules.get("torch._C._distributed_c10d")
    dump: Callable[[], bytes] | None = getattr(bindings, name, None)
    with contextlib.suppress(Exception):
        if dump is not None:
            with _without_inductor(sys.modules.get("torch")):
                return dump()
    return None


@contextlib.contextmanager
def _without_inductor(torch: Any) -> Iterator[None]:
    """Keep torch from importing its compiler (800 modules) to name the frames of compiled code.

    Without the compiler there is none. torch 2.13 looks for `torch._inductor.codecache`.
    """
    if torch is None or "torch._inductor" in sys.modules:
        yield
        return
    placeholder = ModuleType("torch._inductor")
    torch._inductor = placeholder
    try:
        yield
    finally:
        if torch.__dict__.get("_inductor") is placeholder:
            del torch._inductor


def _write(spool: str, name: str, data: bytes) -> None:
    temporary = os.path.join(spool, f".{name}")
    with open(temporary, "wb") as file:
        file.write(data)
    os.rename(temporary, os.path.join(spool, name))
