"""Forward the output of ranks and launcher from the spool to the run directory, with timestamps.

It runs in a thread, so that a slow or full disk stops neither the agent nor the ranks.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from clusterrun.logformat.lines import OF_NO_RANK
from clusterrun.node.base.stderr import say_on_stderr
from clusterrun.node.forward.appended import AppendedFile
from clusterrun.node.forward.leftovers import Leftovers
from clusterrun.node.forward.logfile import NodeLog
from clusterrun.node.forward.spool import Output, Spool, SpoolReader, water_level
from clusterrun.node.forward.stamp import Loss, Piece, Rate
from clusterrun.node.link.clock import Clock
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import size_of

POLL_S = 0.1
RETRY_S = 0.5  # while the run directory can't be written
TURN_BLOCKS = 8  # of one output in one round, so that a flood does not hold up the others
WAITING_EVENTS = 20_000
PLAUSIBLE_US = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much output may wait on a node, and how much a rank may write (0: no limit)."""

    spool_bytes: int = 1 << 30
    lines_per_s: int = 0
    poll_s: float = POLL_S


class Forwarder(threading.Thread):
    """Write the node's log, its events and the other files of its ranks."""

    def __init__(
        self,
        spool: Spool,
        paths: RunPaths,
        attempt: int,
        node: str,
        *,
        limits: Limits = Limits(),
        clock: Clock | None = None,
    ) -> None:
        super().__init__(name="forwarder", daemon=True)
        self._spool, self._limits, self._clock = spool, limits, clock or Clock()
        self._log = NodeLog(paths.log(attempt, node), paths.log_errors(attempt, node))
        self._events = AppendedFile(paths.events(node))
        self._leftovers = Leftovers(spool, paths, attempt, node)
        self._rates: dict[str, Rate] = {}
        self._lanes: dict[Output, _Lane] = {}
        self._listed_us = 0  # when the spool was listed
        self._own_lines: deque[tuple[int, bytes]] = deque()
        self._new_events: deque[bytes] = deque()
        self._end: tuple[int, str] | None = None
        self._complained = ""
        self._ending = threading.Event()
        self._is_drained = False

    # Called by the agent

    def say(self, text: str) -> None:
        """Write the agent's own lines to the log."""
        now_us = self._clock.corrected(self._clock.now_us())
        for line in text.splitlines():
            self._own_lines.append((now_us, line.encode(errors="replace") + b"\n"))

    def event(self, event: dict[str, Any]) -> None:
        """Append an event; drop steps while too many events wait for a full disk."""
        if event.get("type") != "step" or len(self._new_events) < WAITING_EVENTS:
            self._new_events.append(json.dumps(event).encode() + b"\n")

    def end(self, code: int, reason: str) -> None:
        """Write how the job ended as the last line of the log."""
        self._end = (code, reason)

    def finish(self, timeout_s: float) -> bool:
        """Drain and stop; return whether everything was written in time."""
        self._ending.set()
        self.join(timeout_s)
        return self._is_drained

    @property
    def problem(self) -> str:
        """Why the run directory can't be written; "" if it can."""
        return self._log.problem or self._events.problem

    def unwritten(self) -> dict[Output, int]:
        """Return how many bytes of each output may be missing from the log."""
        left = {}
        for output in self._spool.outputs():
            lane, left[output] = self._lanes.get(output), size_of(output.path)
            if lane is not None:
                left[output] += lane.waiting + lane.lost.size - lane.source.position
        return {output: size for output, size in left.items() if size > 0}

    # Run in the thread

    def run(self) -> None:
        """Forward until `finish`, then drain the rest."""
        while not self._ending.is_set():
            if not self._forward_safely():
                self._ending.wait(RETRY_S if self._log.problem else self._limits.poll_s)
        while self._forward_safely() or self._has_work:
            if not self._is_written:
                time.sleep(POLL_S)  # until `finish` gives up
        if self._end is not None:
            self._log.add_end(*self._end, self._clock.corrected(self._clock.now_us()))
        while not (self._log.flush() and self._is_written and self._leftovers.pack_dumps()):
            time.sleep(POLL_S)
        self._is_drained = True
        self._log.close()
        self._events.close()
        self._leftovers.close()
        for lane in self._lanes.values():
            lane.source.close()

    @property
    def _has_work(self) -> bool:
        unread = any(lane.source.unread or lane.lost.size for lane in self._lanes.values())
        return bool(unread or self._own_lines or self._new_events or not self._is_written)

    @property
    def _is_written(self) -> bool:
        is_written = self._log.is_written and self._leftovers.is_written
        return is_written and not self._events.pending_bytes

    def _forward_safely(self) -> bool:
        try:
            return self._forward()
        except Exception as error:  # noqa: BLE001 - without this thread the job has no log
            if repr(error) != self._complained:
                self._complained = repr(error)
                say_on_stderr(traceback.format_exc())
            time.sleep(POLL_S)
            return True  # there may be more, and not all is written

    def _forward(self) -> bool:
        """Forward one round; return whether more may be waiting."""
        now_us = self._clock.now_us()
        self._find_files(now_us)
        if not self._events.pending_bytes:
            while self._new_events:
                self._events.add(self._new_events.popleft())
        self._events.flush()
        self._leftovers.copy(is_last=self._ending.is_set())
        for lane in self._lanes.values():
            lane.source.look()
        self._bound_backlog()
        is_busy = self._log.flush() and self._take_turns(now_us)
        if self._log.flush():
            for lane in self._lanes.values():
                lane.waiting = 0
                lane.source.give_back()
        # Report once on stderr that the run directory can't be written.
        if self.problem and self.problem != self._complained:
            self._complained = self.problem
            say_on_stderr(f"cannot write logs: {self.problem}; retrying")
        return is_busy and not self._log.pending_bytes

    def _find_files(self, now_us: int) -> None:
        """Find the outputs that have appeared since the last round."""
        for output in self._spool.outputs():
            if output not in self._lanes:
                with contextlib.suppress(OSError):  # no descriptor is left: try again
                    self._lanes[output] = _Lane(SpoolReader(output, self._listed_us or now_us))
        self._listed_us = now_us

    def _bound_backlog(self) -> None:
        """Drop the oldest bytes of the largest backlogs beyond the spool limit."""
        lanes = list(self._lanes.values())
        waiting, limit = [lane.source.unread for lane in lanes], self._limits.spool_bytes
        if sum(waiting) + self._log.pending_bytes <= limit:
            return
        level = water_level(waiting, limit - limit // 8 - self._log.pending_bytes)
        reason = self._log.problem or "written faster than it could be forwarded"
        for lane in lanes:
            if lane.source.unread > level:
                self._drop(lane, lane.source.unread - level, reason)

    def _take_turns(self, now_us: int) -> bool:
        """Forward from each output that has grown, in the order of mtime."""
        now, is_last = time.monotonic(), self._ending.is_set()
        lanes = sorted(self._lanes.values(), key=lambda lane: lane.source.mtime_us)
        is_busy = False
        for lane in lanes:
            if self._log.problem:
                return False
            if lane.source.is_due(now, is_last=is_last):
                # A rank wrote the unread bytes at the mtime of its file, if that is plausible.
                mtime_us = lane.source.mtime_us
                is_plausible = lane.source.read_until_us - PLAUSIBLE_US <= mtime_us <= now_us
                at_us = self._clock.corrected(mtime_us if is_plausible else now_us)
                self._write_own_lines(at_us)
                self._take_turn(lane, at_us, now, is_last=is_last)
            if lane.source.is_due(now, is_last=is_last):
                is_busy = True
            else:
                lane.source.read_until_us = now_us
                self._write_loss(lane, self._clock.corrected(now_us), is_now=is_last)
        self._write_own_lines(self._clock.corrected(self._clock.now_us()))
        return is_busy

    def _take_turn(self, lane: _Lane, at_us: int, now: float, *, is_last: bool) -> None:
        """Forward the next lines of one output."""
        source = lane.source
        for _ in range(TURN_BLOCKS):
            try:
                pieces = source.read(now, is_last=is_last)
            except OSError as error:  # a broken local disk
                self._drop(lane, source.unread, str(error.strerror))
                return
            for piece in pieces:
                for given in self._allowed(piece, source.rank, now):
                    if isinstance(given, Loss):
                        self._lose(lane, given)
                    else:
                        self._write_loss(lane, at_us, is_now=True)
                        self._log.add(given, at_us, source.rank, source.stream)
                        lane.waiting += len(given.text)
            if self._log.problem or not source.is_due(now, is_last=is_last):
                return

    def _allowed(self, piece: Piece, rank: str, now: float) -> Iterable[Piece | Loss]:
        limit = self._limits.lines_per_s
        if rank == OF_NO_RANK or not limit:
            return (piece,)
        return self._rates.setdefault(rank, Rate(limit)).allow(piece, now)

    def _write_own_lines(self, until_us: int) -> None:
        while self._own_lines and self._own_lines[0][0] <= until_us:
            at_us, text = self._own_lines.popleft()
            self._log.add(Piece(text, is_cut=False), at_us, "-", "a")

    def _drop(self, lane: _Lane, count: int, reason: str) -> None:
        """Skip the oldest bytes of an output."""
        self._lose(lane, Loss(lane.source.drop(count), reason))

    def _lose(self, lane: _Lane, loss: Loss) -> None:
        if lane.lost.reason != loss.reason:
            self._write_loss(lane, 0, is_now=True)
        lane.lost = Loss(lane.lost.size + loss.size, loss.reason)

    def _write_loss(self, lane: _Lane, at_us: int, *, is_now: bool = False) -> None:
        """Record lost bytes before the next line, or once a second if there is none."""
        if lane.lost.size and (is_now or at_us - lane.recorded_us >= 1_000_000):
            self._log.add_gap(lane.lost, at_us, lane.source.rank, lane.source.stream)
            lane.waiting += lane.lost.size
            lane.lost, lane.recorded_us = Loss(0, ""), at_us


@dataclass
class _Lane:
    """An output being forwarded, and its lost bytes that are not yet recorded."""

    source: SpoolReader
    waiting: int = 0  # bytes passed to the log that may not have reached it
    lost: Loss = Loss(0, "")  # noqa: RUF009 - it is a tuple
    recorded_us: int = 0
