"""What is known of the steps and checkpoints of some attempts: by their events, and on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from clusterrun.rundir.events import EventType, read
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import checkpoint_files
from clusterrun.shared.checkpoint_files import IncompleteError

MARKERS = 8  # of a run that keeps hundreds, each lists all files of all ranks


@dataclass(kw_only=True)
class Told:
    """By attempt: the first and the last step, and the steps that were saved.

    They are read once: a run of a month has told of millions of steps.
    """

    began: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    saved: dict[int, set[int]] = field(default_factory=dict)

    @classmethod
    def by(cls, paths: RunPaths, heads: Iterable[str], attempts: range) -> Told:
        """Read what the nodes of rank 0 have written, and the checkpoints that are there.

        An agent that is killed right after a save has not told of it; that is among the newest.
        """
        told = cls()
        for attempt, step in islice(_marked(paths.checkpoints_dir), MARKERS):
            if attempt in attempts:
                told._take(attempt, EventType.CHECKPOINT, step)
        for node in sorted(set(heads)):
            for event in read(paths.events(node), (EventType.STEP, EventType.CHECKPOINT)):
                if event.attempt in attempts and event.step is not None:
                    told._take(event.attempt, event.type, event.step)
        return told

    def _take(self, attempt: int, kind: EventType, step: int) -> None:
        if kind is EventType.STEP:
            self.began[attempt] = min(step, self.began.get(attempt, step))
            self.ended[attempt] = max(step, self.ended.get(attempt, step))
        elif kind is EventType.CHECKPOINT:
            self.saved.setdefault(attempt, set()).add(step)

    def newest(self, attempt: int) -> int | None:
        """Return the newest step that had been saved when an attempt ended."""
        until = (steps for number, steps in self.saved.items() if number <= attempt)
        return max((step for steps in until for step in steps), default=None)

    def own(self, attempt: int) -> int | None:
        """Return the newest step that an attempt saved itself."""
        return max(self.saved.get(attempt, ()), default=None)

    @property
    def savers(self) -> frozenset[int]:
        """The attempts that saved what they had trained, not only what they began with."""
        return frozenset(
            attempt
            for attempt, steps in self.saved.items()
            if max(steps) > self.began.get(attempt, max(steps))
        )


def _marked(directory: Path) -> Iterator[tuple[int, int]]:
    """List attempt and step of the checkpoints whose markers can be read, newest first."""
    with contextlib.suppress(OSError):
        for _, path in checkpoint_files.listed(directory):
            with contextlib.suppress(IncompleteError):
                found, _ = checkpoint_files.read_marker(path)
                yield found.attempt, found.step
