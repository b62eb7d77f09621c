"""What an agent does beside its main work: a task that fails is noticed, a disk may stall."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from clusterrun.node.base.tasks import SharedDisk, Tasks, guarded
from tests.patience import patience


async def fail(after_s: float = 0.0) -> None:
    await asyncio.sleep(after_s)
    raise ValueError("it broke")


async def test_a_task_that_fails_is_noticed_and_others_run_on() -> None:
    found: list[tuple[str, str]] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: found.append((context["message"], str(context["exception"])))
    )
    tasks = Tasks()
    tasks.start(fail())
    lasting = tasks.start(asyncio.sleep(60))
    await asyncio.sleep(0.05)
    assert list(tasks) == [lasting]
    tasks.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(tasks) == 0
    assert found == [("fail failed", "it broke")]


async def test_what_a_guard_raises_ends_the_waiting() -> None:
    with pytest.raises(ValueError, match="it broke"):
        await guarded(asyncio.sleep(60), fail())
    assert await guarded(asyncio.sleep(0.01, "done"), fail(60)) == "done"


async def test_work_on_the_shared_disk_is_done_in_order_while_the_loop_runs() -> None:
    done: list[int] = []

    may_end = threading.Event()

    def slow(number: int) -> int:
        may_end.wait(60 * patience())
        done.append(number)
        return number

    disk = SharedDisk()
    futures = [disk.do(lambda number=number: slow(number)) for number in range(3)]
    await asyncio.sleep(0.05)
    assert done == []
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(futures[0], 0.01)
    may_end.set()
    assert await asyncio.gather(*futures[1:]) == [1, 2]
    assert done == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        await disk.do(lambda: 1 // 0)
    assert await disk.do(lambda: 5) == 5


def test_a_disk_that_hangs_keeps_nobody_from_leaving() -> None:
    async def story() -> Any:
        return SharedDisk().do(threading.Event().wait)

    since = time.monotonic()
    asyncio.run(story())
    assert time.monotonic() - since < 5 * patience()
