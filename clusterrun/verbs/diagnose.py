"""Name why a run failed, or why the logs of any job show that it did."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from clusterrun.backends.status import JobStatus
from clusterrun.diagnosis.lines import PrintedLine, read_line
from clusterrun.diagnosis.scan import UNCAUGHT, Scanner
from clusterrun.diagnosis.table import Role
from clusterrun.diagnosis.weigh import Verdict, by_numbers, verdict_of
from clusterrun.errors import UsageError
from clusterrun.logformat.lines import Stream
from clusterrun.logformat.notes import Memory
from clusterrun.logs.files import LogFile, find_files
from clusterrun.logs.sources import OVERVIEW, Query, Source, sources_of
from clusterrun.logs.tail import find_newest
from clusterrun.node.base.stderr import PREFIX
from clusterrun.node.recovery.printed import ECHO
from clusterrun.node.recovery.printed import SLURM as SLURM_LINES
from clusterrun.rundir.claims import printed_before
from clusterrun.rundir.outcome import Cause, Outcome, Reason
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.files import end_of
from clusterrun.shared.state import JobState
from clusterrun.verbs import hangs, notes
from clusterrun.verbs.causes import known_causes
from clusterrun.verbs.find import Which, find_record
from clusterrun.verbs.status import status
from clusterrun.verbs.usual import subtract

STDIN: Final = "-"
# Sources of what is in no log; all are compared.
AGENTS, SLURM, RANKS = "agents", "Slurm", "ranks"
REPORTED: Final = (AGENTS, SLURM, RANKS, *notes.SOURCES, hangs.RECORDER)
MOST_LINES: Final = 50_000  # of an attempt, the newest
_TRACEBACK: Final = "Traceback (most recent call last):"
_BATCH_BYTES: Final = 256 * 1024
_PIECE_BYTES: Final = 256 * 1024  # a longer line counts as several
_SHOWN_LINES: Final = 20_000  # after so many a reader hears of them
_MOST_MISSING: Final = 1 / 3  # of the ranks that timed out
_LAST_S: Final = 600  # of the rank that failed first, everything
_RANK_OF_FILE: Final = re.compile(r"rank[_-]?(\d{1,7})(?!\d)")

_BY_STATE: Final = {
    JobState.TIMEOUT: "slurm_time_limit",
    JobState.DEADLINE: "slurm_time_limit",
    JobState.CANCELLED: "slurm_cancelled",
    JobState.PREEMPTED: "slurm_preempted",
    JobState.NODE_FAIL: "slurm_node_fail",
    JobState.BOOT_FAIL: "slurm_node_boot",
    JobState.OUT_OF_MEMORY: "host_oom",
}
_BY_OUTCOME: Final = {
    Cause.WORLD: ("world_size_not_joined", Role.ROOT),
    Cause.WORLD_ELSEWHERE: ("world_size_not_joined", Role.ROOT),
    Cause.NODE_LOST: ("slurm_node_fail", Role.ROOT),
    Cause.VANISHED: ("slurm_node_fail", Role.ROOT),
    Cause.PREFLIGHT: ("preflight_failed", Role.ROOT),
    Cause.RENDEZVOUS: ("rendezvous_unreachable", Role.EITHER),
    Cause.HUNG: ("hang_no_timeout", Role.EITHER),
    Cause.HALTED: ("hang_no_timeout", Role.EITHER),
    Cause.CANCELLED: ("slurm_cancelled", Role.EITHER),
}
# Ends that ranks may not have come to.
_BEFORE_RANKS: Final = (
    *(Cause.LAUNCHER, Cause.NODE_UNFIT, Cause.PREFLIGHT, Cause.RENDEZVOUS),
    *(Cause.NODE_LOST, Cause.VANISHED),
)
_BY_REASON: Final = {
    Reason.END: "slurm_cancelled",
    Reason.CANCEL: "slurm_cancelled",
    Reason.TIME_LIMIT: "slurm_time_limit",
    Reason.PREEMPT: "slurm_preempted",
    Reason.SIGNAL: "sigterm_external",
}
_BY_SIGNAL: Final = {
    9: ("host_oom", Role.CONFIRMATION),
    7: ("shm_exhausted", Role.CONFIRMATION),
    11: ("segfault", Role.ROOT),
    6: ("segfault", Role.CONFIRMATION),
    15: ("sigterm_external", Role.EITHER),
}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why a run failed. `verdict` None: no cause was found; `lines` were read.

    `subtracted` kinds of lines were left out, since they were also printed when it went well.
    `memory` is what the memory cgroup counted on the nodes that noted it, `changes` the checks of
    nodes that became worse since the start.
    """

    verdict: Verdict | None
    lines: int
    job: JobStatus | None = None
    attempt: int = 0
    subtracted: int = 0
    memory: Mapping[str, Memory] = field(default_factory=dict)
    changes: tuple[notes.Worsened, ...] = ()

    @property
    def failure(self) -> Outcome | None:
        """How the attempt failed, as its agents recorded it."""
        attempts = self.job.attempts if self.job else ()
        ends = (each.outcome for each in attempts if each.number == self.attempt)
        found = next((end for end in ends if end and end.cause.is_failure), None)
        return found or (self.job.failure if self.job and not self.attempt else None)


