"""Keep NVML out of the forge: it starts a thread and opens the GPUs, which a fork can't share.

deepspeed asks it for GPUs when it is imported. A fork answers, and each rank starts its own.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NoReturn

from clusterrun.node.forge.fitness import fork

_started: list[Callable[[], None]] = []  # what the ranks have yet to start


@contextlib.contextmanager
def kept_out() -> Iterator[list[str]]:
    """Have a fork count the GPUs for torch, and note that NVML's Python module was started.

    Yield a list, in which each other question to that module is noted: it gets no answer.
    """
    asked: list[str] = []
    with contextlib.ExitStack() as stack:
        cuda: Any = sys.modules.get("torch.cuda")
        if hasattr(cuda, "_device_count_nvml") and cuda._is_compiled():
            count = cache(_in_fork(cuda._device_count_nvml))
            stack.enter_context(_replaced(cuda, "_device_count_nvml", count))
            if importlib.util.find_spec("pynvml"):
                module: Any = importlib.import_module("pynvml")
                start = module.nvmlInit
                stack.enter_context(_replaced(module, "nvmlInit", lambda: _started.append(start)))
                refuse = _refusing(asked, module.NVMLError)
                stack.enter_context(_replaced(module, "_nvmlGetFunctionPointer", refuse))
        yield asked


def start() -> None:
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


def _refusing(asked: list[str], error: type[Exception]) -> Callable[[str], NoReturn]:
    def refuse(name: str) -> NoReturn:
        asked.append(name)
        raise error(1)  # uninitialised

    return refuse


def _in_fork(count: Callable[[], int]) -> Callable[[], int]:
    """Return a function that asks in a child process; -1 if NVML has no answer there."""

    def ask() -> int:
        reader, writer = os.pipe()
        if (pid := fork()) == 0:
            with contextlib.suppress(BaseException):
                os.write(writer, str(count()).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            text = answer.read()
        os.waitpid(pid, 0)
        return int(text or "-1")

    return ask
