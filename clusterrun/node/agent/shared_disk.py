"""Use the shared file system beside the event loop, which must not wait when the former stalls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

_T = TypeVar("_T")


class SharedDisk:
    """One thread that does an agent's work on the shared file system, in the order of asking.

    It is a daemon: a thread that hangs in the kernel must not keep the agent from leaving.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._work, name="shared disk", daemon=True).start()

    def do(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """Have work done after all that was asked for before; return its future result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        self._queue.put(partial(_do, work, loop, future))
        return future

    def _work(self) -> None:
        while True:
            self._queue.get()()


def _do(
    work: Callable[[], _T], loop: asyncio.AbstractEventLoop, future: asyncio.Future[_T]
) -> None:
    settle: Callable[[], None]
    try:
        settle = partial(_settle, future, future.set_result, work())
    except BaseException as error:  # noqa: BLE001 - it is raised again where the result is awaited
        settle = partial(_settle, future, future.set_exception, error)
    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)


def _settle(future: asyncio.Future[_T], settle: Callable[[Any], None], value: object) -> None:
    if not future.done():
        settle(value)
