"""Watch the ranks of this node: their events, and how their processes end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterrun.node.base.causes import Cause, Failure
from clusterrun.node.base.processes import exit_code, how_ended, is_running, open_pidfd
from clusterrun.node.forward.spool import EventReader, Spool

LEAVE_S = 3.0  # how long a rank that has reported its failure may take to exit
_CAUSES = {cause.value: cause for cause in Cause}
# What gloo, NCCL and torch's store raise in a rank that has lost a peer (torch 2.13).
_LOST_PEER = (
    r"Connection (closed|reset) by peer|Connection was likely closed|pair closure|Broken pipe"
    r"|remote process exited|communicator was aborted|recvValue"
)


@dataclass(kw_only=True)
class Rank:
    """One rank as the agent knows it; `report` is the `rank_exit` event that it wrote itself."""

    number: int
    reader: EventReader
    pid: int = 0
    is_up: bool = False  # it has reported its start: signals have their meaning
    pidfd: int | None = None
    report: dict[str, Any] = field(default_factory=dict)
    ended_at: float = 0.0
    code: int | None = None  # of its process; negative: a signal
    is_settled: bool = False


@dataclass(kw_only=True)
class Ranks:
    """All ranks of this node; each failure is reported once, in the order of discovery."""

    spool: Spool
    node: str
    launched: Callable[[], Mapping[int, int]]  # pids by rank: one may end before it reports
    happened: Callable[[dict[str, Any]], None]
    failed: Callable[[Failure], None]
    have_failed: bool = False
    ended_well: int = 0
    _ranks: dict[int, Rank] = field(default_factory=dict)

    def update(self, *, closely: bool = False) -> None:
        """Read the ranks' new events, and find out which have ended.

        If `closely`, do not wait for the exit of a rank that has reported its failure.
        """
        for number, pid in self.launched().items():
            if not self._rank(number).pid:
                self._follow(self._rank(number), pid)
        for number in sorted({*self.spool.ranks(), *self._ranks}):
            rank = self._rank(number)
            self._read_events(rank)
            self._settle_if_ended(rank, closely=closely)

    def _rank(self, number: int) -> Rank:
        if number not in self._ranks:
            reader = EventReader(self.spool.events(number))
            self._ranks[number] = Rank(number=number, reader=reader)
        return self._ranks[number]

    def _read_events(self, rank: Rank) -> None:
        """Take the rank's new events, and pass on all but its own report of its end."""
        for event in rank.reader.read():
            kind, pid = event["type"], event.get("pid")
            if kind == "rank_exit" and isinstance(event.get("code"), int):
                rank.report = event  # `_settle` reports the end of the process itself
                continue
            if kind == "rank_start" and isinstance(pid, int):
                rank.is_up = True
                if not rank.pid:
                    self._follow(rank, pid)
            self.happened(event)

    def _follow(self, rank: Rank, pid: int) -> None:
        """Watch for the end of the process, so that its status can still be read."""
        rank.pid = pid
        with contextlib.suppress(OSError):  # Linux before 5.3: polled instead
            rank.pidfd = open_pidfd(pid)
            asyncio.get_running_loop().add_reader(rank.pidfd, self._ended, rank)

    def _ended(self, rank: Rank) -> None:
        """Record when and how a process ended, before its parent reaps it."""
        if rank.ended_at == 0.0:
            rank.ended_at = time.time()
            rank.code = exit_code(rank.pid)
        self._unfollow(rank)
        self._read_events(rank)
        self._settle_if_ended(rank)

    def _unfollow(self, rank: Rank) -> None:
        if rank.pidfd is not None:
            asyncio.get_running_loop().remove_reader(rank.pidfd)
            os.close(rank.pidfd)
            rank.pidfd = None

    def _settle_if_ended(self, rank: Rank, *, closely: bool = False) -> None:
        """Settle how a rank ended once that is known, or its exit is overdue after its report."""
        if rank.is_settled or not rank.pid:
            return
        must_poll = closely or rank.pidfd is None  # without a descriptor, nothing reports the end
        if must_poll and not rank.ended_at and not is_running(rank.pid):
            rank.ended_at = time.time()
        if rank.ended_at and rank.code is None:
            rank.code = exit_code(rank.pid)
        is_known = rank.ended_at and (rank.code is not None or rank.report)
        patience_s = 0.0 if closely else LEAVE_S
        is_overdue = rank.report.get("code") and time.time() - rank.report["ts"] > patience_s
        if is_known or is_overdue:
            self._settle(rank)

    def _settle(self, rank: Rank) -> None:
        """Report a rank's end: its event, and its failure if it failed."""
        rank.is_settled = True
        failure = _failure(rank, self.node)
        about = {"ts": rank.ended_at or time.time(), "type": "rank_exit", "rank": rank.number}
        code, number = (failure.code, failure.signal) if failure else (0, 0)
        self.happened({**about, "code": code, "signal": number})
        if failure is None:
            self.ended_well += 1
        else:
            self.have_failed = True
            self.failed(failure)

    def settle_by_launcher(self, failures: Iterable[dict[str, Any]]) -> None:
        """Use the launcher's report for ranks whose end was not noticed."""
        for entry in failures:
            rank, code = self._rank(int(entry["rank"])), int(entry["exitcode"])
            if not rank.is_settled:
                rank.ended_at, rank.code = rank.ended_at or time.time(), code
                self._settle(rank)

    @property
    def pids(self) -> dict[int, int]:
        """The pids of the running ranks, by rank."""
        known = [*self._ranks.values()]  # at once: another thread may ask
        return {rank.number: rank.pid for rank in known if rank.is_up and not rank.ended_at}

    @property
    def by_pid(self) -> dict[int, int | None]:
        """The ranks by pid, also those that have ended."""
        return {rank.pid: rank.number for rank in self._ranks.values() if rank.pid}

    def terminate(self, besides: Collection[int] = ()) -> None:
        """Send SIGTERM to the running ranks, but not to the processes in `besides`."""
        for pid in {*self.pids.values()} - {*besides}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def all_ended(self, count: int) -> bool:
        """Return whether at least `count` ranks are known, and all of these have ended."""
        ended = [rank for rank in self._ranks.values() if rank.ended_at]
        return len(ended) == len(self._ranks) >= count

    def close(self) -> None:
        """Stop watching."""
        for rank in self._ranks.values():
            self._unfollow(rank)


def _failure(rank: Rank, node: str) -> Failure | None:
    """Return how a rank failed, None if it did not; its own report counts before its status."""
    report = rank.report
    if report.get("code"):
        cause = _CAUSES.get(str(report.get("cause")), Cause.EXIT)
        message = str(report.get("message", ""))
        return Failure(
            at=report["ts"],
            node=node,
            rank=rank.number,
            code=int(report["code"]),
            cause=cause,
            message=message,
            where=str(report.get("where", "")),
            has_lost_peer=cause is Cause.EXCEPTION and bool(re.search(_LOST_PEER, message)),
        )
    if not rank.code:
        return None
    when = " after the script had completed" if report else ""  # its code is 0
    return Failure(
        at=rank.ended_at,
        node=node,
        rank=rank.number,
        code=rank.code if rank.code > 0 else 128 - rank.code,
        signal=max(0, -rank.code),
        cause=Cause.SIGNAL if rank.code < 0 else Cause.EXIT,
        message=f"{how_ended(rank.code).removeprefix('was ')}{when}",
    )
