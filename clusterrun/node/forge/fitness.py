"""Whether a fork of this process can become a rank: one thread, no device, no unfit library."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Collection
from typing import Any

TRIAL_S = 5.0
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
# Each starts threads or keeps connections that a fork does not have.
UNFIT = {
    "grpc": "grpc does not survive a fork",
    "jax": "jax starts threads that a fork lacks",
    "mpi4py.MPI": "MPI must not be initialised before a fork",
    "pyspark": "pyspark keeps a connection to its own process",
    "ray": "ray starts threads that a fork lacks",
    "tensorflow": "tensorflow starts threads that a fork lacks",
    "torch_xla": "torch_xla opens its device when it is imported",
}


class Closed(Exception):
    """A fork of this process can't become a rank; the message tells why.

    `hint` is what the user can do; empty if it depends on the module that was imported.
    """

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.hint = hint


def check(name: str, imported: Collection[str]) -> None:
    """Raise Closed if the import of `name`, which has imported these modules, made it unfit."""
    for module, why in UNFIT.items():
        if module in imported:
            raise Closed(f"{why} ({name} imports it)" if module != name else why)
    if device := open_device():
        raise Closed(f"{name} opens {device}")
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        raise Closed(f"{name} initialises CUDA")
    if threads() > 1:  # OpenBLAS ends its threads before a fork, and starts new ones on demand
        _trial_fork()
        if threads() > 1:
            raise Closed(f"{name} starts threads, which a fork lacks")


def threads() -> int:
    """Return the number of threads of this process, without jemalloc's: it expects forks."""
    return sum(_name(task) != "jemalloc_bg_thd" for task in os.listdir("/proc/self/task"))


def _name(task: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
        return file.read().strip()
    return ""


def open_device() -> str:
    """Return a device of an accelerator that this process has open; empty if none."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith(DEVICES):
                return target
    return ""


def fork() -> int:
    """Fork; Python 3.12 warns if there is any other thread, also for a trial."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _trial_fork() -> None:
    """Fork a process that exits at once, so that handlers of libraries run. Raises Closed."""
    pid = fork()
    if pid == 0:
        os._exit(0)
    deadline = time.monotonic() + TRIAL_S
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.001)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise Closed("a fork of the imported libraries hangs")
