"""Find the cause of a failure: of a run, or in the logs of any job.

`python -m clusterrun.verbs.diagnose RUN_DIR` prints the verdict on an attempt as JSON, for the rule
book; it reads the outcome of the attempt from standard input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from clusterrun.diagnosis.kinds import Memory, Note, NoteSource
from clusterrun.diagnosis.lines import PrintedLine, read_line
from clusterrun.diagnosis.scan import UNCAUGHT, Scanner
from clusterrun.diagnosis.table import Role, Table, built_in, parse
from clusterrun.diagnosis.weigh import Verdict, by_numbers, verdict_of
from clusterrun.errors import UsageError
from clusterrun.logformat.lines import Stream
from clusterrun.logs.merge import find_newest
from clusterrun.logs.sources import OVERVIEW, LogFile, Query, Source, find_files, sources_of
from clusterrun.node.base.stderr import PREFIX
from clusterrun.node.recovery.printed import ECHO
from clusterrun.node.recovery.printed import SLURM as SLURM_LINES
from clusterrun.rundir import record as records
from clusterrun.rundir.attempt import read_attempt
from clusterrun.rundir.end import Cause, Reason
from clusterrun.rundir.events import EventType, read_ends
from clusterrun.rundir.outcome import Outcome, ShortVerdict
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.files import end_of
from clusterrun.shared.installed import PluginGroup, load_all
from clusterrun.shared.state import JobState
from clusterrun.shared.typed import decoded
from clusterrun.verbs import hangs
from clusterrun.verbs.find import Which, find_record

if TYPE_CHECKING:  # slow to import
    from importlib.metadata import EntryPoint

    from clusterrun.backends.status import JobStatus

STDIN: Final = "-"
AGENTS, SLURM = NoteSource.AGENT.value, "Slurm"
# Sources of what is in no log.
REPORTERS: Final = (SLURM, *(source.value for source in NoteSource), hangs.RECORDER)
MOST_LINES: Final = 50_000  # of an attempt, the newest
_BATCH_BYTES: Final = 256 * 1024
_PIECE_BYTES: Final = 256 * 1024  # a longer line counts as several
_LAST_S: Final = 600  # of the rank that failed first, everything
MOST_RANKS: Final = 64  # of a verdict; nodes are all named: many faulty ones are no fault of theirs
_LETTERS: Final = 300
# The first form is of many tools, the second of submitit: 4711_3_log.out.
_RANK_OF_FILE: Final = re.compile(r"rank[_-]?(\d{1,7})(?!\d)|\A\d+_(\d{1,7})_log\.")
LOG_ENDS: Final = (".log", ".out", ".err")  # of names of logs

_BY_OTHER_RANKS: Final = {  # causes that only a comparison of the ranks can explain
    "nccl_timeout": hangs.add_absent,
    "peer_died": hangs.add_leavers,
}
# Ends that ranks may not have come to.
_BEFORE_RANKS: Final = (
    *(Cause.LAUNCHER, Cause.NODE_UNFIT, Cause.PREFLIGHT, Cause.RENDEZVOUS),
    *(Cause.NODE_LOST, Cause.VANISHED),
)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why a run failed."""

    verdict: Verdict | None  # None: no cause was found
    lines: int  # that were read
    is_of_logs: bool = False  # no job is known
    job: JobStatus | None = None
    attempt: int = 0
    memory: Mapping[str, Memory] = field(default_factory=dict)  # what its cgroup counted, by node
    failure: Outcome | None = None  # of the attempt, by its agents


def diagnose(job: Which | None = None, *, attempt: int | None = None) -> Diagnosis:
    """Diagnose a job by what Slurm, its agents and its logs report.

    None is this project's newest run, and its newest attempt. Raises JobNotFoundError.
    """
    from clusterrun.verbs.status import status

    found = status(find_record(job))
    newest = found.record.paths.newest_attempt()
    number = newest if attempt is None else attempt
    outcome = next((each.outcome for each in found.attempts if each.number == number), None)
    if outcome is None and not number:
        outcome = found.failure  # the run failed before its first attempt
    is_completed = outcome is not None and outcome.cause is Cause.COMPLETED
    if is_completed and found.state not in _BY_STATE:  # the scheduler reports no failure either
        return Diagnosis(verdict=None, lines=0, job=found, attempt=number)
    state = found.state if number == newest else None
    answer = diagnose_attempt(found.record, number, outcome, state=state)
    has_failed = outcome is not None and (outcome.cause.is_failure or not number)
    return dataclasses.replace(answer, job=found, failure=outcome if has_failed else None)


