"""Have all ranks save at the same step, through the control page."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from clusterrun.node.link.questions import Questions
from clusterrun.shared.control_page import ControlPage, SavePoint

SETTLE_S = 0.02  # for a rank that looked just before the hold to publish its count


async def hold(page: ControlPage, message: Mapping[str, Any]) -> dict[str, Any]:
    """Have the ranks of this node wait, and return the highest count of calls."""
    page.hold(int(message["request"]))
    await asyncio.sleep(SETTLE_S)
    return {"calls": max(map(page.calls, page.ranks))}


def decide(page: ControlPage, message: Mapping[str, Any]) -> dict[str, Any]:
    """Let the ranks of this node continue to the call at which they save and exit."""
    page.decide(SavePoint(int(message["request"]), int(message["at"])))
    return {}


class Saving:
    """The head's part: collect all counts, choose the call, announce it."""

    def __init__(self, page: ControlPage, questions: Questions) -> None:
        self._page, self._questions = page, questions
        self._request = 0
        self._lock = asyncio.Lock()

    async def agree(self) -> int:
        """Have all ranks save and exit at one call; return it, 0 if a node does not answer."""
        async with self._lock:
            self._request += 1
            held: dict[str, Any] = {"request": self._request}
            answers, own = await asyncio.gather(
                self._questions.ask("hold", **held), hold(self._page, held)
            )
            counts = [] if answers.silent else [own, *answers.given.values()]
            at = 1 + max(int(count["calls"]) for count in counts) if counts else 0
            decided = {**held, "at": at}
            decide(self._page, decided)
            await self._questions.ask("decide", **decided)
            return at
