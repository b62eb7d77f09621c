"""Use the shared file system in a thread, so that it can't stall the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

_T = TypeVar("_T")


class SharedDisk:
    """Run an agent's work on the shared file system in one thread, in order.

    It is a daemon thread: if it hangs in the kernel, the agent can still exit.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="shared disk", daemon=True).start()

    def do(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """Queue work; return a future for its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        self._queue.put(partial(_do, work, loop, future))
        return future

    def close(self) -> None:
        """End the thread after the work that is queued."""
        self._queue.put(None)

    def _work(self) -> None:
        while work := self._queue.get():
            work()


def _do(
    work: Callable[[], _T], loop: asyncio.AbstractEventLoop, future: asyncio.Future[_T]
) -> None:
    settle: Callable[[], None]
    try:
        settle = partial(future.set_result, work())
    except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
        settle = partial(future.set_exception, error)
    if not loop.is_closed():
        loop.call_soon_threadsafe(_settle, future, settle)


def _settle(future: asyncio.Future[_T], settle: Callable[[], None]) -> None:
    if not future.done():
        settle()
