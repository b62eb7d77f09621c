"""The verdict of an attempt, as `outcome.json` keeps it: why the attempt failed, in short."""

from __future__ import annotations

from dataclasses import dataclass

from clusterrun.diagnosis.kinds import Certainty, Retry


@dataclass(frozen=True, kw_only=True)
class ShortVerdict:
    """A cause and where it began.

    `cause` is its id, `means` a sentence, `text` its first sign. `steps` is how many steps the log
    shows before it. A `generic` cause only says that the script failed.
    """

    cause: str
    means: str
    status: Certainty
    retry: Retry
    text: str = ""
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    blames_node: bool = False
    generic: bool = False
    steps: int = 0
