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
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from clusterrun.logformat.lines import OF_NO_RANK
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.stderr import say_on_stderr
from clusterrun.node.forward.logfile import AppendedFile, NodeLog
from clusterrun.node.forward.spool import FLIGHT, NCCL, Loss, Output, Piece, Spool, SpoolReader
from clusterrun.node.link.connection import LaunchParameters
from clusterrun.node.link.member import Clock, Offset
from clusterrun.shared.files import open_new, replacing
from clusterrun.shared.wording import count

POLL_S = 0.1
RETRY_S = 0.5  # while the run directory can't be written
TURN_BLOCKS = 8  # of one output in one round, so that a flood does not hold up the others
MOST_WAITING_EVENTS = 20_000
PLAUSIBLE_US = 1_000_000  # that a file's mtime may be earlier than the last read


class Forwarder(threading.Thread):
    """Write the node's log, its events and the other files of its ranks."""

    def __init__(self, attempt: Attempt, spool: Spool, clock: Clock) -> None:
        super().__init__(name="forwarder", daemon=True)
        self._plan, self._number, self._who = attempt.plan, attempt.number, attempt.who
        self._spool, self.clock = spool, clock
        paths, place = attempt.paths, (self._number, self._who.node)
        # All nodes flush at most a thousand times a second.
        self._poll_s = max(POLL_S, attempt.plan.nodes / 1000)
        self._log = NodeLog(paths.log(*place), paths.log_errors(*place))
        self._events = AppendedFile(paths.events(self._who.node))
        self._dumps = paths.flight_dumps(*place)
        self._copies: dict[_JoinedFile, Callable[[], list[Path]]] = {
            _JoinedFile(paths.rank_errors(*place)): spool.error_files,
            _JoinedFile(paths.nccl_log(*place)): partial(spool.named, f"{NCCL}."),
        }
        self._files = (*self._log.files, self._events, *self._copies)
        self._rates: dict[str, Rate] = {}
        self._sources: dict[Output, SpoolReader] = {}
        self._listed_us = 0  # when the spool was listed
        self._own_lines: deque[tuple[int, bytes]] = deque()
        self._new_events: deque[bytes] = deque()
        self._end: tuple[int, str] | None = None
        self._reported_problem = ""
        self._ending = threading.Event()
        self._is_drained = False

    # What an agent says, in the conductor's time

    def now_s(self) -> float:
        """Return the conductor's time in seconds."""
        return self.clock.corrected_s(time.time())

    def say(self, text: str, *, tell: bool = False, is_error: bool = False) -> None:
        """Log the agent's own lines, as error lines if `is_error`; `tell` also tells the user."""
        now_us = self.clock.corrected(self.clock.now_us())
        for line in (f"error: {text}" if is_error else text).splitlines():
            self._own_lines.append((now_us, line.encode(errors="replace") + b"\n"))
        if tell:
            say_on_stderr(f"{self._who.node}: {text}")

    def event(self, kind: str, /, **fields: Any) -> None:
        """Record an event, which may have its own `ts`; drop a step if too many wait for a disk."""
        about = {"ts": round(self.now_s(), 6), "type": kind, "attempt": self._number}
        if kind != "step" or len(self._new_events) < MOST_WAITING_EVENTS:
            event = {**about, "node": self._who.node, **fields}
            self._new_events.append(json.dumps(event).encode() + b"\n")

    def record_of_rank(self, event: dict[str, Any]) -> None:
        """Record an event of a rank, without values of the script that have the names of ours."""
        event["ts"] = round(self.clock.corrected_s(event["ts"]), 6)
        ours = {"attempt", "node", "type"}
        self.event(event["type"], **{n: v for n, v in event.items() if n not in ours})

    def record_for_conductor(self, message: Mapping[str, Any]) -> None:
        """Record an event or a line of the conductor."""
        if message.get("type") == "event":
            self.event(str(message["name"]), **message["fields"])
        else:
            self.say(str(message["text"]))

    def say_where(self, parameters: LaunchParameters) -> None:
        """Log where the ranks meet."""
        plan = self._plan
        world = f"{count(plan.nodes, 'node')} x {count(plan.procs_per_node, 'rank')}"
        where = f"{parameters.address}:{parameters.port}"
        over = f" over {parameters.interface}" if parameters.interface else ""
        self.say(f"{world}, rendezvous at {where}{over}, precision {parameters.precision}")

    def say_not_forked(self, why: str) -> None:
        """Say why the ranks of this node are not forked; the first node tells the user."""
        self.say(why, tell=self._who.is_first)

    def record_clock(self, offset: Offset) -> None:
        """Record that this node's clock differs from the conductor's."""
        self.event("clock", offset_us=offset.offset_us, rtt_us=offset.rtt_us)
        seconds = abs(offset.offset_us) / 1_000_000
        side = "ahead of" if offset.offset_us > 0 else "behind"
        text = f"this node's clock is {seconds:.3f} s {side} the conductor's; times are corrected"
        self.say(text)

    def end(self, code: int, reason: str) -> None:
        """Record how the attempt ended, also as the last line of the log."""
        self.event("ended", code=code, reason=reason)
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

    # Run in the thread

    def run(self) -> None:
        """Forward until `finish` is called, then drain the rest, even after it stopped waiting."""
        while not self._ending.is_set():
            if not self._forward_safely():
                self._ending.wait(RETRY_S if self._log.problem else self._poll_s)
        while self._forward_safely() or self._has_unread_or_unwritten:
            if not self._is_written:
                time.sleep(POLL_S)  # the disk may be full; only `finish` gives up
        if self._end is not None:
            self._log.add_end(*self._end, self.clock.corrected(self.clock.now_us()))
        while not (self._log.flush() and self._is_written and self._pack_dumps()):
            time.sleep(POLL_S)
        self._is_drained = True
        for file in self._files:
            file.close()
        for source in self._sources.values():
            source.close()

    def _pack_dumps(self) -> bool:
        """Pack the dumps, once no rank is running; return whether that succeeded."""
        with contextlib.suppress(OSError):
            pack(self._spool, self._dumps)
            return True
        return False

    @property
    def _has_unread_or_unwritten(self) -> bool:
        is_unread = any(source.unread or source.lost.size for source in self._sources.values())
        return bool(is_unread or self._own_lines or self._new_events or not self._is_written)

    @property
    def _is_written(self) -> bool:
        return not any(file.pending_bytes for file in self._files)

    def _forward_safely(self) -> bool:
        """Forward one round, and report an error; return whether more may be waiting."""
        try:
            return self._forward()
        except Exception as error:  # noqa: BLE001 - without this thread the job has no log
            if repr(error) != self._reported_problem:
                self._reported_problem = repr(error)
                say_on_stderr(traceback.format_exc())
            time.sleep(POLL_S)
            return True  # more may be waiting: the round was not completed

    def _forward(self) -> bool:
        """Forward one round; return whether more may be waiting."""
        now_us = self.clock.now_us()
        self._find_files(now_us)
        if not self._events.pending_bytes:  # else they could not be written
            while self._new_events:
                self._events.add(self._new_events.popleft())
        self._events.flush()
        for file, list_originals in self._copies.items():
            file.copy(list_originals(), is_last=self._ending.is_set())
        for source in self._sources.values():
            source.update()
        self._bound_backlog()
        is_busy = self._log.flush() and self._take_turns(now_us)
        if self._log.flush():  # all that was read is written
            for source in self._sources.values():
                source.give_back()
        # Report once on stderr that the run directory can't be written.
        if self.problem and self.problem != self._reported_problem:
            self._reported_problem = self.problem
            say_on_stderr(f"cannot write logs: {self.problem}; retrying")
        return is_busy and not self._log.pending_bytes

    def _find_files(self, now_us: int) -> None:
        """Find new outputs; what they contain was written since the last listing, if any."""
        for output in self._spool.outputs():
            if output not in self._sources:
                with contextlib.suppress(OSError):  # no descriptor is left: try again
                    self._sources[output] = SpoolReader(output, self._listed_us or now_us)
        self._listed_us = now_us

    def _bound_backlog(self) -> None:
        """Drop the oldest bytes of the largest backlog beyond the spool limit."""
        sources, limit = self._sources.values(), self._plan.log_spool_bytes
        waiting = self._log.pending_bytes + sum(source.unread for source in sources)
        if waiting > limit and sources:
            largest = max(sources, key=lambda source: source.unread)
            reason = self._log.problem or "written faster than it could be forwarded"
            # Drop an eighth of the limit more, so that not each round drops some.
            self._note_loss(largest, Loss(largest.drop(waiting - limit + limit // 8), reason))

    def _take_turns(self, now_us: int) -> bool:
        """Forward from each output that has grown, in the order of mtime."""
        now, is_last = time.monotonic(), self._ending.is_set()
        sources = sorted(self._sources.values(), key=lambda source: source.mtime_us)
        is_busy = False
        for source in sources:
            if self._log.problem:
                return False
            if source.is_due(now, is_last=is_last):
                # A rank wrote the unread bytes at the mtime of its file, if that is plausible.
                mtime_us = source.mtime_us
                is_plausible = source.read_until_us - PLAUSIBLE_US <= mtime_us <= now_us
                at_us = self.clock.corrected(mtime_us if is_plausible else now_us)
                self._write_own_lines(at_us)
                self._take_turn(source, at_us, now, is_last=is_last)
            if source.is_due(now, is_last=is_last):
                is_busy = True
            else:
                source.read_until_us = now_us  # what follows is written later
                self._write_loss(source, self.clock.corrected(now_us), at_once=is_last)
        self._write_own_lines(self.clock.corrected(self.clock.now_us()))
        return is_busy

    def _take_turn(self, source: SpoolReader, at_us: int, now: float, *, is_last: bool) -> None:
        """Forward up to TURN_BLOCKS blocks of one output, stamped `at_us`; `now` is monotonic."""
        for _ in range(TURN_BLOCKS):
            try:
                pieces = source.read(now, is_last=is_last)
            except OSError as error:  # a broken local disk
                self._note_loss(source, Loss(source.drop(source.unread), str(error.strerror)))
                return
            for piece in pieces:
                for part in self._allowed(piece, source.rank, now):
                    if isinstance(part, Loss):
                        self._note_loss(source, part)
                    else:
                        self._write_loss(source, at_us, at_once=True)
                        self._log.add(part, at_us, source.rank, source.stream)
            if self._log.problem or not source.is_due(now, is_last=is_last):
                return

    def _write_own_lines(self, until_us: int) -> None:
        while self._own_lines and self._own_lines[0][0] <= until_us:
            at_us, text = self._own_lines.popleft()
            self._log.add(Piece(text, is_cut=False), at_us, "-", "a")

    def _allowed(self, piece: Piece, rank: str, now: float) -> Iterable[Piece | Loss]:
        """Split a piece into what may be logged and what exceeds the limit on a rank's lines."""
        limit = self._plan.log_lines_per_s
        if rank == OF_NO_RANK or not limit:
            return (piece,)
        return self._rates.setdefault(rank, Rate(limit)).allow(piece, now)

    def _note_loss(self, source: SpoolReader, loss: Loss) -> None:
        """Add a loss to those of the same reason, which are recorded before the next line."""
        if source.lost.reason != loss.reason:
            self._write_loss(source, 0, at_once=True)  # 0: at the time of the last line
        source.lost = Loss(source.lost.size + loss.size, loss.reason)

    def _write_loss(self, source: SpoolReader, at_us: int, *, at_once: bool = False) -> None:
        """Record lost bytes before the next line, or once a second if there is none."""
        if source.lost.size and (at_once or at_us - source.recorded_us >= 1_000_000):
            self._log.add_gap(source.lost, at_us, source.rank, source.stream)
            source.lost, source.recorded_us = Loss(0, ""), at_us


class Rate:
    """How many lines a rank may still write in the current second."""

    def __init__(self, lines_per_s: int) -> None:
        self.lines_per_s = lines_per_s
        self._left = lines_per_s
        self._second_began = 0.0

    def allow(self, piece: Piece, now: float) -> Iterator[Piece | Loss]:
        """Yield the lines within the limit, then the loss if there are more."""
        if now - self._second_began >= 1:
            self._second_began, self._left = now, self.lines_per_s
        count = 1 if piece.is_cut else piece.text.count(b"\n")
        end = len(piece.text)
        if count > self._left:
            allowed = piece.text.split(b"\n", self._left)[: self._left]
            end = sum(len(line) + 1 for line in allowed)
        self._left -= min(count, self._left)
        if end:
            yield Piece(piece.text[:end], piece.is_cut)
        if end < len(piece.text):
            yield Loss(len(piece.text) - end, f"more than {self.lines_per_s} lines/s")


def pack(spool: Spool, target: Path, *, is_moved: bool = False) -> None:
    """Pack the flight recorder's dumps, if any; delete them if `is_moved`. Raises OSError."""
    if not (dumps := [path for path in spool.named(f"{FLIGHT}_") if path.stat().st_size]):
        return
    import tarfile  # few nodes need it

    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (
        replacing(target) as temporary,
        open_new(temporary) as file,
        tarfile.open(fileobj=file, mode="w") as archive,
    ):
        for path in dumps:
            archive.add(path, path.name.removeprefix("flight_"))  # as torch names them
    if is_moved:
        for path in dumps:
            path.unlink()


class _JoinedFile(AppendedFile):
    """Growing files of the ranks, concatenated in one for the node."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._read: dict[Path, int] = {}

    def copy(self, paths: Iterable[Path], *, is_last: bool) -> None:
        """Copy data added since the last call: whole lines, or everything if `is_last`."""
        if self.pending_bytes:
            paths = ()  # first write what waits
        for path in paths:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
                whole = data if is_last else data[: data.rfind(b"\n") + 1]
                self.add(whole)
                self._read[path] = self._read.get(path, 0) + len(whole)
        self.flush()
