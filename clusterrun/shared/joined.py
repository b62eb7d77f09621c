"""Report ranks that run but have not joined a process group."""

from __future__ import annotations

from dataclasses import dataclass

from clusterrun.shared.wording import count

HINT = (
    "wait if the script is still preparing its data; to train, it must call init_process_group() or"
    " create an Accelerator()"
)
HINT_WAITING = (
    "run 'clusterrun logs -a' to see what the ranks outside init_process_group() are doing"
)


@dataclass(frozen=True, kw_only=True)
class Unjoined:
    """The number of ranks that run, and of those that wait in init_process_group()."""

    running: int
    waiting: int

    def text(self, ranks: int) -> str:
        """Return a sentence about a world of `ranks` ranks."""
        waiting = f"; {self.waiting} in init_process_group()" if self.waiting else ""
        some = f"{self.running} of {count(ranks, 'rank')}"
        verb = "is" if self.running == 1 else "are"
        return f"{some} {verb} running and none has joined a process group{waiting}"

    @property
    def hint(self) -> str:
        """The next step for the user."""
        return HINT_WAITING if self.waiting else HINT
