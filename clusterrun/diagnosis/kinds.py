"""Kinds of verdicts, and what agents note of ranks and failures: without the table of causes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from clusterrun.shared.wording import count

INSTALLED: Final = re.compile(
    r"site-packages|dist-packages|/lib/python|<frozen|/clusterrun/rank/"
)  # paths of code that is not the user's


class Retry(str, Enum):
    """Whether another try helps; `EXCLUDE`: on other nodes."""

    NO = "no"
    YES = "yes"
    EXCLUDE = "yes_exclude"
    MAYBE = "maybe"


class Certainty(str, Enum):
    """How sure a verdict is."""

    ESTABLISHED = "established"
    LIKELY = "likely"
    UNCONFIRMED = "unconfirmed"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do, and the command for it, in which words like JOB and NODE are to be filled in.

    `again`: the command only tries again, which does not help if the failure would repeat.
    """

    text: str
    run: str = ""
    again: bool = False

    def __str__(self) -> str:
        return f"{self.text}: {self.run}" if self.run else self.text


class Doubt(str, Enum):
    """Why a run that exited with status 0 is suspect."""

    NO_STEP = "no_step"
    NO_CHECKPOINT = "no_checkpoint"
    LOSS_NOT_FINITE = "loss_not_finite"
    LOSS_CONSTANT = "loss_constant"


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """A doubt about a run, and the sentence about it."""

    kind: Doubt
    text: str


# What an agent notes: the event `note`, and a line of its node's log


class NoteSource(str, Enum):
    """Who on the node knows of it."""

    AGENT = "agents"
    CGROUP = "cgroup"
    KERNEL = "kernel"
    NVML = "nvml"
    PREFLIGHT = "preflight"


@dataclass(frozen=True)
class Memory:
    """What a node's memory cgroup counted: OOM kills; its limit and peak in bytes, if known."""

    kills: int
    limit: int | None = None
    peak: int | None = None

    def __str__(self) -> str:
        killed = f"the OOM killer killed {self.kills} process{'' if self.kills == 1 else 'es'}"
        sizes = {"the job may use {} on this node": self.limit, "its peak was {}": self.peak}
        shown = [
            text.format(f"{size / (1 << 30):.3g} GiB")
            for text, size in sizes.items()
            if size is not None
        ]
        return ", ".join([killed, *shown])


@dataclass(frozen=True)
class ChangedCheck:
    """A check that found less before the ranks started than after the failure."""

    id: str
    before: str
    now: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a source on the node reports, about a rank or none.

    `memory` is what the cgroup counted, `change` a check that became worse, `held_gpu` a GPU (by
    the ranks' number) whose memory was in use before the ranks started.
    """

    source: NoteSource
    text: str
    rank: int | None = None
    held_gpu: int | None = None
    memory: Memory | None = None
    change: ChangedCheck | None = None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"[rank{self.rank}]: "
        return f"{self.source.value}: {rank}{self.text}"


# Ranks that run but have not joined a process group

HINT_UNJOINED = (
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
        return HINT_WAITING if self.waiting else HINT_UNJOINED
