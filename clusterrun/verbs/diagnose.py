"""Name why a run failed, or why the logs of any job show that it did.

`python -m clusterrun.verbs.diagnose RUN_DIR` prints the verdict on an attempt as JSON, for the rule
book; it reads the outcome of the attempt from standard input.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, Final

from clusterrun.backends.status import JobStatus
from clusterrun.diagnosis.kinds import Memory
from clusterrun.diagnosis.lines import PrintedLine, read_line
from clusterrun.diagnosis.scan import FoundSign, Scanner
from clusterrun.diagnosis.table import Domain, Role, built_in
from clusterrun.diagnosis.weigh import Verdict, verdict_of
from clusterrun.errors import UsageError
from clusterrun.logformat.lines import Stream
from clusterrun.logs.sources import OVERVIEW, LogFile, Query, Source, find_files, sources_of
from clusterrun.logs.tail import find_newest
from clusterrun.node.base.stderr import PREFIX
from clusterrun.node.recovery.printed import ECHO
from clusterrun.node.recovery.printed import SLURM as SLURM_LINES
from clusterrun.rundir import record as records
from clusterrun.rundir.attempt import read_attempt
from clusterrun.rundir.outcome import Cause, Outcome, ShortVerdict, read_end, read_outcome
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord, earlier_namesakes
from clusterrun.shared.files import end_of
from clusterrun.shared.state import JobState
from clusterrun.verbs import evidence, hangs
from clusterrun.verbs.evidence import AGENTS, SLURM
from clusterrun.verbs.find import Which, find_record
from clusterrun.verbs.status import status

STDIN: Final = "-"
# Sources of what is in no log.
REPORTED: Final = (AGENTS, SLURM, *evidence.NOTES, hangs.RECORDER)
MOST_LINES: Final = 50_000  # of an attempt, the newest
_BATCH_BYTES: Final = 256 * 1024
_PIECE_BYTES: Final = 256 * 1024  # a longer line counts as several
_SHOWN_LINES: Final = 20_000  # after so many a reader hears of them
_LAST_S: Final = 600  # of the rank that failed first, everything
_MOST_RUNS: Final = 3  # that completed
_MOST_RECORDS: Final = 50
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")
MOST_RANKS: Final = 64  # of a verdict; nodes are all named: many faulty ones are no fault of theirs
_LETTERS: Final = 300
_RANK_OF_FILE: Final = re.compile(r"rank[_-]?(\d{1,7})(?!\d)")

_BY_OTHER_RANKS: Final = {  # what only a comparison of the ranks can explain
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
    """Why a run failed. `verdict` None: no cause was found; `lines` were read.

    `subtracted` kinds of lines were left out, since they were also printed when it went well.
    `memory` is what the memory cgroup counted on the nodes that noted it, `changes` the checks of
    nodes that became worse since the start; `failure` is how the attempt failed, by its agents.
    """

    verdict: Verdict | None
    lines: int
    job: JobStatus | None = None
    attempt: int = 0
    subtracted: int = 0
    memory: Mapping[str, Memory] = field(default_factory=dict)
    changes: tuple[evidence.Worsened, ...] = ()
    failure: Outcome | None = None


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
    if is_completed and found.state not in evidence.BY_STATE:
        return Diagnosis(verdict=None, lines=0, job=found, attempt=number)
    state = found.state if is_newest else None
    answer = diagnose_attempt(found.record, number, outcome, state=state)
    has_failed = outcome is not None and (outcome.cause.is_failure or not number)
    return dataclasses.replace(answer, job=found, failure=outcome if has_failed else None)


def diagnose_attempt(
    record: JobRecord, number: int, outcome: Outcome | None, *, state: JobState | None = None
) -> Diagnosis:
    """Diagnose an attempt; `state` is the job's, if this is its newest attempt."""
    scanner = Scanner(table=built_in(), ranks=set(range(record.world_size)))
    paths = record.paths
    loud: set[int | None] = set()
    for line in _all_printed(paths, number, outcome, loud):
        scanner.feed(line)
    scanner.leave_out(  # guesses at the size of a world; that of a run was checked
        each
        for each in scanner.causal()
        if each.cause.id == "world_size_mismatch" and each.role is Role.CONFIRMATION
    )
    subtracted = subtract(scanner, record.run_id, _earlier_runs(record))
    is_hung = outcome is not None and outcome.cause in (Cause.HUNG, Cause.HALTED)
    hangs.add_evidence(scanner, hangs.recorded(paths, number), is_hung=is_hung)
    noted = evidence.read_notes(paths, number)
    memory = {node: note.memory for node, _, note in noted if note.memory}
    evidence.add_kills(scanner, memory, outcome)
    if outcome is not None:
        evidence.add_outcome(scanner, outcome, memory, loud)
    evidence.add_notes(scanner, noted, outcome)
    changes = evidence.changes_of(noted)
    evidence.add_changes(scanner, changes)
    if state in evidence.BY_STATE:
        source = SLURM if record.cluster.scheduler.reads_sbatch else AGENTS
        line = PrintedLine(0, f"the job is {state.value}", source)
        scanner.add(evidence.BY_STATE[state], Role.ROOT, line)
    verdict = verdict_of(scanner)
    add_ranks = _BY_OTHER_RANKS.get(verdict.cause.id) if verdict else None
    if add_ranks:
        add_ranks(scanner, paths, number)
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
    for each in find_newest(_sources(find_files(paths, attempt), outcome), MOST_LINES):
        if each.stream not in (Stream.AGENT, Stream.GAP):
            number += 1
            if each.stream is Stream.ERR:
                loud.add(each.rank)
            text, rank, node = each.text.decode("utf-8", "replace"), each.rank, each.node
            found = read_line(text, number=number, file="", rank=rank, node=node)
            source = f"{node}\0{rank}\0{each.stream.value}{found.source}"
            yield found._replace(source=source, at=each.epoch_us / 1e6)