def diagnose_attempt(
    record: JobRecord, number: int, outcome: Outcome | None, *, state: JobState | None = None
) -> Diagnosis:
    """Diagnose an attempt; `state` is the job's, if this is its newest attempt."""
    scanner = Scanner(table=causes()[0], ranks=set(range(record.world_size)))
    paths = record.paths
    for line in _printed_lines(paths, number, outcome):
        scanner.feed(line)
    # This sign only suggests that the world has a wrong size, and a run has checked its size.
    scanner.leave_out("world_size_mismatch", Role.CONFIRMATION)
    # What is added below may depend on what was found above.
    is_hung = outcome is not None and outcome.cause in (Cause.HUNG, Cause.HALTED)
    hangs.add_evidence(scanner, hangs.read_hang(paths, number), is_hung=is_hung)
    noted = [*_read_notes(paths, number)]
    memory = {node: note.memory for node, _, note in noted if note.memory}
    _add_kills(scanner, memory, outcome)
    if outcome is not None:
        _add_outcome(scanner, outcome, memory)
    _add_notes(scanner, noted, outcome)
    _add_state(scanner, state, SLURM if record.cluster.scheduler.reads_sbatch else AGENTS)
    verdict = verdict_of(scanner)
    add_ranks = _BY_OTHER_RANKS.get(verdict.cause.id) if verdict else None
    if add_ranks:  # only a comparison of the ranks explains this cause
        add_ranks(scanner, paths, number)
        verdict = verdict_of(scanner)
    return Diagnosis(verdict=verdict, lines=scanner.lines, attempt=number, memory=memory)


def place_of(line: PrintedLine, found: Diagnosis) -> str:
    """Name who reported or printed a line: a source, a place in a file, or a rank and its node."""
    if line.source in REPORTERS:
        return line.source
    if line.file:
        return f"{line.file}:{line.number}"
    if found.is_of_logs:
        return f"line {line.number}"
    rank = f"rank {line.rank}" if line.rank is not None else "launcher"
    return f"{rank} on {line.node}"


def _printed_lines(paths: RunPaths, attempt: int, outcome: Outcome | None) -> Iterator[PrintedLine]:
    """Yield what an attempt printed: first its batch script, then its ranks and launchers."""
    yield from _batch_output(paths, attempt, outcome)
    number = 0
    for line in find_newest(_sources(find_files(paths, attempt), outcome), MOST_LINES):
        if line.stream not in (Stream.AGENT, Stream.GAP):
            number += 1
            text, rank, node = line.text.decode("utf-8", "replace"), line.rank, line.node
            printed = read_line(text, number=number, file="", rank=rank, node=node)
            source = f"{node}\0{rank}\0{line.stream.value}{printed.source}"  # names a process
            yield printed._replace(source=source, at=line.epoch_us / 1e6)


@functools.cache
def causes() -> tuple[Table, tuple[str, ...]]:
    """Return all causes by id, those of installed packages too, and what cannot be loaded."""
    table = dict(built_in())

    def add(plugin: EntryPoint) -> None:
        directory = Path(plugin.load().__path__[0])
        added = parse(file.read_text("utf-8") for file in sorted(directory.glob("*.yaml")))
        if not added:
            raise ValueError(f"no cause in the .yaml files of {directory}")
        if taken := sorted(added.keys() & table.keys()):
            raise ValueError(f"{', '.join(taken)} exists already")
        table.update(added)

    return table, tuple(load_all(PluginGroup.CAUSES, add)[1])


def diagnose_logs(
    names: Sequence[str], *, stdin: BinaryIO, state: JobState | None = None
) -> Diagnosis:
    """Diagnose logs of any job: files, directories, - for standard input. Raises UsageError.

    `state` is what Slurm reports of the job.
    """
    scanner = Scanner(table=causes()[0])
    for line in _lines_of([file for name in names for file in _logs_in(name)], stdin):
        scanner.feed(line)
    _add_state(scanner, state, SLURM)
    return Diagnosis(verdict=verdict_of(scanner), lines=scanner.lines, is_of_logs=True)


