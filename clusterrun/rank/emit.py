"""Report what happens in this rank: to the agent with files in the spool, to people on stderr.

The losses that a script reports are watched: whether they change, and whether the last is a number.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import json
import math
import operator
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from clusterrun.errors import shortened
from clusterrun.shared.files import write_whole
from clusterrun.shared.given import OWN_RANK

LOSSES = ("loss", "train_loss")


def rank() -> int:
    """Return the global rank from the environment; 0 if there is none."""
    return _first_number("RANK", OWN_RANK)


def own_rank() -> int:
    """Return this process's rank in the job, or that of the rank that started it."""
    return _first_number(OWN_RANK, "RANK")


def _first_number(*names: str) -> int:
    found = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdigit()), 0)


def spool_file(kind: str) -> str:
    """Return this rank's file of a kind in the spool, for the agent; "" outside a run."""
    spool = os.environ.get("CLUSTERRUN_SPOOL")
    return os.path.join(spool, f"rank_{own_rank()}.{kind}") if spool else ""


def emit(kind: str, /, **fields: Any) -> None:
    """Append one event, a line of JSON, to the rank's file in the spool, if there is a spool.

    Fields may replace `ts`, but not `type` or `rank`. The middle of a long text is dropped.
    """
    if not (path := spool_file("events")):
        return
    about = {"type": kind, "rank": own_rank()}
    with contextlib.suppress(Exception):  # a full disk or an odd value must not end a training
        texts = {name: shortened(text) for name, text in fields.items() if isinstance(text, str)}
        event = {"ts": round(time.time(), 6), **about, **fields, **texts, **about}
        line = json.dumps(event, default=str).encode() + b"\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def say(line: str) -> None:
    """Print a line on the rank's stderr."""
    print(f"clusterrun: {line}", file=sys.stderr, flush=True)  # noqa: T201 - the rank's stderr


@functools.cache
def say_once(line: str) -> None:
    """Print a line like `say`, but only the first time."""
    say(line)


def number(value: Any) -> Any:
    """Convert tensors and NumPy scalars to numbers, NaN to None, other objects to type names."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    with contextlib.suppress(Exception):
        return operator.index(value)
    with contextlib.suppress(Exception):  # a value of a user's class may raise anything
        number = float(value)
        return number if math.isfinite(number) else None  # JSON has no inf or nan
    return str(type(value).__name__)


class LossWatch:
    """Counts new losses. A number that is reported again, since no newer one is known, is not new.

    Numbers are read at each report, tensors only when a report is written: reading one may wait for
    a GPU.
    """

    def __init__(self) -> None:
        self.count = 0
        self._newest: Any = None
        self._first = self._last = math.nan
        self._is_constant = True

    def see(self, metrics: Mapping[str, Any]) -> None:
        """Take the loss of a report if it is a number."""
        loss = _loss(metrics)
        if isinstance(loss, float) and loss is not self._newest:  # the same object is no new loss
            self._newest = loss
            self._take(loss)

    def see_written(self, metrics: Mapping[str, Any]) -> None:
        """Take the loss of a report that is written, if `see` did not."""
        if (loss := _loss(metrics)) is None or isinstance(loss, int | float | str):
            return
        with contextlib.suppress(Exception):  # a value of a user's class may raise anything
            self._take(float(loss))

    def _take(self, loss: float) -> None:
        self.count += 1
        self._first = loss if self.count == 1 else self._first
        self._is_constant &= loss == self._first
        self._last = loss

    def summary(self) -> dict[str, Any]:
        """Return the fields of the event `losses`."""
        is_finite = math.isfinite(self._last)
        return {
            "count": self.count,
            "last": self._last if is_finite else None,
            "is_constant": self._is_constant,
            "is_finite": is_finite,
        }


def _loss(metrics: Mapping[str, Any]) -> Any:
    return next((metrics[name] for name in LOSSES if name in metrics), None)


# The flight recorder, also while the main thread hangs

_started: list[int] = []  # the pid of the process that has started the thread: not of its forks


def answer_asks() -> None:
    """Start a thread that dumps the flight recorder when the agent asks for it; once per process.

    It sleeps in a read of a pipe, and costs nothing. It cannot answer while the main thread holds
    the GIL. Start it when the rank has joined a process group: before, nothing is recorded.
    """
    if not (fifo := spool_file("ask")) or _started == [os.getpid()]:
        return
    _started[:] = [os.getpid()]
    with contextlib.suppress(OSError, RuntimeError):  # a rank trains without it
        with contextlib.suppress(FileExistsError):
            os.mkfifo(fifo, 0o600)
        pipe = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)
        # Not a threading.Thread: the script may wait for all of these, or count them.
        _thread.start_new_thread(_answer, (pipe, os.path.dirname(fifo), own_rank()))


def _answer(pipe: int, spool: str, rank: int) -> None:
    while os.read(pipe, 64):
        with contextlib.suppress(Exception):
            write_dumps(spool, rank)


def write_dumps(spool: str, rank: int) -> None:
    """Write what torch's recorders have: NCCL's, and the one of the other backends."""
    nccl, other = _dump("_dump_nccl_trace"), _dump("_dump_fr_trace")
    if nccl and other:
        write_whole(Path(spool, f"flight_cpu_rank_{rank}"), other)
    # Write this file last: the agent waits for it.
    write_whole(Path(spool, f"flight_rank_{rank}"), nccl or other or b"")


def _dump(name: str) -> bytes | None:
    """Return the dump of one of torch's recorders; None if torch lacks it, or if it fails."""
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

    If it is not imported, no code is compiled. torch 2.13 looks for `torch._inductor.codecache`.
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
