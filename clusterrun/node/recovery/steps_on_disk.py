"""The steps and checkpoints of some attempts, from their events and from the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from clusterrun.rundir.events import EventType, read
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.world import read_world
from clusterrun.shared import checkpoint_files
from clusterrun.shared.checkpoint_files import ANY, IncompleteError

MARKERS = 8  # a run may keep hundreds, and each lists all files of all ranks


@dataclass(kw_only=True)
class StepRecord:
    """By attempt: the first and the last step, and the steps that were saved.

    Read this once: a run of a month has millions of steps.
    """

    began: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    saved: dict[int, set[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, paths: RunPaths, attempts: range) -> StepRecord:
        """Read the events of rank 0's nodes, and the newest checkpoints on disk.

        An agent that is killed right after a save has not written its event.
        """
        record = cls()
        for attempt, step in islice(_marked(paths.checkpoints_dir), MARKERS):
            if attempt in attempts:
                record._take(attempt, EventType.CHECKPOINT, step)
        for node in {nodes[0] for n in attempts if (nodes := read_world(paths, n))}:
            for event in read(paths.events(node), (EventType.STEP, EventType.CHECKPOINT)):
                if event.attempt in attempts and event.step is not None:
                    record._take(event.attempt, event.type, event.step)
        return record

    def _take(self, attempt: int, kind: EventType, step: int) -> None:
        if kind is EventType.STEP:
            self.began[attempt] = min(step, self.began.get(attempt, step))
            self.ended[attempt] = max(step, self.ended.get(attempt, step))
        elif kind is EventType.CHECKPOINT:
            self.saved.setdefault(attempt, set()).add(step)

    def newest(self, attempt: int) -> int | None:
        """Return the newest step that had been saved when an attempt ended."""
        until = (max(steps) for number, steps in self.saved.items() if number <= attempt)
        return max(until, default=None)

    @property
    def anew(self) -> frozenset[int]:
        """The attempts that did not continue where the one before had ended."""
        before = ((n, self.ended.get(n - 1, 0)) for n in self.began)
        return frozenset(n for n, step in before if 2 * self.began[n] < step)

    @property
    def savers(self) -> frozenset[int]:
        """The attempts that saved a step after their first."""
        return frozenset(
            attempt
            for attempt, steps in self.saved.items()
            if max(steps) > self.began.get(attempt, max(steps))
        )


def _marked(directory: Path) -> Iterator[tuple[int, int]]:
    """Yield attempt and step of the checkpoints with readable markers, newest first."""
    with contextlib.suppress(OSError):
        for _, path in checkpoint_files.listed(directory, ANY):
            with contextlib.suppress(IncompleteError):
                found, _ = checkpoint_files.read_marker(path)
                yield found.attempt, found.step