def _logs_in(name: str) -> list[str]:
    """Return the logs of a directory, by their names and in their order; of a file, itself."""
    if name == STDIN or not os.path.isdir(name):
        return [name]
    found = (path for path in Path(name).rglob("*") if path.suffix.lower() in LOG_ENDS)
    if logs := sorted(str(path) for path in found if path.is_file()):
        return logs
    hint = f"name its files: of a directory, only those with {' '.join(LOG_ENDS)} are read"
    raise UsageError(f"no log in the directory '{name}'", hint=hint)


def _batch_output(paths: RunPaths, attempt: int, outcome: Outcome | None) -> Iterator[PrintedLine]:
    """Yield what Slurm and setup lines printed during an attempt, if it may be the cause.

    If ranks have run, the setup lines succeeded, so that no error that these printed is a cause.
    What the agents print is left out: it is in the outcome.
    """
    until = read_attempt(paths, attempt + 1).printed or None
    if until is None and attempt != paths.newest_attempt():
        return  # where its output ends is unknown
    since = read_attempt(paths, attempt).printed  # bytes of the output before it
    data = end_of(paths.batch_output, _BATCH_BYTES, since=since, until=until)
    have_ranks_run = outcome is not None and outcome.cause not in _BEFORE_RANKS
    for number, text in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        if text.startswith(SLURM_LINES):  # srun repeats the exit status of a rank that failed
            is_left_out = have_ranks_run and bool(ECHO.search(text))
        else:
            is_left_out = have_ranks_run or text.startswith(PREFIX)  # of the agents
        if not is_left_out:
            yield read_line(text, number=number, file=paths.batch_output.name)


def _sources(files: Sequence[LogFile], outcome: Outcome | None) -> list[Source]:
    """Choose rank 0, launcher, agents and errors; all last lines of the rank that failed first."""
    overview = sources_of(files, OVERVIEW)
    if outcome is None or not outcome.rank:  # the overview has all of rank 0
        return overview
    since_us = int((outcome.ended_at - _LAST_S) * 1e6)
    query = Query(ranks=frozenset({outcome.rank}), since_us=since_us)
    of_rank = sources_of([file for file in files if file.node == outcome.node], query)
    if not of_rank:
        return overview
    return [each.without(lambda rank, _: rank == outcome.rank) for each in overview] + of_rank


def _lines_of(names: Sequence[str], stdin: BinaryIO) -> Iterator[PrintedLine]:
    """Yield the lines of logs; a name such as rank_3.err gives the rank."""
    for name in names:
        found = _RANK_OF_FILE.search(Path(name).name)
        rank = int(found[1] or found[2]) if found else None
        own = name if len(names) > 1 else ""
        try:
            with contextlib.nullcontext(stdin) if name == STDIN else Path(name).open("rb") as file:
                number = 0
                while raw := file.readline(_PIECE_BYTES):
                    number += 1
                    text = raw.decode("utf-8", "replace")
                    yield read_line(text, number=number, file=own, rank=rank)
        except OSError as error:
            text, hint = f"cannot read the log '{name}'", "pass one job, or one or more logs"
            raise UsageError(text, cause=error.strerror or "", hint=hint) from error


