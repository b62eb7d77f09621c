"""Background tasks of an agent."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")


class Tasks:
    """Tasks that run until they end or are cancelled.

    The loop's handler gets an exception immediately, since no code awaits the task.
    """

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[None], None] = {}

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        return iter(tuple(self._running))  # oldest first

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task and keep it until it ends."""
        task = asyncio.ensure_future(work)
        self._running[task] = None
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel all running tasks."""
        for task in self:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            name = getattr(task.get_coro(), "__qualname__", "a task")
            context = {"message": f"{name} failed", "exception": error}
            task.get_loop().call_exception_handler(context)


async def guarded(work: Coroutine[Any, Any, _T], guard: Coroutine[Any, Any, None]) -> _T:
    """Await `work` while `guard` runs; raise what the guard raises."""
    working, guarding = asyncio.ensure_future(work), asyncio.ensure_future(guard)
    try:
        await asyncio.wait({working, guarding}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            guarding.result()
        return await working
    finally:
        working.cancel()
        guarding.cancel()
