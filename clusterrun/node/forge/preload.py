"""Import what the ranks will need, and check that a fork of this process can become a rank."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from clusterrun.node.forge import nvml

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
    """A fork of this process can't become a rank; the message tells why."""


def libraries(strategy: str) -> tuple[str, ...]:
    """Return what the launchers and the ranks of a strategy import in any case."""
    found = ["torch", "torch.distributed", "accelerate"]
    return (*found, *(["deepspeed"] * strategy.startswith("zero")))


def by_ranks(strategy: str) -> tuple[str, ...]:
    """Return what accelerate has each rank import for a strategy, if it is installed."""
    names = (
        ["setuptools", "transformers.integrations.deepspeed"] if strategy.startswith("zero") else []
    )
    return tuple(name for name in names if importlib.util.find_spec(name.partition(".")[0]))


def late() -> tuple[str, ...]:
    """Return what torch imports only when an optimizer is made: a start need not wait for it."""
    name = "torch._dynamo"
    return (name,) if name not in sys.modules and importlib.util.find_spec(name) else ()


def preload(names: Iterable[str], tell: Callable[[str], None]) -> None:
    """Import modules one by one, and check the process after each. Raises Closed."""
    for name in names:
        tell(name)
        before = set(sys.modules)
        try:
            with nvml.kept_out():
                _import(name)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
            raise Closed(f"cannot import {name}: {text}") from error
        _check(name, sys.modules.keys() - before)


def _import(name: str) -> None:
    """Import a module, or what a package loads only when it is asked for its name."""
    package, _, last = name.rpartition(".")
    if not package or not hasattr(importlib.import_module(package), last):
        importlib.import_module(name)


def _check(name: str, imported: Collection[str]) -> None:
    for module, why in UNFIT.items():
        if module in imported:
            raise Closed(f"{why} ({name} imports it)" if module != name else why)
    if device := open_device():
        raise Closed(f"{name} opens {device}")
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        raise Closed(f"{name} initialises CUDA")
    if threads() > 1:  # OpenBLAS ends its threads before a fork, and starts new ones on demand
        trial_fork()
        if threads() > 1:
            raise Closed(f"{name} starts threads, which a fork lacks")


def threads() -> int:
    """Return the number of threads of this process."""
    return len(os.listdir("/proc/self/task"))


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


def trial_fork() -> None:
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


def shadowing(directories: Iterable[str], imported: Collection[str]) -> list[str]:
    """Return the modules of these directories that would be imported instead of preloaded ones."""
    roots = {name.partition(".")[0] for name in imported}
    found: set[str] = set()
    for directory in directories:
        with contextlib.suppress(OSError):
            found |= roots & {_module(entry) for entry in os.scandir(directory)}
    return sorted(found)


def _module(entry: os.DirEntry[str]) -> str:
    """Return the name of the module or package that an entry of a directory may be."""
    name, _, rest = entry.name.partition(".")
    if not rest:  # without this file, Python prefers a module of a later directory
        return name if os.path.exists(os.path.join(entry.path, "__init__.py")) else ""
    return name if rest == "py" or rest.endswith("so") else ""


def first_on_path(entry: Sequence[str]) -> list[str]:
    """Return the directory in which Python looks first for what a script imports."""
    if getattr(sys.flags, "safe_path", False):
        return []
    if entry[0] == "-m":
        return [os.getcwd()]
    script = os.path.realpath(entry[0])
    return [script if os.path.isdir(script) else os.path.dirname(script)]
