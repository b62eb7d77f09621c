"""Questions of the conductor to all members while the ranks run, and the answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ANSWER_S = 20.0  # an agent that takes longer is stopped or gone


Send = Callable[..., None]  # a kind of message and its fields, to one node or to all
Answerer = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]] | dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The members' answers by node rank, and the node ranks that did not answer."""

    given: Mapping[int, Mapping[str, Any]]
    silent: frozenset[int]


class Questions:
    """Ask all members in parallel, one question at a time."""

    def __init__(self, send: Send, members: Callable[[], Iterable[int]]) -> None:
        self._send, self._members = send, members
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._missing: set[int] = set()
        self._answered = asyncio.Event()
        self._lock = asyncio.Lock()

    async def ask(self, what: str, *, within_s: float | None = None, **fields: Any) -> Answers:
        """Return the answers of all present members, once all have answered or time is up."""
        async with self._lock:
            self._number += 1
            self._answers, self._missing = {}, set(self._members())
            self._answered.clear()
            self._send("ask", question=self._number, what=what, **fields)
            self.look_around()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._answered.wait(), within_s or ANSWER_S)
            return Answers(given=self._answers, silent=frozenset(self._missing))

    def take(self, member: int, message: dict[str, Any]) -> None:
        """Accept a member's answer to the open question."""
        if message.get("question") == self._number:
            self._answers[member] = message
            self.look_around()

    def look_around(self) -> None:
        """Stop waiting for members that are gone."""
        self._missing &= set(self._members()) - self._answers.keys()
        if not self._missing:
            self._answered.set()


async def answer(message: Mapping[str, Any], answerers: Mapping[str, Answerer], send: Send) -> None:
    """Answer a question as a member; ignore an unknown one."""
    answerer = answerers.get(str(message.get("what")))
    if answerer is not None:
        given = answerer(message)
        found = given if isinstance(given, dict) else await given
        send("answer", question=message.get("question"), **found)
