"""Show where the ranks are: `diagnose --stacks` requests it.

A request is an empty file in the attempt's directory (rundir/looks.py); the answer is another.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

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
    disk: SharedDisk
    _seen: set[Path] = field(default_factory=set)
    _tasks: Tasks = field(default_factory=Tasks)

    def close(self) -> None:
        """Stop what still runs for an attempt that has ended."""
        self._tasks.cancel()

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
        places, answers = await stacks.everywhere(self.questions)
        heard, dumped = {*answers.given}, list[int]()
        if path.suffix == ".fr":
            dumps = await self.questions.ask("dump", live=True)
            given = (message.get("dumped", ()) for message in dumps.given.values())
            heard, dumped = heard & {*dumps.given}, sorted(chain(*given))
        silent = [name for number, name in enumerate(self.nodes) if number not in heard]
        data = {**stacks.to_data(places), "dumped": dumped, "silent": silent}
        with contextlib.suppress(OSError):
            target = answer_path(path)
            await self.disk.do(partial(write_whole, target, json.dumps(data)))
