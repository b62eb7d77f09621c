"""Compare what torch's watchdogs print about a collective that timed out, rank by rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

MISSING, MISMATCH = "hang_rank_missing", "collective_desync"
WORDS: Final = ("WorkNCCL(", "nqueued ")

_CALL: Final = re.compile(
    r"collective operation timeout: WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)"
    r"(?:, NumelIn=(?P<size>\d+))?"
)
_STATUS: Final = re.compile(
    r"\[(?P<group>PG [^\]]{1,200}?) Rank (?P<rank>\d{1,7})\]"
    r".{0,200}?(?:\bat (?:NCCL )?work(?: sequence id)?: (?P<stuck>\d{1,18})\b.{0,200}?)?"
    r"\b[Ll]ast enqueued (?:NCCL )?work: (?P<entered>-?\d{1,18})"
)
_PAIRWISE: Final = re.compile(r"SEND|RECV|COALESCED")  # each rank counts its own
_UNEVEN: Final = re.compile(r"SEND|RECV|ALL_?TO_?ALL|GATHER|SCATTER|COALESCED|BARRIER|UNKNOWN")
_MOST: Final = 50_000  # reports that are kept

T = TypeVar("T")  # where a line was found


@dataclass(frozen=True, kw_only=True)
class _Report(Generic[T]):
    """The newest collective that a rank entered, and the one in which it timed out."""

    entered: int
    stuck: int | None
    call: str
    found: T


@dataclass(kw_only=True)
class Works(Generic[T]):
    """The reports of all ranks: of each process group, by rank."""

    _groups: dict[str, dict[int, _Report[T]]] = field(default_factory=dict)
    _calls: dict[int | None, re.Match[str]] = field(default_factory=dict)  # the newest, by rank
    _alone: dict[int | None, dict[str, tuple[str, T]]] = field(default_factory=dict)
    left: int = _MOST

    def feed(self, text: str, rank: int | None, found: T) -> None:
        """Take a line with one of WORDS."""
        if call := _CALL.search(text):
            self.left -= 1
            self._calls[rank] = call
            self._alone.setdefault(rank, {})[call["seq"]] = _signature(call), found
        elif status := _STATUS.search(text):
            self.left -= 1
            reports = self._groups.setdefault(status["group"], {})
            call = self._calls.get(rank)
            stuck = int(status["stuck"]) if status["stuck"] else None
            is_same = call is not None and call["seq"] == status["stuck"]
            if stuck is not None or int(status["rank"]) not in reports:
                reports[int(status["rank"])] = _Report(
                    entered=int(status["entered"]),
                    stuck=stuck,
                    call=_signature(call) if call and is_same else "",
                    found=found,
                )

    def conclusions(self) -> Iterator[tuple[str, T]]:
        """Yield what the reports show, with the place of the rank that differs."""
        for reports in self._groups.values():
            yield from _of_group(list(reports.values()))
        if len(self._groups) > 1 or any(len(calls) > 1 for calls in self._alone.values()):
            return
        # What the ranks waited in, also those whose group was not printed.
        seen = [(seq, *call) for calls in self._alone.values() for seq, call in calls.items()]
        if len({seq for seq, _, _ in seen}) == 1:
            yield from _mismatch([(signature, found) for _, signature, found in seen])


def _of_group(reports: list[_Report[T]]) -> Iterator[tuple[str, T]]:
    waiting = [each for each in reports if each.stuck is not None]
    if not waiting or any(_PAIRWISE.match(each.call) for each in waiting):
        return
    seq = max(each.stuck or 0 for each in waiting)
    behind = [each for each in reports if each.entered < seq]
    if behind and len(behind) < len(reports) - len(behind) + 1:
        is_waiting = any(each.stuck is not None for each in behind)
        yield MISMATCH if is_waiting else MISSING, behind[0].found
    elif all(each.stuck == seq for each in waiting):
        yield from _mismatch([(each.call, each.found) for each in waiting if each.call])


def _mismatch(calls: list[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Find the rarest call, if they differ."""
    names = [signature for signature, _ in calls]
    if len(set(names)) > 1:
        yield MISMATCH, min(calls, key=lambda call: names.count(call[0]))[1]


def _signature(call: re.Match[str]) -> str:
    """Return what must be the same on all ranks."""
    op = call["op"]
    return op if _UNEVEN.search(op) or not call["size"] else f"{op} {call['size']}"
