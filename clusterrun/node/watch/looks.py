"""Show, as the head, where the ranks are: `diagnose --stacks` and `--fr` request it.

A request is an empty file in the attempt's directory (rundir/looks.py); the answer is another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from clusterrun.node.base.tasks import SharedDisk, Tasks
from clusterrun.node.link.questions import Questions
from clusterrun.node.watch import stacks
from clusterrun.rundir.request import answer_path, requests
from clusterrun.shared.files import write_whole


@dataclass(kw_only=True)
class Looks:
    """Answer requests, one at a time."""

    directory: Path
    nodes: Sequence[str]
    questions: Questions
    own_places: Callable[[], Awaitable[list[stacks.RankPlace]]]
    own_dumps: Callable[[], Awaitable[list[int]]]
    disk: SharedDisk
    _seen: set[Path] = field(default_factory=set)
    _tasks: Tasks = field(default_factory=Tasks)

    async def look(self) -> None:
        """Find new requests; a listing shows them at once, also on NFS."""
        found: list[Path] = []
        with contextlib.suppress(OSError):
            found = await self.disk.do(partial(requests, self.directory))
        for path in found:
            if path not in self._seen:
                self._seen.add(path)
                self._tasks.start(self._answer(path))

    async def _answer(self, path: Path) -> None:
        own, answers, dumped = await self._ask(with_dumps=path.suffix == ".fr")
        places = [*own, *(p for given in answers.values() for p in stacks.from_data(given))]
        silent = [n for i, n in enumerate(self.nodes) if i and i not in answers]
        data = {**stacks.to_data(places), "dumped": dumped, "silent": silent}
        with contextlib.suppress(OSError):
            target = answer_path(path)
            await self.disk.do(partial(write_whole, target, json.dumps(data)))

    async def _ask(
        self, *, with_dumps: bool
    ) -> tuple[list[stacks.RankPlace], dict[int, dict[str, Any]], list[int]]:
        """Return the own places, the members' answers by node rank, and who wrote a dump."""
        own, answers = await asyncio.gather(self.own_places(), self.questions.ask("stacks"))
        given = {node: dict(message) for node, message in answers.given.items()}
        dumped: list[int] = []
        if with_dumps:
            mine, asked = await asyncio.gather(
                self.own_dumps(), self.questions.ask("dump", live=True)
            )
            found = [mine, *(message.get("dumped", ()) for message in asked.given.values())]
            dumped = sorted(rank for ranks in found for rank in ranks)
            given = {node: message for node, message in given.items() if node in asked.given}
        return own, given, dumped