def diagnose(job: Which | None = None, *, attempt: int | None = None) -> Diagnosis:
    """Diagnose a job by what Slurm, its agents and its logs report.

    None is this project's newest run, and its newest attempt. Raises JobNotFoundError.
    """
    found = status(find_record(job))
    paths = found.record.paths
    number = paths.newest_attempt() if attempt is None else attempt
    outcome = next((each.outcome for each in found.attempts if each.number == number), None)
    is_newest = number == paths.newest_attempt()
    outcome = outcome or (None if number else found.failure)  # it failed before its first attempt
    is_completed = outcome is not None and outcome.cause is Cause.COMPLETED
    if is_completed and found.state not in _BY_STATE:
        return Diagnosis(verdict=None, lines=0, job=found, attempt=number)
    state = found.state if is_newest else None
    answer = diagnose_attempt(found.record, number, outcome, state=state)
    return dataclasses.replace(answer, job=found)


def diagnose_attempt(
    record: JobRecord, number: int, outcome: Outcome | None, *, state: JobState | None = None
) -> Diagnosis:
    """Diagnose an attempt; `state` is the job's, if this is its newest attempt."""
    scanner = Scanner(table=known_causes(), ranks=set(range(record.world_size)))
    paths = record.paths
    files = find_files(paths, number)
    loud: set[int | None] = set()
    for line in _all_printed(paths, number, outcome, loud):
        scanner.feed(line)
    scanner.leave_out(  # guesses at the size of a world; that of a run was checked
        each
        for each in scanner.causal()
        if each.cause.id == "world_size_mismatch" and each.role is Role.CONFIRMATION
    )
    subtracted = subtract(scanner, record, lambda run, at: _all_printed(run, at, None, set()))
    _add_missing(scanner, files, record.world_size)
    is_hung = outcome is not None and outcome.cause in (Cause.HUNG, Cause.HALTED)
    hangs.add_evidence(scanner, hangs.recorded(paths, number), is_hung=is_hung)
    noted = notes.read_notes(paths, number)
    memory = notes.memory_of(noted)
    notes.add_kills(scanner, memory, outcome)
    if outcome is not None:
        _add_outcome(scanner, outcome, memory, loud)
    notes.add_notes(scanner, noted, outcome)
    changes = notes.changes_of(noted)
    notes.add_changes(scanner, changes)
    if state in _BY_STATE:
        source = SLURM if record.cluster.scheduler.reads_sbatch else AGENTS
        line = PrintedLine(number=0, text=f"the job is {state.value}", source=source)
        scanner.add(_BY_STATE[state], Role.ROOT, line)
    verdict = verdict_of(scanner)
    if verdict and verdict.cause.id == "peer_died":  # nothing shows why it died
        hangs.add_leavers(scanner, paths, number)
        verdict = verdict_of(scanner)
    answer = Diagnosis(verdict=verdict, lines=scanner.lines, attempt=number, memory=memory)
    return dataclasses.replace(answer, subtracted=subtracted, changes=changes)


