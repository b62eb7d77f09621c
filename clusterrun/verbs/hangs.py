"""Where the ranks of an attempt hang: from flight recorders and stacks, of its end or of now."""

from __future__ import annotations

import os
import re
import tarfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from clusterrun.diagnosis.collectives import Recordings, Stuck, StuckKind, wording
from clusterrun.diagnosis.kinds import NoteSource
from clusterrun.diagnosis.lines import PrintedLine
from clusterrun.diagnosis.scan import Scanner
from clusterrun.diagnosis.table import Role
from clusterrun.errors import ClusterrunError
from clusterrun.logs.merge import no_collection
from clusterrun.rundir.attempt import read_attempt
from clusterrun.rundir.end import answer_path, request_look
from clusterrun.rundir.events import EventType, read_ends
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import read_json
from clusterrun.shared.state import JobState

if TYPE_CHECKING:  # slow to import
    from clusterrun.backends.status import JobStatus
    from clusterrun.node.watch.hangs import RankPlace

RECORDER = "flight recorder"  # a source of evidence
LASTING_S: Final = 10.0  # a wait of a healthy training is shorter
ANSWER_S: Final = 40.0  # the agents wait for silent nodes for 20 s
_POLL_S: Final = 0.1
_MOST_NAMED: Final = 8  # ranks, each with its own line
_LEAST_PRESENT: Final = 3  # ranks in a collective, for each one that is blamed for its absence
_RANK: Final = re.compile(r"(?:^|_)rank_(\d+)$")
_CAUSES: Final = {StuckKind.MISSING: "hang_rank_missing", StuckKind.MISMATCH: "collective_desync"}


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Where the ranks are; `dumped` counts flight recorders, `silent` nodes did not answer."""

    stuck: Stuck | None = None
    places: tuple[RankPlace, ...] = ()
    nodes: Mapping[int, str]
    dumped: int = 0
    silent: tuple[str, ...] = ()
    looked_at: float = 0.0

    @property
    def is_lasting(self) -> bool:
        """Return whether ranks have waited longer than in a healthy training."""
        stuck = self.stuck
        return stuck is not None and self.looked_at - (stuck.since or 0.0) >= LASTING_S


class Group(NamedTuple):
    """Ranks that are at one place of the script, waiting in a collective or not."""

    where: str
    ranks: tuple[int, ...]
    is_waiting: bool


def read_hang(paths: RunPaths, attempt: int) -> Hang:
    """Read the stacks and the dumps of flight recorders that an ended attempt left."""
    dumps = [paths.flight_dumps(attempt, node) for node in read_attempt(paths, attempt).nodes]
    return _make_hang(_nodes(paths, attempt), read_json(paths.stacks(attempt)) or {}, dumps, None)


def _make_hang(
    nodes: dict[int, str], stacks: Mapping[str, Any], dumps: list[Path], only: set[int] | None
) -> Hang:
    """Compare stacks, and the flight-recorder dumps of the ranks `only`; None: of all ranks."""
    from clusterrun.node.watch.hangs import from_data

    places = tuple(from_data(stacks))
    waiting = [x.rank for x in places if x.is_waiting and not x.state]  # state "": it runs
    recordings = Recordings(len(nodes), waiting)
    for path in dumps:  # one by one: all of them would not fit in memory
        # A dump has 50,000 small objects and no cycle: garbage collection would only cost time.
        with no_collection(), suppress(OSError, tarfile.TarError), tarfile.open(path) as archive:
            for member in archive:
                found, file = _RANK.search(member.name), archive.extractfile(member)
                if found and file and (only is None or int(found[1]) in only):
                    recordings.add(int(found[1]), file.read())
    return Hang(stuck=recordings.stuck(), places=places, nodes=nodes, dumped=len(recordings.ranks))


def add_absent(scanner: Scanner, paths: RunPaths, attempt: int) -> None:
    """Add the ranks that did not time out in a collective, if nearly all others did."""
    ranks_by_role = (scanner.seen_on.get(("nccl_timeout", role), ()) for role in Role)
    timed_out = set[int]().union(*ranks_by_role)
    nodes = _nodes(paths, attempt)
    absent = sorted({*nodes} - timed_out)
    if len(timed_out) < _LEAST_PRESENT * len(absent):
        return  # too many are absent to blame them
    text = f"{len(timed_out)} of {len(nodes)} ranks timed out in a collective; the others did not"
    for rank in absent:
        line = PrintedLine(0, text, NoteSource.AGENT.value, rank=rank, node=nodes[rank])
        scanner.add("hang_rank_missing", Role.EITHER, line)


def add_leavers(scanner: Scanner, paths: RunPaths, attempt: int) -> None:
    """Add the ranks that ended with status 0 while others were in a collective, if they are few."""
    names = read_attempt(paths, attempt).nodes
    nodes = _nodes(paths, attempt)
    events = [event for name in names for event in read_ends(paths.events(name), attempt)]
    exits = [event for event in events if event.type is EventType.RANK_EXIT]
    leavers = sorted({each.rank for each in exits if each.code == 0 and each.rank is not None})
    if not 0 < len(leavers) < len(nodes) / 2:
        return
    for rank in leavers[:_MOST_NAMED]:
        text = f"rank {rank} ended with status 0 while others were in a collective"
        line = PrintedLine(0, text, NoteSource.AGENT.value, rank=rank, node=nodes.get(rank, ""))
        scanner.add("collective_desync", Role.EITHER, line)


def locate_ranks(job: JobStatus) -> Hang:
    """Ask the agents of a running job where its ranks are. Raises ClusterrunError."""
    paths, attempt = job.record.paths, job.attempt
    if job.state is not JobState.RUNNING or not attempt:
        hint = "leave out --stacks: diagnose reads the records of a job that has ended"
        raise ClusterrunError(f"job {job.record.job_id} is not running", hint=hint)
    answer = _ask(paths.attempt(attempt))
    silent = tuple(map(str, answer.get("silent", ())))
    heard = [node for node in read_attempt(paths, attempt).nodes if node not in silent]
    dumps = [paths.live_dumps(attempt, node) for node in heard]
    found = _make_hang(_nodes(paths, attempt), answer, dumps, set(answer.get("dumped", ())))
    return replace(found, silent=silent, looked_at=time.time())


def _ask(directory: Path) -> Mapping[str, Any]:
    """Ask the agents; return their answer: stacks, `dumped` ranks and `silent` nodes."""
    try:
        request = request_look(directory)
    except OSError as error:
        raise ClusterrunError(f"cannot write to {directory}", cause=str(error)) from error
    answer, deadline = answer_path(request), time.monotonic() + ANSWER_S
    try:
        # NFS caches for a minute that a name is missing, but a listing is fresh.
        while answer.name not in os.listdir(directory) or (found := read_json(answer)) is None:
            if time.monotonic() > deadline:
                text = f"the agents did not answer within {ANSWER_S:.0f} s"
                hint = "check whether the job's ranks have started or ended: clusterrun status"
                raise ClusterrunError(text, hint=hint)
            time.sleep(_POLL_S)
        return found
    finally:
        for path in (request, answer):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _nodes(paths: RunPaths, attempt: int) -> dict[int, str]:
    ranks = read_attempt(paths, attempt).ranks_by_node
    return {rank: node for node, found in ranks.items() for rank in found}


def groups(hang: Hang) -> list[Group]:
    """Return the ranks by place, the smallest group first: it is the suspect."""
    found: dict[tuple[str, bool], list[int]] = {}
    for place in hang.places:
        where = place.state or place.where or "at an unknown place"
        found.setdefault((where, place.is_waiting), []).append(place.rank)
    unsorted = (Group(at, tuple(sorted(ranks)), waits) for (at, waits), ranks in found.items())
    return sorted(unsorted, key=lambda group: (len(group.ranks), group.is_waiting, group.where))


def sentences(hang: Hang, stuck: Stuck) -> list[tuple[int | None, str]]:
    """Return a sentence for each rank to blame, then one without a rank on the collective."""
    blamed = ((rank, _blame(hang, stuck, rank)) for rank in stuck.odd[:_MOST_NAMED])
    return [*blamed, (None, wording(stuck))]


def _blame(hang: Hang, stuck: Stuck, rank: int) -> str:
    """Say what a rank did instead of entering the collective."""
    name = f"rank {rank} ({hang.nodes.get(rank, '?')})"
    called = stuck.others.get(rank, "")  # instead of the collective, or last
    if stuck.kind is StuckKind.MISMATCH:
        return f"{name} called {called}"
    place = next((place for place in hang.places if place.rank == rank), None)
    if place is not None and (place.state or place.where):
        at = f"at {place.where}" if place.where else ""
        return " ".join(filter(None, (f"{name} is", place.state, at)))
    return f"{name} last entered {called}" if called else f"{name} left no dump"


def add_evidence(scanner: Scanner, hang: Hang, *, is_hung: bool) -> None:
    """Add what recorders and stacks show; `is_hung`: the hang watch ended the attempt."""
    stuck = hang.stuck
    if stuck is None:
        return
    name = _CAUSES.get(stuck.kind, "hang_no_timeout")
    is_sure = stuck.kind is StuckKind.MISMATCH or (is_hung and stuck.kind is StuckKind.MISSING)
    for rank, text in sentences(hang, stuck):
        node = hang.nodes.get(rank, "") if rank is not None else ""
        line = PrintedLine(0, text, RECORDER, rank=rank, node=node)
        scanner.add(name, Role.ROOT if is_sure else Role.EITHER, line)