# Evidence beside the logs: of the agents, of Slurm, and what nodes noted
_TRACEBACK: Final = "Traceback (most recent call last):"
_BY_STATE: Final = {
    **dict.fromkeys((JobState.TIMEOUT, JobState.DEADLINE), "slurm_time_limit"),
    JobState.CANCELLED: "slurm_cancelled",
    JobState.PREEMPTED: "slurm_preempted",
    JobState.NODE_FAIL: "slurm_node_fail",
    JobState.BOOT_FAIL: "slurm_node_boot",
    JobState.OUT_OF_MEMORY: "host_oom",
}
_BY_OUTCOME: Final = {
    **dict.fromkeys((Cause.WORLD, Cause.WORLD_ELSEWHERE), ("world_size_not_joined", Role.ROOT)),
    **dict.fromkeys((Cause.NODE_LOST, Cause.VANISHED), ("slurm_node_fail", Role.ROOT)),
    **dict.fromkeys((Cause.HUNG, Cause.HALTED), ("hang_no_timeout", Role.EITHER)),
    Cause.PREFLIGHT: ("preflight_failed", Role.ROOT),
    Cause.RENDEZVOUS: ("rendezvous_unreachable", Role.EITHER),
    Cause.CANCELLED: ("slurm_cancelled", Role.EITHER),
}
_BY_REASON: Final = {
    **dict.fromkeys((Reason.END, Reason.CANCEL), "slurm_cancelled"),
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
_GPU: Final = re.compile(r"\bGPU (\d{1,4})\b")
_OOM: Final = re.compile(r"[Oo]ut of memory: Kill|Killed process|oom_reaper:")
NodeNote = tuple[str, float, Note]  # what an agent noted: its node, and when (epoch seconds)


def _read_notes(paths: RunPaths, attempt: int) -> Iterator[NodeNote]:
    """Yield what the agents of an attempt noted, node by node."""
    known = read_attempt(paths, attempt).nodes
    nodes = known or [file.stem for file in paths.events_dir.glob("*.jsonl")]
    for node in sorted(nodes):
        for event in read_ends(paths.events(node), attempt):
            if event.type is EventType.NOTE:
                with contextlib.suppress(ValueError):  # a rank may write any event
                    yield event.node, event.at, decoded(Note, event.note)


def _add_state(scanner: Scanner, state: JobState | None, source: str) -> None:
    """Add the state of a job if it names a cause."""
    if state in _BY_STATE:
        line = PrintedLine(0, f"the job is {state.value}", source)
        scanner.add(_BY_STATE[state], Role.ROOT, line)


def _add_kills(scanner: Scanner, memory: Mapping[str, Memory], outcome: Outcome | None) -> None:
    """Add the OOM killer's kills: they are the root cause if they may have hit a rank."""
    with_kills = {node: found for node, found in memory.items() if found.kills}
    if outcome and outcome.signal == signal.SIGKILL and outcome.node in with_kills:
        with_kills = {outcome.node: with_kills[outcome.node]}  # it may have hit that rank
    role = Role.ROOT if _may_have_hit_rank(scanner, outcome) else Role.EITHER
    for node, found in with_kills.items():
        line = PrintedLine(0, str(found), NoteSource.CGROUP.value, node=node)
        scanner.add("host_oom", role, line)


def _may_have_hit_rank(scanner: Scanner, outcome: Outcome | None) -> bool:
    """Return whether a kill may have hit a rank, or a worker of its data loader."""
    may_be_killed = outcome is None or outcome.signal == signal.SIGKILL
    return may_be_killed or any(each.cause.id == "dataloader_killed" for each in scanner.findings())


def _add_notes(scanner: Scanner, noted: Iterable[NodeNote], outcome: Outcome | None) -> None:
    """Add what the kernel and NVML reported: the table knows their messages."""
    for node, at, note in noted:
        if note.source not in (NoteSource.KERNEL, NoteSource.NVML):
            continue
        line = PrintedLine(0, note.text, note.source.value, rank=note.rank, node=node, at=at)
        is_oom_kill = note.rank is None and _OOM.search(note.text)
        if note.held_gpu is not None:  # its memory was in use before the ranks started
            if _may_lack_memory(scanner, node, note.held_gpu):
                scanner.add("gpu_memory_held_or_faulty", Role.ROOT, line)
        elif is_oom_kill and not _may_have_hit_rank(scanner, outcome):
            scanner.add("host_oom", Role.EITHER, line)  # of another process
        else:
            scanner.feed(line)


def _may_lack_memory(scanner: Scanner, node: str, gpu: int) -> bool:
    """Return whether a CUDA OOM may be of this GPU: its message names no other GPU or node."""
    lines = [each.line for each in scanner.causal() if each.cause.id == "cuda_oom"]
    gpus = [_GPU.search(line.text) for line in lines if line.node in ("", node)]
    return any(named is None or int(named[1]) == gpu for named in gpus)


def _add_outcome(scanner: Scanner, outcome: Outcome, memory: Mapping[str, Memory]) -> None:
    """Add what the agents know: they see signals, exits and ranks that never joined."""
    text = outcome.message or outcome.reason
    where = f" at {outcome.where}" if outcome.where and outcome.where not in text else ""
    node, at = outcome.node or "", outcome.ended_at
    line = PrintedLine(0, text + where, AGENTS, rank=outcome.rank, node=node, at=at)
    heading = [_TRACEBACK] if outcome.cause is Cause.EXCEPTION else []
    message = [*heading, *text.splitlines()]
    is_printed = not _causal_lines(scanner, outcome.rank).isdisjoint(message)
    if not is_printed:  # a log that has the error also has what is around it
        for each in message:
            scanner.feed(line._replace(text=each))
    _add_unexplained(scanner, outcome, line, is_printed=is_printed)
    # If the nodes share what failed in the preflight, none of them is excluded: blame none.
    is_preflight = outcome.cause is Cause.PREFLIGHT
    blamed = [node for node in outcome.unfit if is_preflight and node in outcome.exclude]
    for cause, role in filter(None, (_by_outcome(outcome), _by_signal(outcome, memory))):
        for node in blamed or (line.node,):
            scanner.add(cause, role, line._replace(node=node))


def _add_unexplained(
    scanner: Scanner, outcome: Outcome, line: PrintedLine, *, is_printed: bool
) -> None:
    """Add a general cause if no line or loss explains a failure; `is_printed`: the log has it."""
    causal, text = scanner.causal(), outcome.message or outcome.reason
    is_reported = any(each.line.source == AGENTS for each in causal)
    # Only the launcher, whose lines have no rank, reported an error.
    is_of_launcher = {(each.cause.id, each.line.rank) for each in causal} == {(UNCAUGHT, None)}
    is_silent = not _causal_lines(scanner, outcome.rank) and by_numbers(scanner) is None
    if outcome.cause is Cause.EXCEPTION and not (is_printed or is_reported):
        scanner.add(UNCAUGHT, Role.ROOT, line)
    elif outcome.cause is Cause.LAUNCHER and not outcome.signal and is_of_launcher:
        scanner.add("launcher_failed", Role.ROOT, line)
    elif outcome.cause is Cause.EXIT and is_silent:
        scanner.add(UNCAUGHT, Role.EITHER, line._replace(text=text))


def _by_signal(outcome: Outcome, memory: Mapping[str, Memory]) -> tuple[str, Role] | None:
    """Return the cause, and its role, that a signal shows; not the OOM killer if it killed none."""
    counted = memory.get(outcome.node or "")
    if outcome.signal == signal.SIGKILL and counted and not counted.kills:
        return "sigkill_external", Role.EITHER
    return _BY_SIGNAL.get(outcome.signal)


def _causal_lines(scanner: Scanner, rank: int | None) -> set[str]:
    """Return the lines of a rank that may show the cause."""
    return {each.line.text.strip() for each in scanner.causal() if each.line.rank == rank}


def _by_outcome(outcome: Outcome) -> tuple[str, Role] | None:
    """Return the cause, and its role, that an outcome itself shows."""
    if outcome.cause in (Cause.HUNG, Cause.HALTED) and outcome.rank is not None:  # it is to blame
        return "hang_rank_missing", Role.ROOT
    if outcome.cause is Cause.INTERRUPTED and outcome.interruption:
        return _BY_REASON[outcome.interruption], Role.ROOT
    return _BY_OUTCOME.get(outcome.cause)


def prepare() -> None:
    """Parse the table of causes: a fork of the conductor then finds a cause at once."""
    Scanner(table=causes()[0])


def judged(run_dir: Path, outcome: Outcome) -> str:
    """Diagnose an attempt by what its agents and logs report; return the verdict as JSON."""
    record = records.read(RunPaths(root=run_dir))
    verdict = short(diagnose_attempt(record, outcome.attempt, outcome), most=MOST_RANKS)
    return json.dumps(dataclasses.asdict(verdict) if verdict else None)


def short(found: Diagnosis, *, most: int | None = None) -> ShortVerdict | None:
    """Return what `outcome.json` keeps of a verdict, with `most` ranks at most."""
    if (verdict := found.verdict) is None:
        return None
    cause, first = verdict.cause, verdict.first
    affected = {rank for each in verdict.consequences for rank in each.ranks}
    text, *more = (each.line.text.strip()[:_LETTERS] for each in verdict.evidence)
    limits = (found.memory[node].limit for node in verdict.nodes if node in found.memory)
    return ShortVerdict(
        cause=cause.id,
        means=cause.means,
        status=verdict.status,
        retry=verdict.retry,
        text=text,
        ranks=verdict.ranks[:most],
        nodes=verdict.nodes,
        blames_node=cause.blames_node,
        generic=cause.generic,
        steps=first.steps,
        advice=cause.do,
        place=place_of(first.line, found),
        frame=verdict.frame,
        more=tuple(more),
        is_reported=first.line.source == AGENTS,
        victims=len(affected.difference(verdict.ranks)),
        allowed=min((limit for limit in limits if limit), default=None),
    )


if __name__ == "__main__":
    sys.stdout.write(judged(Path(sys.argv[1]), Outcome.from_json(sys.stdin.read())))
