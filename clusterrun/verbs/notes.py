"""What the nodes of an attempt know about its failure, as their agents noted it."""

from __future__ import annotations

import contextlib
import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from clusterrun.diagnosis.lines import PrintedLine
from clusterrun.diagnosis.scan import Scanner
from clusterrun.diagnosis.table import Role
from clusterrun.logformat.notes import ChangedCheck, Memory, Note, NoteSource
from clusterrun.rundir.events import EventType, read_ends
from clusterrun.rundir.outcome import Outcome
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.world import read_world
from clusterrun.shared.finding import Severity
from clusterrun.shared.hostlist import fold_hosts
from clusterrun.shared.typed import decoded

SOURCES: Final = tuple(source.value for source in NoteSource)
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
    nodes = read_world(paths, attempt) or [file.stem for file in paths.events_dir.glob("*.jsonl")]
    files = (paths.events(node) for node in sorted(nodes))
    found = []
    events = (event for file in files for event in read_ends(file, attempt))
    for event in (each for each in events if each.type is EventType.NOTE):
        with contextlib.suppress(ValueError):  # a rank may write any event
            found.append((event.node, event.at, decoded(Note, event.note)))
    return found


def memory_of(noted: Iterable[NodeNote]) -> dict[str, Memory]:
    """Return what the memory cgroups counted, by node."""
    return {node: note.memory for node, _, note in noted if note.memory}


def add_kills(scanner: Scanner, memory: Mapping[str, Memory], outcome: Outcome | None) -> None:
    """Add what the OOM killer did: it is the cause if a process of a rank was killed."""
    risen = {node: found for node, found in memory.items() if found.kills}
    if outcome and outcome.signal == signal.SIGKILL and outcome.node in risen:
        risen = {outcome.node: risen[outcome.node]}
    role = Role.ROOT if _is_of_rank(scanner, outcome) else Role.EITHER
    for node, found in risen.items():
        line = PrintedLine(number=0, text=str(found), source=NoteSource.CGROUP.value, node=node)
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
            line = PrintedLine(number=0, text=each.text, source=NoteSource.PREFLIGHT.value)
            for node in each.nodes:
                scanner.add(name, role, line._replace(node=node))


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
