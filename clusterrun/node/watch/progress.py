"""Measure how long the ranks of this node have made no progress."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

STEPS_MEASURED = 50
PATIENCE = 10  # times a usual step
EXTENSIONS = 3  # of the limit, for ranks that work without a step, such as an evaluation
LOOK_MOST_S = 10.0  # a longer time between looks means that the whole job was suspended


@dataclass(kw_only=True)
class Progress:
    """Watch a count that grows with the steps, and the bytes that ranks print.

    `floor_s` is the least time without either that counts as a hang; 0 switches this off. Time
    while the scheduler suspends the job does not count.
    """

    floor_s: float
    _steps: int = 0
    _printed: int = 0
    _looked_at: float | None = None
    _watched_s: float = 0.0
    _moved_at: float = 0.0
    _step_at: float = 0.0
    _extensions: int = 0
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_MEASURED))

    def look(self, now: float, *, steps: int, printed: int) -> None:
        """Record how far the ranks are; `now` in seconds of a monotonic clock."""
        if self._looked_at is not None:
            self._watched_s += min(now - self._looked_at, LOOK_MOST_S)
        self._looked_at = now
        if steps > self._steps:
            if self._steps:
                self._durations.append((self._watched_s - self._step_at) / (steps - self._steps))
            self._steps, self._step_at = steps, self._watched_s
            self._moved_at = self._watched_s
            self._extensions = 0
        if printed != self._printed:
            self._printed, self._moved_at = printed, self._watched_s

    def extend(self, is_saving: bool) -> bool:
        """Wait for the limit once more; return False after too many times without a save."""
        self._extensions += not is_saving
        self._moved_at = self._watched_s
        return is_saving or self._extensions <= EXTENSIONS

    @property
    def limit_s(self) -> float:
        """The time without progress that counts as a hang."""
        found = sorted(self._durations)
        return max(self.floor_s, PATIENCE * (found[len(found) // 2] if found else 0.0))

    @property
    def stalled_s(self) -> float:
        """The time without progress at the last look if it is above the limit, else 0.

        Before the first step only torch's own timeouts apply: a start may take any time.
        """
        if not self.floor_s or not self._steps:
            return 0.0
        idle_s = self._watched_s - self._moved_at
        return idle_s if idle_s > self.limit_s else 0.0
