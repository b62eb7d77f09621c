"""Find, in the flight recorder dumps of all ranks, the collective at which a training hangs.

The wavefront of a process group is its first collective that not all members entered. The ranks
that entered it wait for those that did not (torch 2.5-2.13, format 2.x of the dumps).
"""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from clusterrun.diagnosis.kinds import INSTALLED
from clusterrun.shared.wording import count

DEFAULT_GROUP: Final = "default_pg"
_COMPARED: Final = 64  # of the newest collectives of a group
_PASSED: Final = 16  # complete collectives after a mismatch that then harmed nothing
# Their sizes may differ between ranks.
_UNEVEN: Final = re.compile(r"all_?to_?all|scatter$|gather$|gather_v$|_oop$|coalesced|_v_|_v$")


class StuckKind(str, Enum):
    """How a group of ranks is stuck."""

    MISSING = "missing"  # ranks did not enter the collective
    MISMATCH = "mismatch"  # ranks entered another one, or with other sizes
    UNFINISHED = "unfinished"  # all entered it, and it does not finish


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective: `all_reduce`, its sizes and types, and the line of the user's code."""

    op: str
    shape: str
    where: str

    @property
    def signature(self) -> tuple[str, str]:
        """Return what must be the same on all ranks."""
        return self.op, "" if _UNEVEN.search(self.op) else self.shape


@dataclass(kw_only=True)
class Trace:
    """What a rank did in one group: the calls from number `first` on."""

    first: int = 0
    calls: list[Call | None] = field(default_factory=list)  # None: it is not recorded
    done: int = -1  # the newest that finished
    entered_at: float = 0.0  # epoch seconds, of the newest

    @property
    def last(self) -> int:
        """Return the number of the newest call."""
        return self.first + len(self.calls) - 1

    def call(self, number: int) -> Call | None:
        """Return a call; None if it is not recorded."""
        index = number - self.first
        return self.calls[index] if 0 <= index < len(self.calls) else None

    def add(self, number: int, call: Call) -> None:
        """Add a call; numbers do not decrease, and may skip calls that are not recorded."""
        if not self.calls:
            self.first = number
        later = number - self.last
        if later > 0:  # the parts of a coalesced call have one number
            self.calls += [None] * (later - 1) + [call]


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """Where a group of ranks is stuck: in its collective `number`."""

    kind: StuckKind
    group: str
    number: int
    call: Call
    waiting: tuple[int, ...]  # ranks that entered it
    odd: tuple[int, ...] = ()  # ranks to blame: did not enter it, or called something else
    others: Mapping[int, str] = field(default_factory=dict)  # what `odd` called, last or instead
    since: float = 0.0  # when the last rank began to wait