def place_of(line: PrintedLine, *, is_of_job: bool) -> str:
    """Name who reported or printed a line: a source, a place in a file, or a rank and its node."""
    if line.source in REPORTED:
        return line.source
    if line.file:
        return f"{line.file}:{line.number}"
    if not is_of_job:
        return f"line {line.number}"
    rank = f"rank {line.rank}" if line.rank is not None else "launcher"
    return f"{rank} on {line.node}"


def _all_printed(
    paths: RunPaths, attempt: int, outcome: Outcome | None, loud: set[int | None]
) -> Iterator[PrintedLine]:
    """Yield what an attempt printed; add the ranks that printed to stderr to `loud`."""
    yield from _batch_output(paths, attempt, outcome)
    number = 0
    for each in find_newest(_sources(find_files(paths, attempt), outcome), MOST_LINES).lines:
        if each.stream not in (Stream.AGENT, Stream.GAP):
            number += 1
            if each.stream is Stream.ERR:
                loud.add(each.rank)
            text, rank, node = each.text.decode("utf-8", "replace"), each.rank, each.node
            found = read_line(text, number=number, file="", rank=rank, node=node)
            source = f"{node}\0{rank}\0{each.stream.value}{found.source}"
            yield found._replace(source=source, at=each.epoch_us / 1e6)


def _add_outcome(
    scanner: Scanner, outcome: Outcome, memory: Mapping[str, Memory], loud: Container[int | None]
) -> None:
    """Add what the agents know: they see signals, exits and ranks that never joined.

    `loud` are the ranks that printed to stderr.
    """
    text = outcome.message or outcome.reason
    where = f" at {outcome.where}" if outcome.where and outcome.where not in text else ""
    line = PrintedLine(
        number=0,
        text=text + where,
        source=AGENTS,
        rank=outcome.rank,
        node=outcome.node or "",
        at=outcome.ended_at,
    )
    texts = text.splitlines()
    if outcome.cause is Cause.EXCEPTION:
        texts = [_TRACEBACK, *texts]
    is_printed = not _of_rank(scanner, outcome.rank).isdisjoint(texts)
    for each in () if is_printed else texts:  # the log has what is around it
        scanner.feed(line._replace(text=each))
    is_reported = any(each.line.source == AGENTS for each in scanner.causal())
    if outcome.cause is Cause.EXCEPTION and not (is_printed or is_reported):
        scanner.add(UNCAUGHT, Role.ROOT, line)
    is_of_launcher = outcome.cause is Cause.LAUNCHER and not outcome.signal
    if is_of_launcher and {(x.cause.id, x.line.rank) for x in scanner.causal()} == {
        (UNCAUGHT, None)
    }:
        scanner.add("launcher_failed", Role.ROOT, line)
    is_unexplained = not _of_rank(scanner, outcome.rank) and by_numbers(scanner) is None
    if outcome.cause is Cause.EXIT and is_unexplained:
        silent = "" if outcome.rank in loud else " and printed no error"
        scanner.add(UNCAUGHT, Role.EITHER, line._replace(text=text + silent))
    # Blame no node for a failed preflight if they share what failed.
    is_before = outcome.cause is Cause.PREFLIGHT
    unfit = [node for node in outcome.unfit if is_before and node in outcome.exclude]
    for name, role in filter(None, (_by_outcome(outcome), _by_signal(outcome, memory))):
        for node in unfit or (line.node,):
            scanner.add(name, role, line._replace(node=node))


def _by_signal(outcome: Outcome, memory: Mapping[str, Memory]) -> tuple[str, Role] | None:
    """Return what a signal shows; the kernel killed nothing if its count did not rise."""
    found = memory.get(outcome.node or "")
    if outcome.signal == signal.SIGKILL and found and not found.kills:
        return "sigkill_external", Role.EITHER
    return _BY_SIGNAL.get(outcome.signal)


def _of_rank(scanner: Scanner, rank: int | None) -> set[str]:
    """Return the lines of a rank that can show the cause."""
    return {each.line.text.strip() for each in scanner.causal() if each.line.rank == rank}


