"""Find a training that hangs, and the rank that the others wait for: the head's task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from clusterrun.node import stacks
from clusterrun.node.endings import Cause, Failure, NodeExit
from clusterrun.node.progress import Progress
from clusterrun.node.questions import Questions
from clusterrun.node.saving import Page
from clusterrun.node.spool import Spool
from clusterrun.wording import count

AGAIN_S = 5.0  # between two looks at where the ranks are


class HangWatch:
    """Look at the ranks of the head's node: in a hang of any rank, they wait for it."""

    def __init__(
        self,
        *,
        floor_s: float,
        node: str,
        spool: Spool,
        page: Page,
        questions: Questions,
        own_places: Callable[[], Awaitable[list[stacks.Place]]],
        failed: Callable[[Failure], None],
    ) -> None:
        self._progress = Progress(floor_s=floor_s)
        self._node, self._spool, self._page = node, spool, page
        self._questions, self._own_places, self._failed = questions, own_places, failed
        self._reported = 0
        self._said = 0
        self._is_through = False
        self._task: asyncio.Task[None] | None = None

    def heard(self, event: Mapping[str, Any]) -> None:
        """Take note of what a rank says; who knows how long it takes after the last step?"""
        if event.get("type") == "step":
            self._reported += 1
            self._is_through = event.get("step") == event.get("total")
        else:
            self._said += 1

    def look(self) -> None:
        """See whether it is too long since anything moved; report it once."""
        now = time.monotonic()
        if self._task is not None or self._is_through:
            return
        printed = sum(_size(output.path) for output in self._spool.outputs())
        self._progress.look(now, steps=self._steps(), printed=printed + self._said)
        stalled_s = self._progress.stalled_s
        if stalled_s:
            self._task = asyncio.ensure_future(self._report(stalled_s))

    def _steps(self) -> int:
        return self._page.calls() + self._reported

    async def _places(self) -> tuple[list[stacks.Place], int]:
        """Ask all ranks where they are; count the nodes that do not answer."""
        own, answers = await asyncio.gather(self._own_places(), self._questions.ask("stacks"))
        found = own + [p for given in answers.given.values() for p in stacks.from_data(given)]
        return found, len(answers.silent)

    async def _report(self, stalled_s: float) -> None:
        """Say where the ranks are, unless one gets on: a long evaluation is no hang."""
        steps = self._steps()
        before, _ = await self._places()
        await asyncio.sleep(AGAIN_S)
        found, unheard = await self._places()
        has_gone_on = self._steps() > steps  # to look takes its time
        if has_gone_on or (stacks.is_moving(before, found) and self._progress.extend()):
            self._task = None
            return
        suspect = stacks.suspect(found)
        silent = f"; {count(unheard, 'node')} did not answer" if unheard else ""
        text = f"no step ended for {stalled_s:.0f} s: {stacks.sentence(found)}{silent}"
        self._failed(
            Failure(
                at=time.time(),
                node=suspect.node if suspect else self._node,
                rank=suspect.rank if suspect else None,
                code=int(NodeExit.HUNG),
                signal=0,
                cause=Cause.HALTED if suspect and suspect.is_halted else Cause.HUNG,
                message=text,
                where=suspect.where.partition(" ")[0] if suspect else "",
            )
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