class Recordings:
    """The dumps of all ranks, in a small form.

    The stacks of `waiting` ranks show a collective: do not blame them if their dump is missing.
    """

    def __init__(self, world: int = 0, waiting: Iterable[int] = ()) -> None:
        self.ranks: set[int] = set()
        self._world, self._excused = world, frozenset(waiting)
        # By name, members (groups of one name may have others) and description; by rank.
        self._groups: dict[tuple[str, tuple[int, ...], str], dict[int, Trace]] = {}
        self._calls: dict[Call, Call] = {}  # each once: ranks make the same
        self._is_own: dict[Any, bool] = {}  # files

    def add(self, rank: int, data: bytes) -> bool:
        """Add a rank's dump; return False if it cannot be read."""
        try:
            dump = _PlainUnpickler(io.BytesIO(data)).load()
            members_of = {
                name: tuple(map(int, re.findall(r"\d+", str(group.get("ranks", "")))))
                for name, group in dump.get("pg_config", {}).items()
            }
            traces: dict[tuple[str, str], Trace] = {}  # hashing all members each time is slow
            for entry in dump.get("entries", ()):
                if not entry.get("is_p2p"):
                    group = entry["process_group"]  # its name and description
                    if group not in traces:
                        key = group[0], members_of.get(group[0], ()), group[1]
                        traces[group] = self._groups.setdefault(key, {}).setdefault(rank, Trace())
                    trace, number = traces[group], int(entry["collective_seq_id"])
                    trace.add(number, self._call(entry))
                    trace.entered_at = entry["time_created_ns"] / 1e9
                    if entry.get("retired") or entry.get("state") == "completed":
                        trace.done = max(trace.done, number)
        except Exception:  # noqa: BLE001 - a torn or foreign file can raise anything
            return False
        self.ranks.add(rank)
        return True

    def _call(self, entry: Mapping[str, Any]) -> Call:
        op = entry["profiling_name"].partition(":")[2].partition(" ")[0]
        shape = f"{entry['input_sizes']} {' '.join(entry['input_dtypes'])}".strip()
        call = Call(op=op, shape=shape, where=self._where(entry.get("frames", ())))
        return self._calls.setdefault(call, call)

    def _where(self, frames: Iterable[Mapping[str, Any]]) -> str:
        """Return the innermost frame of the user's code, as in `train.py:88 in step`."""
        is_own = self._is_own  # cached: stacks are deep, but of few files
        for frame in frames:
            file = frame["filename"]
            if file not in is_own:
                is_own[file] = not INSTALLED.search(str(file))
            if is_own[file]:
                return f"{file}:{frame['line']} in {frame['name']}"
        return ""

    def stuck(self) -> Stuck | None:
        """Return where the training hangs; None if no rank waits for another."""
        all_stuck: list[Stuck] = []
        for (_, members, about), traces in self._groups.items():
            found = self._stuck_in_group(about or "a group", members, traces)
            if found is not None:
                all_stuck.append(found)
        waiting = {rank for stuck in all_stuck for rank in stuck.waiting}

        def order(stuck: Stuck) -> tuple[bool, bool, int, float]:
            """Return the sorting key: mismatches first, then groups that name ranks to blame."""
            is_mismatch, names_ranks = stuck.kind is StuckKind.MISMATCH, bool(stuck.odd)
            victims = waiting.intersection(stuck.odd)  # missing here, but they wait in other groups
            return not is_mismatch, not names_ranks, len(victims), stuck.since

        return min(all_stuck, key=order, default=None)

    def _stuck_in_group(
        self, group: str, members: Iterable[int], traces: Mapping[int, Trace]
    ) -> Stuck | None:
        """Return where a group is stuck; None if all finished, or no rank is known to wait."""
        if not members:  # the dumps do not name them
            members = range(self._world) if group == DEFAULT_GROUP else traces
        newest = max(trace.last for trace in traces.values())
        oldest = min(trace.last for trace in traces.values())
        if mismatch := self._find_mismatch(group, traces, oldest):
            return mismatch
        if newest == oldest and all(trace.done >= newest for trace in traces.values()):
            return None
        number = min(newest, oldest + 1)  # the first that not all entered, or the newest
        behind = {rank for rank, trace in traces.items() if trace.last < number}
        # Members without a call in this group, but for those whose missing dump is excused.
        unknown = {*members} - traces.keys() - (self._excused - self.ranks)
        odd = tuple(sorted(behind | unknown))
        calls = {r: call for r, trace in traces.items() if (call := trace.call(number))}
        waiting = tuple(sorted(calls.keys() - set(odd)))
        if not waiting:
            return None
        entered = [traces[rank].entered_at for rank in waiting if traces[rank].last == number]
        late = {rank: traces[rank] for rank in odd if rank in traces}
        return Stuck(
            kind=StuckKind.MISSING if odd else StuckKind.UNFINISHED,
            group=group,
            number=number,
            call=Counter(calls[rank] for rank in waiting).most_common(1)[0][0],
            waiting=waiting,
            odd=odd,
            others={r: _call_text(trace.call(trace.last), trace.last) for r, trace in late.items()},
            since=max(entered, default=0.0),
        )

    def _find_mismatch(self, group: str, traces: Mapping[int, Trace], oldest: int) -> Stuck | None:
        """Find the first collective that the ranks called differently; `oldest`: all entered it."""
        done = min(trace.done for trace in traces.values())
        # Earlier ones are not recorded by all, or have harmed nothing if they differ.
        start = max(*(t.first for t in traces.values()), oldest - _COMPARED, done - _PASSED, 0)
        for number in range(start, oldest + 1):
            calls = {r: call for r, trace in traces.items() if (call := trace.call(number))}
            counts = Counter(call.signature for call in calls.values())
            if len(counts) < 2:
                continue
            first = calls[min(calls)].signature  # of the lowest rank: it decides between two halves
            usual = max(counts, key=lambda each: (counts[each], each == first))
            odd = tuple(sorted(r for r, call in calls.items() if call.signature != usual))
            waiting = tuple(sorted(calls.keys() - set(odd)))
            return Stuck(
                kind=StuckKind.MISMATCH,
                group=group,
                number=number,
                call=calls[waiting[0]],
                waiting=waiting,
                odd=odd,
                others={rank: _call_text(calls[rank], number) for rank in odd},
            )
        return None