def diagnose_logs(
    names: Sequence[str], *, stdin: BinaryIO, show: Callable[[int], None] = lambda lines: None
) -> Diagnosis:
    """Diagnose the logs of any job: one interleaved file, or one for each rank or node.

    `-` is standard input. `show` hears now and then how many lines were read. Raises UsageError
    for a file that cannot be read.
    """
    scanner = Scanner(table=built_in())
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
    until = read_attempt(paths, attempt + 1).printed or None
    if until is None and attempt != paths.newest_attempt():
        return
    since = read_attempt(paths, attempt).printed
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
    return [each.without(lambda rank, _: rank == outcome.rank) for each in chosen] + own


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


# What earlier runs printed when they went well


def subtract(
    scanner: Scanner, run_id: str, earlier: Iterable[tuple[str, Iterable[PrintedLine]]]
) -> int:
    """Leave out what earlier runs, each with its id, also printed; return how many kinds of lines.

    Read them only if a finding may be usual, and none that are not needed.
    """
    found: dict[str, list[FoundSign]] = {}
    for each in doubtful(scanner):
        found.setdefault(shape_of(each.line.text, run_id), []).append(each)
    usual: set[FoundSign] = set()
    for earlier_id, lines in earlier if found else ():
        for text in (line.text for line in lines):
            alike = found.get(shape_of(text, earlier_id), ())
            usual.update(each for each in alike if _is_sign(each, text))
        if usual.issuperset(chain(*found.values())):
            break
    scanner.leave_out(usual)
    return sum(not usual.isdisjoint(alike) for alike in found.values())


def _earlier_runs(record: JobRecord) -> Iterator[tuple[str, Iterator[PrintedLine]]]:
    earlier = (each.paths for each in earlier_namesakes(record, _MOST_RECORDS))
    for paths in islice(filter(_went_well, earlier), _MOST_RUNS):
        yield paths.root.name, _all_printed(paths, paths.newest_attempt(), None, set())


def _went_well(paths: RunPaths) -> bool:
    """Return whether a run exited with 0 and seems to have trained."""
    end, outcome = read_end(paths), read_outcome(paths, paths.newest_attempt())
    return bool(end and end.state.is_success) and not (outcome and outcome.suspicions)


def shape_of(text: str, run_id: str) -> str:
    """Return what lines of several runs have in common that differ in numbers and the run's id.

    >>> shape_of("pid 905 in /runs/a/1121-103252-k3fq/x", "1121-103252-k3fq")
    'pid 0 in /runs/a/0/x'
    """
    return _NUMBER.sub("0", text.replace(run_id, "0") if run_id else text).strip()


def doubtful(scanner: Scanner) -> list[FoundSign]:
    """Return the findings that may be usual.

    These are printed lines (the number of a line that agents or Slurm reported is 0), but no
    traceback that ended its process, no fault of the hardware and no decision of the cluster.
    """
    return [
        each
        for each in scanner.causal()
        if each.line.number
        and not (each.cause.lasting or each.cause.blames_node)
        and each.cause.domain is not Domain.POLICY
        and not scanner.is_last_words(each)
    ]


def _is_sign(finding: FoundSign, text: str) -> bool:
    """Return whether a line of the same shape is the same sign: its numbers may decide."""
    signs = [sign.text for sign in finding.cause.signs if sign.role is finding.role]
    own = [sign for sign in signs if sign.search(finding.line.text)]
    return not own or any(sign.search(text) for sign in own)


# For the rule book


def prepare() -> None:
    """Parse the table of causes: a fork of this process then judges at once."""
    Scanner(table=built_in())


def judged(run_dir: Path, outcome: Outcome) -> str:
    """Diagnose an attempt by what its agents and logs report; return the verdict as JSON."""
    record = records.read(RunPaths(root=run_dir))
    verdict = short(diagnose_attempt(record, outcome.attempt, outcome), most=MOST_RANKS)
    return json.dumps(dataclasses.asdict(verdict) if verdict else None)


def short(
    found: Diagnosis, *, most: int | None = None, is_of_job: bool = True
) -> ShortVerdict | None:
    """Return what `outcome.json` keeps of a verdict, with `most` ranks at most."""
    if (verdict := found.verdict) is None:
        return None
    cause, first = verdict.cause, verdict.first
    failed = {rank for each in verdict.consequences for rank in each.ranks}
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
        place=place_of(first.line, is_of_job=is_of_job),
        frame=verdict.frame,
        more=tuple(more),
        is_reported=first.line.source == AGENTS,
        victims=len(failed.difference(verdict.ranks)),
        allowed=min((limit for limit in limits if limit), default=None),
    )


if __name__ == "__main__":
    sys.stdout.write(judged(Path(sys.argv[1]), Outcome.from_json(sys.stdin.read())))
