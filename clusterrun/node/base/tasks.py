"""What an agent does beside its main work: background tasks, and work on the shared disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

LINE_CHARS = 1000  # of the line that describes an error
_T = TypeVar("_T")


class Tasks:
    """Tasks that nothing awaits: the loop's exception handler gets their errors."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[None], None] = {}

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        return iter(tuple(self._running))  # oldest first

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


def task_error(context: Mapping[str, Any]) -> str:
    """Describe, in one line, the error that asyncio's handler of exceptions gets."""
    error = context.get("exception")
    what = f": {type(error).__name__}: {error}" if error else ""
    return f"internal error: {context['message']}{what}"[:LINE_CHARS]


async def guarded(work: Coroutine[Any, Any, _T], guard: Coroutine[Any, Any, None]) -> _T:
    """Await `work` while `guard` runs; if the guard raises first, raise its error."""
    working, guarding = asyncio.ensure_future(work), asyncio.ensure_future(guard)
    try:
        await asyncio.wait({working, guarding}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            guarding.result()  # raises its error, if any
        return await working
    finally:
        working.cancel()
        guarding.cancel()


class SharedDisk:
    """Do work on the shared disk in order, in a daemon thread: it may hang in the kernel."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="shared disk", daemon=True).start()

    def do(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """Queue work; return a future for its result."""
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()  # a caller that stops waiting cannot cancel the work
        self._queue.put((work, future))
        return asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread after the work that is queued."""
        self._queue.put(None)

    def _work(self) -> None:
        while queued := self._queue.get():
            work, future = queued
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
                future.set_exception(error)
