"""Find a training that hangs, and the rank that the others wait for: the head's task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from clusterrun.node.agent.tasks import Tasks
from clusterrun.node.forward.spool import Spool
from clusterrun.node.link.questions import Questions
from clusterrun.node.recovery.causes import Cause, Failure, NodeExit
from clusterrun.node.watch import stacks
from clusterrun.node.watch.progress import Progress
from clusterrun.node.watch.saving import Page
from clusterrun.shared.files import size_of
from clusterrun.shared.wording import count

AGAIN_S = 5.0  # between two looks at where the ranks are
LEAVERS_LOOK_S = 10.0  # between two looks at ranks that outlive others


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
        own_signs: Callable[[], int],
        failed: Callable[[Failure], None],
    ) -> None:
        self._floor_s, self._progress = floor_s, Progress(floor_s=floor_s)
        self._node, self._spool, self._page = node, spool, page
        self._questions, self._own_places, self._failed = questions, own_places, failed
        self._own_signs = own_signs
        self._reported = 0
        self._said = 0
        self._is_through = self._is_leaving = self._is_reported = False
        self._tasks = Tasks()

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
        is_off = self._is_through or self._is_leaving or self._is_reported
        if is_off or len(self._tasks):
            return
        printed = sum(size_of(output.path) for output in self._spool.outputs())
        self._progress.look(now, steps=self._steps(), printed=printed + self._said)
        stalled_s = self._progress.stalled_s
        if stalled_s:
            self._tasks.start(self._report(stalled_s))

    def leaving(self) -> None:
        """Look no more at steps once ranks have ended well, but at whether the others follow."""
        if not self._is_leaving and self._floor_s:
            self._is_leaving = True
            self._tasks.start(self._watch_leavers())

    async def _watch_leavers(self) -> None:
        """Ranks that are left may save or compute for long; one that is stuck does nothing."""
        is_stuck = False
        while not is_stuck:
            progress = Progress(floor_s=self._floor_s)
            while not progress.stalled_s:
                progress.look(time.monotonic(), steps=1, printed=await self._signs())
                await asyncio.sleep(min(LEAVERS_LOOK_S, self._floor_s / 4))
            found, unheard, is_moving = await self._look_twice()
            is_stuck = not is_moving
        text = f"other ranks have ended, nothing has moved for {progress.stalled_s:.0f} s"
        self._fail(text, found, unheard)

    async def _signs(self) -> int:
        """Count what the ranks that are left have read, written and asked."""
        answers = await self._questions.ask("signs")
        given = (message.get("signs") for message in answers.given.values())
        return self._own_signs() + sum(signs for signs in given if isinstance(signs, int))

    def _steps(self) -> int:
        return self._page.calls() + self._reported

    async def _places(self) -> tuple[list[stacks.Place], int]:
        """Ask all ranks where they are; count the nodes that do not answer."""
        own, answers = await asyncio.gather(self._own_places(), self._questions.ask("stacks"))
        found = own + [p for given in answers.given.values() for p in stacks.from_data(given)]
        return found, len(answers.silent)

    async def _look_twice(self) -> tuple[list[stacks.Place], int, bool]:
        before, _ = await self._places()
        await asyncio.sleep(AGAIN_S)
        found, unheard = await self._places()
        return found, unheard, stacks.is_moving(before, found)

    async def _report(self, stalled_s: float) -> None:
        """Say where the ranks are, unless one gets on: a long evaluation is no hang."""
        steps = self._steps()
        text = f"no step ended for {stalled_s:.0f} s"
        try:
            found, unheard, is_moving = await self._look_twice()
        except Exception as error:
            self._fail(f"{text}; where the ranks are cannot be found: {error}", [], 0)
            raise
        has_gone_on = self._steps() > steps  # to look takes its time
        if not has_gone_on and not (is_moving and self._progress.extend()):
            self._fail(text, found, unheard)

    def _fail(self, text: str, found: list[stacks.Place], unheard: int) -> None:
        self._is_reported = True
        suspect = stacks.suspect(found)
        if self._is_leaving and found:
            suspect = suspect or found[0]
        where = f": {stacks.sentence(found)}" if found else ""
        silent = f"; {count(unheard, 'node')} did not answer" if unheard else ""
        self._failed(
            Failure(
                at=time.time(),
                node=suspect.node if suspect else self._node,
                rank=suspect.rank if suspect else None,
                code=int(NodeExit.HUNG),
                signal=0,
                cause=Cause.HALTED if suspect and suspect.is_halted else Cause.HUNG,
                message=f"{text}{where}{silent}",
                where=suspect.where.partition(" ")[0] if suspect else "",
            )
        )
