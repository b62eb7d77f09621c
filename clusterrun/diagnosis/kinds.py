"""Kinds of verdicts, and what agents note of ranks and failures: without the table of causes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

# Paths of code that is not the user's.
INSTALLED: Final = re.compile(r"site-packages|dist-packages|/lib/python|<frozen|/clusterrun/rank/")


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
    """What to do."""

    text: str
    run: str = ""  # the command for it, in which words like JOB and NODE are to be filled in
    again: bool = False  # it only tries again: no help if the failure would repeat

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


@dataclass(frozen=True)
class Memory:
    """What a node's memory cgroup counted: OOM kills; its limit in bytes, if it has one."""

    kills: int
    limit: int | None = None

    def __str__(self) -> str:
        killed = f"the OOM killer killed {self.kills} process{'' if self.kills == 1 else 'es'}"
        if self.limit is None:
            return killed
        return f"{killed}, the job may use {self.limit / (1 << 30):.3g} GiB on this node"


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a source on the node reports of a rank, or of none."""

    source: NoteSource
    text: str
    rank: int | None = None
    held_gpu: int | None = None  # by the ranks' number: its memory was in use before they started
    memory: Memory | None = None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"[rank{self.rank}]: "
        return f"{self.source.value}: {rank}{self.text}"
