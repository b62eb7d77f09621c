"""Kinds of verdicts: what other rooms need to know without the table of causes."""

from __future__ import annotations

from enum import Enum


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
