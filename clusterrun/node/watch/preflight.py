"""Check this node before its ranks start, and again after a failure."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from clusterrun.config.choices import Preflight
from clusterrun.errors import shortened
from clusterrun.health.examine import Look, examine
from clusterrun.health.facts import facts as node_facts
from clusterrun.health.gpu_answer import GpuAnswer
from clusterrun.health.node import Needs, quick_looks
from clusterrun.launch.plan import Plan
from clusterrun.logformat.notes import ChangedCheck, Note, NoteSource
from clusterrun.shared.finding import BAD, Finding, Severity, note, ok

DEADLINE_S: Final = 1.5  # a start must not take 2 s longer; a late check is skipped
MOST: Final = 8  # checks in a report
MOST_FACTS: Final = 40
_OF_RANKS: Final = ("node.memory", "gpu.foreign")  # what the ranks use themselves, while they run
_BYTES: Final = 600  # of a text, in JSON
# From good to bad: what could look before the launch and cannot now is a sign, too.
_WORSE: Final = (Severity.OK, Severity.NOTE, Severity.SKIP, Severity.FAIL)


class NodeChecks:
    """The quick checks of this node, and what they found before the launch; none if off.

    `facts` are what the conductor compares nodes by: none if they could not be read in time.
    """

    def __init__(self, plan: Plan, *, is_head: bool = False) -> None:
        self._is_on = plan.preflight is not Preflight.OFF
        self._needs = Needs.of(plan, is_head=is_head)
        self._before: dict[str, Severity] = {}
        self._asked: list[GpuAnswer] = []
        self.facts: dict[str, str] = {}

    @property
    def pids(self) -> list[int]:
        """Child processes that may be stuck in the kernel."""
        return [asked.pid for asked in self._asked if asked.pid]

    async def report(self) -> tuple[Finding, ...]:
        """Run the checks before the launch; return notes and failures, for the conductor."""
        found = await self._look({"facts": self._gather})
        self._before = {each.id: each.severity for each in found}
        bad = sorted((c for c in found if c.severity in BAD), key=lambda c: BAD.index(c.severity))
        return tuple(map(_short, bad[:MOST]))

    async def changes(self) -> list[Note]:
        """Run the checks again; return those with a worse result than at the start."""
        notes = []
        for now in map(_short, await self._look() if self._before else ()):
            before = self._before.get(now.id)
            is_known = before in (Severity.OK, Severity.NOTE) and now.id not in _OF_RANKS
            if before and is_known and _WORSE.index(now.severity) > _WORSE.index(before):
                found = ChangedCheck(now.id, before.value, now.severity.value, now.text)
                text = f"{now.id}: {found.before} at the start; now {found.now}: {now.text}"
                notes.append(Note(source=NoteSource.PREFLIGHT, text=text, change=found))
        return notes

    def _gather(self) -> Finding:
        """Read the facts in a thread of their own: a fault of the system must not end the job."""
        with contextlib.suppress(Exception):
            self.facts = short_facts(node_facts())
        return ok("facts", "")

    async def _look(self, more: Mapping[str, Look] = MappingProxyType({})) -> list[Finding]:
        if not self._is_on:
            return []
        asked = self._needs.gpu_answer()
        self._asked += [asked] if asked else []
        try:
            looks = {**quick_looks(self._needs, asked), **more}
            return await asyncio.to_thread(examine, looks, DEADLINE_S)
        except Exception as error:  # noqa: BLE001 - a fault of a check must not end the job
            text = f"cannot check this node: {error!r}"
            return [
                note("preflight", text, "start without these checks: --set launch.preflight=off")
            ]


def _short(check: Finding) -> Finding:
    """Return a check on one line each, short enough for the link."""
    text, fix = (_fitted(" ".join(text.split()), _BYTES) for text in (check.text, check.fix))
    return dataclasses.replace(check, text=text, fix=fix)


def _fitted(text: str, most: int) -> str:
    """Return a text of so many bytes in JSON; only the beginning and end if it is long."""
    text = shortened(text, most)
    while (over := len(json.dumps(text)) - most) > 0:
        text = shortened(text, len(text) - (over + 11) // 12)  # a letter is 12 bytes at most
    return text


def short_facts(found: Mapping[str, str]) -> dict[str, str]:
    """Return the facts by which the conductor compares nodes, few and short enough for the link."""
    kept = list(found.items())[:MOST_FACTS]
    return {_fitted(name, 50): _fitted(value, 100) for name, value in kept}
