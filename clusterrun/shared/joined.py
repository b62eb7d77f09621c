"""Ranks that run, and have joined no process group: what people are shown of them."""

from __future__ import annotations

from dataclasses import dataclass

from clusterrun.shared.wording import count

HINT = (
    "a script that trains must call init_process_group() or make an Accelerator(); if it is still"
    " preparing its data, wait"
)
HINT_WAITING = (
    "the others have not come to init_process_group() yet: 'clusterrun logs -a' shows what they do"
)


@dataclass(frozen=True, kw_only=True)
class Unjoined:
    """How many ranks of the job run, and how many of them wait in init_process_group()."""

    running: int
    waiting: int

    def text(self, ranks: int) -> str:
        """Return the fact about a world of so many ranks."""
        waiting = f"; {self.waiting} in init_process_group()" if self.waiting else ""
        some = f"{self.running} of {count(ranks, 'rank')}"
        verb = "is" if self.running == 1 else "are"
        return f"{some} {verb} running and none has joined a process group{waiting}"

    @property
    def hint(self) -> str:
        """What to do about it."""
        return HINT_WAITING if self.waiting else HINT
