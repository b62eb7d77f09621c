"""Import what the ranks will need before they are forked, and check that forks can become ranks.

Such a process has one thread, no open device, and no library that does not survive a fork. NVML
starts a thread and opens the GPUs, and deepspeed asks it for GPUs when it is imported: a fork
answers, and each rank starts its own.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from typing import Any, NoReturn

from clusterrun.node.base.processes import fork_answer

TRIAL_S = 5.0
NVML_S = 60.0  # for a driver that must be loaded first
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
INSTEAD = "use --set launch.launcher=accelerate"
_started: list[Callable[[], None]] = []  # what the ranks have yet to start


class Closed(Exception):
    """A fork of this process can't become a rank: why, and what the user can do."""

    def __init__(self, why: str, hint: str = INSTEAD) -> None:
        super().__init__(f"{why}; hint: {hint}")


def check(name: str) -> None:
    """Raise Closed if the import of `name` has made this process unfit."""
    if device := open_device():
        raise Closed(f"{name} opens {device}")
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        raise Closed(f"{name} initialises CUDA")
    if threads() > 1:  # OpenBLAS ends its threads before a fork, and starts new ones on demand
        if fork_answer(lambda: "alive", TRIAL_S) is None:  # this also runs the libraries' handlers
            raise Closed("a fork of the imported libraries hangs")
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


def of_ranks(strategy: str, imported: Collection[str]) -> tuple[str, ...]:
    """Return what each rank imports in any case, if it is installed.

    accelerate does so for a strategy, a script that imports deepspeed for DeepSpeed's own loop:
    `imported` is what the project imports.
    """
    names = ["deepspeed"] if "deepspeed" in imported else []
    if strategy.startswith("zero"):
        names += ["setuptools", "transformers.integrations.deepspeed"]
    return tuple(name for name in names if importlib.util.find_spec(name.partition(".")[0]))


def between_attempts() -> tuple[str, ...]:
    """Return what torch imports only when an optimizer is made: a start need not wait for it."""
    name = "torch._dynamo"
    return (name,) if name not in sys.modules and importlib.util.find_spec(name) else ()


def preload(names: Iterable[str], tell: Callable[[str], None]) -> None:
    """Import modules one by one, and check the process after each. Raises Closed."""
    for name in names:
        tell(name)
        _preload(name)


def _preload(name: str) -> None:
    try:
        with nvml_kept_out() as asked:
            importlib.import_module(name)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
        raise Closed(f"cannot import {name}: {text}") from error
    if asked:
        raise Closed(f"{name} asks NVML about the GPUs")
    check(name)


@contextlib.contextmanager
def nvml_kept_out() -> Iterator[list[str]]:
    """Have a fork count the GPUs for torch, and note that NVML's Python module was started.

    Yield a list, in which each other question to that module is noted: it gets no answer.
    """
    asked: list[str] = []
    with contextlib.ExitStack() as stack:
        cuda: Any = sys.modules.get("torch.cuda")
        if hasattr(cuda, "_device_count_nvml") and cuda._is_compiled():
            ask = cuda._device_count_nvml
            count = cache(lambda: int(fork_answer(lambda: str(ask()), NVML_S) or "-1"))
            stack.enter_context(_replaced(cuda, "_device_count_nvml", count))
            if importlib.util.find_spec("pynvml"):
                module: Any = importlib.import_module("pynvml")
                start = module.nvmlInit
                stack.enter_context(_replaced(module, "nvmlInit", lambda: _started.append(start)))

                def refuse(name: str) -> NoReturn:
                    asked.append(name)
                    raise module.NVMLError(1)  # uninitialised

                stack.enter_context(_replaced(module, "_nvmlGetFunctionPointer", refuse))
        yield asked


def start_nvml() -> None:
    """Start NVML in a rank, if a library has at its import."""
    for start_once in _started:
        with contextlib.suppress(Exception):  # NVML's own error, if the node has no driver
            start_once()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
