"""Detect, as the head, that ranks run and none has joined a process group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from clusterrun.node.link.questions import Questions
from clusterrun.shared.joined import Unjoined

AFTER_S = 120.0  # importing torch, and the setup of most scripts, take less


@dataclass(frozen=True, kw_only=True)
class Joins:
    """The ranks of one node: how many run, wait in init_process_group(), and have joined."""

    running: int
    waiting: int
    joined: int


async def unjoined(questions: Questions, own: Callable[[], Joins]) -> Unjoined | None:
    """Ask all nodes after two minutes, once ranks run; return None if a rank has joined."""
    while True:
        await asyncio.sleep(AFTER_S)
        answers = await questions.ask("joins")
        found = [vars(own()), *answers.given.values()]
        if _sum(found, "joined"):
            return None
        if running := _sum(found, "running"):
            return Unjoined(running=running, waiting=_sum(found, "waiting"))


def _sum(found: list[Mapping[str, Any]], name: str) -> int:
    numbers = (answer.get(name) for answer in found)
    return sum(number for number in numbers if isinstance(number, int))
