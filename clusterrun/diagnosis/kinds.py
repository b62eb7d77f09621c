"""Kinds of verdicts: what other rooms need to know without the table of causes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

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
