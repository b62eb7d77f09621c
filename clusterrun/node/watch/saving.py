"""Have all ranks save at the same step, through the control page."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from clusterrun.node.link.questions import Questions
from clusterrun.shared.control_page import ControlPage, Joining, SavePoint

SETTLE_S = 0.02  # for a rank that looked just before the hold to publish its count


class Page:
    """The control page of this node's ranks."""

    def __init__(self, page: ControlPage, ranks: int) -> None:
        self._page, self._ranks = page, range(ranks)

    @property
    def is_used(self) -> bool:
        """Return whether any rank has called should_checkpoint()."""
        return any(self._page.calls(rank) for rank in self._ranks)

    @property
    def has_left(self) -> bool:
        """Return whether a rank exits because it was asked to."""
        return any(self._page.has_stopped(rank) for rank in self._ranks)

    @property
    def is_shielded(self) -> bool:
        """Return whether all ranks ignore SIGTERM."""
        return all(self._page.is_shielded(rank) for rank in self._ranks)

    def shields(self, rank: int, signum: int) -> bool:
        """Return whether a rank (its local rank) has a handler of a signal that saves nothing."""
        return self._page.is_shielded(rank, signum)

    def joining(self) -> list[Joining]:
        """Return how far each rank is in joining its process group."""
        return [self._page.joining(rank) for rank in self._ranks]

    def calls(self) -> int:
        """Return the number of calls of all ranks, which grows with the steps."""
        return sum(self._page.calls(rank) for rank in self._ranks)

    async def hold(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Have the ranks wait, and return the highest count of calls."""
        self._page.hold(int(message["request"]))
        await asyncio.sleep(SETTLE_S)
        return {"calls": max(self._page.calls(rank) for rank in self._ranks)}

    async def decide(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Let the ranks continue to the call at which they save and exit."""
        self._page.decide(SavePoint(int(message["request"]), int(message["at"])))
        return {}


class Saving:
    """The head's part: collect all counts, choose the call, announce it."""

    def __init__(self, page: Page, questions: Questions) -> None:
        self._page, self._questions = page, questions
        self._request = 0
        self._lock = asyncio.Lock()

    async def agree(self) -> int:
        """Have all ranks save and exit at one call; return it, 0 if a node does not answer."""
        async with self._lock:
            self._request += 1
            held: dict[str, Any] = {"request": self._request}
            answers, own = await asyncio.gather(
                self._questions.ask("hold", **held), self._page.hold(held)
            )
            counts = [] if answers.silent else [own, *answers.given.values()]
            at = 1 + max(int(count["calls"]) for count in counts) if counts else 0
            decided = {**held, "at": at}
            await self._page.decide(decided)
            await self._questions.ask("decide", **decided)
            return at
