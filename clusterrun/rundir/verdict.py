"""The verdict of an attempt, as `outcome.json` keeps it: why the attempt failed, in short."""

from __future__ import annotations

from dataclasses import dataclass

from clusterrun.diagnosis.kinds import Advice, Certainty, Retry


@dataclass(frozen=True, kw_only=True)
class ShortVerdict:
    """A cause and where it began.

    `cause` is its id, `means` a sentence, `text` its first sign. `steps` is how many steps the log
    shows before it. A `generic` cause only says that the script failed. `advice` is general.
    `place` names who printed the text, `frame` the line of the script in its traceback; `more` are
    further signs. The first `is_reported` if it is from the agents. `victims` is how many other
    ranks failed because of it. `allowed` is what the job may use of the memory of its nodes.
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
    advice: tuple[Advice, ...] = ()
    place: str = ""
    frame: str = ""
    more: tuple[str, ...] = ()
    is_reported: bool = False
    victims: int = 0
    allowed: int | None = None
