"""What shows why an attempt failed, beside its logs: its agents, Slurm, and what nodes noted."""

from __future__ import annotations

import contextlib
import re
import signal
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from typing import Final, NamedTuple

from clusterrun.diagnosis.kinds import ChangedCheck, Memory, Note, NoteSource
from clusterrun.diagnosis.lines import PrintedLine
from clusterrun.diagnosis.scan import UNCAUGHT, Scanner
from clusterrun.diagnosis.table import Role
from clusterrun.diagnosis.weigh import by_numbers
from clusterrun.rundir.attempt import read_attempt
from clusterrun.rundir.events import EventType, read_ends
from clusterrun.rundir.outcome import Cause, Outcome, Reason
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.finding import Severity
from clusterrun.shared.hostlist import fold_hosts
from clusterrun.shared.state import JobState
from clusterrun.shared.typed import decoded

AGENTS, SLURM = "agents", "Slurm"  # sources of what is in no log
NOTES: Final = tuple(source.value for source in NoteSource)
_TRACEBACK: Final = "Traceback (most recent call last):"
BY_STATE: Final = {
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
# The causes that a failed check shows if it was well at the start.
_BY_CHECK: Final = {
    **dict.fromkeys(("node.tmp", "path.disk", "path.inodes"), ("disk_full", Role.EITHER)),
    "node.shm": ("shm_exhausted", Role.EITHER),
    "gpu.count": ("gpu_hardware", Role.EITHER),
    "gpu.ecc": ("gpu_ecc", Role.ROOT),
    "gpu.xid": ("gpu_xid", Role.ROOT),
}
_GPU: Final = re.compile(r"\bGPU (\d{1,4})\b")
_OOM: Final = re.compile(r"[Oo]ut of memory: Kill|Killed process|oom_reaper:")


NodeNote = tuple[str, float, Note]
"""What an agent noted: its node, and when (epoch seconds)."""


def read_notes(paths: RunPaths, attempt: int) -> list[NodeNote]:
    """Return what the agents of an attempt noted, node by node."""
    known = read_attempt(paths, attempt).nodes
    nodes = known or [file.stem for file in paths.events_dir.glob("*.jsonl")]
    files = (paths.events(node) for node in sorted(nodes))
    found = []
    for event in (event for file in files for event in read_ends(file, attempt)):
        if event.type is EventType.NOTE:
            with contextlib.suppress(ValueError):  # a rank may write any event
                found.append((event.node, event.at, decoded(Note, event.note)))
    return found


def add_kills(scanner: Scanner, memory: Mapping[str, Memory], outcome: Outcome | None) -> None:
    """Add what the OOM killer did: it is the cause if a process of a rank was killed."""
    risen = {node: found for node, found in memory.items() if found.kills}
    if outcome and outcome.signal == signal.SIGKILL and outcome.node in risen:
        risen = {outcome.node: risen[outcome.node]}
    role = Role.ROOT if _is_of_rank(scanner, outcome) else Role.EITHER
    for node, found in risen.items():
        line = PrintedLine(0, str(found), NoteSource.CGROUP.value, node=node)
        scanner.add("host_oom", role, line)


def _is_of_rank(scanner: Scanner, outcome: Outcome | None) -> bool:
    is_killed = outcome is None or outcome.signal == signal.SIGKILL
    return is_killed or any(each.cause.id == "dataloader_killed" for each in scanner.findings())


class Worsened(NamedTuple):
    """A check that became worse in the same way on some nodes; its text is of the first."""

    nodes: tuple[str, ...]
    check: ChangedCheck

    @property
    def text(self) -> str:
        """Describe it in a line."""
        check = self.check
        where = f"{check.id} on {fold_hosts(self.nodes)}"
        return f"{where}: {check.before} at the start; now {check.now}: {check.text}"


def changes_of(noted: Iterable[NodeNote]) -> tuple[Worsened, ...]:
    """Return the checks that became worse between the start and the failure."""
    found: dict[tuple[str, str, str], dict[str, ChangedCheck]] = defaultdict(dict)
    for node, _, note in noted:
        if check := note.change:
            found[check.id, check.before, check.now][node] = check
    return tuple(Worsened(tuple(nodes), next(iter(nodes.values()))) for nodes in found.values())


def add_changes(scanner: Scanner, changes: Iterable[Worsened]) -> None:
    """Add the checks that fail since the start and show a cause."""
    for each in changes:
        if each.check.now == Severity.FAIL.value and each.check.id in _BY_CHECK:
            name, role = _BY_CHECK[each.check.id]
            for node in each.nodes:
                line = PrintedLine(0, each.text, NoteSource.PREFLIGHT.value, node=node)
                scanner.add(name, role, line)


def add_notes(scanner: Scanner, noted: Iterable[NodeNote], outcome: Outcome | None) -> None:
    """Add what the kernel and NVML reported: the table knows their messages."""
    for node, at, note in noted:
        if note.source not in (NoteSource.KERNEL, NoteSource.NVML):
            continue
        line = PrintedLine(0, note.text, note.source.value, rank=note.rank, node=node, at=at)
        if note.held_gpu is not None:
            if _ran_out(scanner, node, note.held_gpu):
                scanner.add("gpu_memory_held_or_faulty", Role.ROOT, line)
        elif _OOM.search(note.text) and note.rank is None and not _is_of_rank(scanner, outcome):
            scanner.add("host_oom", Role.EITHER, line)
        else:
            scanner.feed(line)


def _ran_out(scanner: Scanner, node: str, gpu: int) -> bool:
    """Return whether this GPU ran out of memory, as far as the messages name GPU and node."""
    lines = [each.line for each in scanner.causal() if each.cause.id == "cuda_oom"]
    named = [_GPU.search(line.text) for line in lines if line.node in ("", node)]
    return any(found is None or int(found[1]) == gpu for found in named)


def add_outcome(
    scanner: Scanner, outcome: Outcome, memory: Mapping[str, Memory], loud: Container[int | None]
) -> None:
    """Add what the agents know: they see signals, exits and ranks that never joined.

    `loud` are the ranks that printed to stderr.
    """
    text = outcome.message or outcome.reason
    where = f" at {outcome.where}" if outcome.where and outcome.where not in text else ""
    node, at = outcome.node or "", outcome.ended_at
    line = PrintedLine(0, text + where, AGENTS, rank=outcome.rank, node=node, at=at)
    texts = text.splitlines()
    if outcome.cause is Cause.EXCEPTION:
        texts = [_TRACEBACK, *texts]
    is_printed = not _of_rank(scanner, outcome.rank).isdisjoint(texts)
    for each in () if is_printed else texts:  # the log has what is around it
        scanner.feed(line._replace(text=each))
    is_reported = any(each.line.source == AGENTS for each in scanner.causal())
    if outcome.cause is Cause.EXCEPTION and not (is_printed or is_reported):
        scanner.add(UNCAUGHT, Role.ROOT, line)
    is_only = {(x.cause.id, x.line.rank) for x in scanner.causal()} == {(UNCAUGHT, None)}
    if outcome.cause is Cause.LAUNCHER and not outcome.signal and is_only:
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