def _by_outcome(outcome: Outcome) -> tuple[str, Role] | None:
    if outcome.cause in (Cause.HUNG, Cause.HALTED) and outcome.rank is not None:
        return "hang_rank_missing", Role.ROOT
    if outcome.cause is Cause.INTERRUPTED and outcome.interruption:
        return _BY_REASON[outcome.interruption], Role.ROOT
    return _BY_OUTCOME.get(outcome.cause)


def _add_missing(scanner: Scanner, files: Sequence[LogFile], world: int) -> None:
    """Add the ranks that did not time out in a collective, if nearly all others did."""
    waited = {
        rank
        for (name, _), ranks in scanner.seen_on.items()
        for rank in ranks
        if name == "nccl_timeout"
    }
    missing = sorted(set(range(world)) - waited)
    if not waited or _MOST_MISSING * len(waited) < len(missing):
        return
    text = f"{len(waited)} of {world} ranks timed out in a collective, the others did not"
    for rank in missing:
        node = next((file.node for file in files if file.ranks and rank in file.ranks), "")
        line = PrintedLine(number=0, text=text, source=RANKS, rank=rank, node=node)
        scanner.add("hang_rank_missing", Role.EITHER, line)


def diagnose_logs(
    names: Sequence[str], *, stdin: BinaryIO, show: Callable[[int], None] = lambda lines: None
) -> Diagnosis:
    """Diagnose the logs of any job: one interleaved file, or one for each rank or node.

    `-` is standard input. `show` hears now and then how many lines were read. Raises UsageError
    for a file that cannot be read.
    """
    scanner = Scanner(table=known_causes())
    for line in _lines_of(names, stdin):
        scanner.feed(line)
        if not scanner.lines % _SHOWN_LINES:
            show(scanner.lines)
    return Diagnosis(verdict=verdict_of(scanner), lines=scanner.lines)


def _batch_output(paths: RunPaths, attempt: int, outcome: Outcome | None) -> Iterator[PrintedLine]:
    """Yield what Slurm and setup lines printed during an attempt.

    Once ranks have run, no setup line failed: an error among what these printed is no cause. What
    the agents print is in the outcome, and they exit with the status of the rank that failed.
    """
    until = printed_before(paths, attempt + 1) or None
    if until is None and attempt != paths.newest_attempt():
        return
    since = printed_before(paths, attempt)
    data = end_of(paths.batch_output, _BATCH_BYTES, since=since, until=until)
    has_run = outcome is not None and outcome.cause not in _BEFORE_RANKS
    for number, text in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        is_echo = has_run and ECHO.search(text)
        is_of_slurm = text.startswith(SLURM_LINES) and not is_echo
        if is_of_slurm or not (has_run or text.startswith(PREFIX)):
            yield read_line(text, number=number, file=paths.batch_output.name)


def _sources(files: Sequence[LogFile], outcome: Outcome | None) -> list[Source]:
    """Choose the overview, and all that the rank that failed first printed in the end."""
    chosen = sources_of(files, OVERVIEW)
    if outcome is None or not outcome.rank:
        return chosen
    since_us = int((outcome.ended_at - _LAST_S) * 1e6)
    query = Query(ranks=frozenset({outcome.rank}), since_us=since_us)
    own = sources_of([file for file in files if file.node == outcome.node], query)
    if not own:
        return chosen
    return [_without(source, outcome.rank) for source in chosen] + own


def _without(source: Source, left_out: int) -> Source:
    takes = source.takes
    return dataclasses.replace(
        source, takes=lambda rank, stream: rank != left_out and takes(rank, stream)
    )


def _lines_of(names: Sequence[str], stdin: BinaryIO) -> Iterator[PrintedLine]:
    for name in names:
        found = _RANK_OF_FILE.search(Path(name).name)
        rank = int(found[1]) if found else None
        own = name if len(names) > 1 else ""
        try:
            with nullcontext(stdin) if name == STDIN else Path(name).open("rb") as file:
                pieces = iter(lambda file=file: file.readline(_PIECE_BYTES), b"")  # type: ignore[misc]
                for at, raw in enumerate(pieces, 1):
                    yield read_line(raw.decode("utf-8", "replace"), number=at, file=own, rank=rank)
        except OSError as error:
            raise UsageError(f"cannot read the log '{name}'", cause=error.strerror or "") from error