def _call_text(call: Call | None, number: int) -> str:
    """Describe a call, as in `all_reduce #812 [[7]] Float at train.py:88 in step`; "" for None."""
    if call is None:
        return ""
    where = f" at {call.where}" if call.where else ""
    shape = f" {call.shape}" if call.shape else ""
    return f"{call.op} #{number}{shape}{where}"


def wording(stuck: Stuck) -> str:
    """Describe what the ranks wait for, as in `2 ranks wait in all_reduce #812 [[7]] Float`."""
    ranks = count(len(stuck.waiting), "rank") + (" wait" if len(stuck.waiting) > 1 else " waits")
    group = "" if stuck.group == DEFAULT_GROUP else f" of the group '{stuck.group}'"
    return f"{ranks} in {_call_text(stuck.call, stuck.number)}{group}"


class _PlainUnpickler(pickle.Unpickler):
    """Reads containers and plain values only: torch's dumps need no class."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")


# What torch's watchdogs print about a collective that timed out, compared rank by rank

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
_UNSIZED: Final = re.compile(r"SEND|RECV|ALL_?TO_?ALL|GATHER|SCATTER|COALESCED|BARRIER|UNKNOWN")
_MOST: Final = 50_000  # reports that are kept

T = TypeVar("T")  # where a line was found


@dataclass(frozen=True)
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
    _calls: dict[int | None, dict[str, tuple[str, T]]] = field(default_factory=dict)  # by rank
    left: int = _MOST

    def feed(self, text: str, rank: int | None, found: T) -> None:
        """Take a line of `rank` with one of WORDS; the line itself numbers ranks within a group."""
        if call := _CALL.search(text):
            self.left -= 1
            self._calls.setdefault(rank, {})[call["seq"]] = _signature(call), found
        elif status := _STATUS.search(text):
            self.left -= 1
            reports, reporter = self._groups.setdefault(status["group"], {}), int(status["rank"])
            entered, stuck = int(status["entered"]), status["stuck"]  # None: it has not timed out
            called, _ = self._calls.get(rank, {}).get(stuck, ("", found))
            if stuck or reporter not in reports:  # a timeout replaces a mere status
                reports[reporter] = _Report(entered, int(stuck) if stuck else None, called, found)

    def conclusions(self) -> Iterator[tuple[str, T]]:
        """Yield causes that the reports show, with the place of a rank that differs."""
        for reports in self._groups.values():
            yield from _conclude_group(list(reports.values()))
        # Calls do not name their group: compare them only if each rank timed out in one collective.
        if len(self._groups) > 1 or any(len(calls) > 1 for calls in self._calls.values()):
            return
        timed_out = [each for calls in self._calls.values() for each in calls.items()]
        if len({number for number, _ in timed_out}) == 1:
            yield from _mismatch([call for _, call in timed_out])


def _conclude_group(reports: list[_Report[T]]) -> Iterator[tuple[str, T]]:
    """Yield what the reports of a process group show: ranks behind the others, or another call."""
    waiting = [each for each in reports if each.stuck is not None]
    if not waiting or any(_PAIRWISE.match(each.call) for each in waiting):  # not comparable
        return
    newest = max(each.stuck or 0 for each in waiting)
    behind = [each for each in reports if each.entered < newest]
    if behind and 2 * len(behind) <= len(reports):  # the odd ones are at most half
        waits_earlier = any(each.stuck is not None for each in behind)  # in an earlier collective
        yield MISMATCH if waits_earlier else MISSING, behind[0].found
    elif all(each.stuck == newest for each in waiting):
        yield from _mismatch([(each.call, each.found) for each in waiting if each.call])


def _mismatch(calls: list[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yield the rarest of the calls of a collective, if they differ."""
    names = [signature for signature, _ in calls]
    if len(set(names)) > 1:
        yield MISMATCH, min(calls, key=lambda call: names.count(call[0]))[1]


def _signature(call: re.Match[str]) -> str:
    """Return what must be the same on all ranks."""
    op = call["op"]
    return op if _UNSIZED.search(op) or not call["size"] else f"{op} {call['size']}"
