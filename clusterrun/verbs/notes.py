"""What the nodes of an attempt know about its failure, as their agents noted it."""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from clusterrun.diagnosis.lines import PrintedLine, read_line
from clusterrun.diagnosis.scan import Scanner
from clusterrun.diagnosis.table import Role
from clusterrun.estimates.inputs import GIB
from clusterrun.health.check import Status
from clusterrun.logformat.lines import LogLine
from clusterrun.logformat.notes import (
    KERNEL,
    NVML,
    ChangedCheck,
    Memory,
    held_gpu,
    read_changed,
    read_memory,
    read_note,
)
from clusterrun.rundir.outcome import Outcome
from clusterrun.shared.hostlist import fold_hosts

CGROUP, PREFLIGHT = "cgroup", "preflight"
SOURCES: Final = (CGROUP, KERNEL, NVML, PREFLIGHT)
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


def memory_of(lines: Iterable[LogLine]) -> dict[str, Memory]:
    """Return what the memory cgroups counted, by node."""
    found = ((each.node, read_memory(each.text.decode(errors="replace"))) for each in lines)
    return {node: memory for node, memory in found if memory is not None}


def memory_text(memory: Memory) -> str:
    """Describe the OOM kills, and what a node's part of the job may use."""
    killed = f"the OOM killer killed {memory.kills} process{'' if memory.kills == 1 else 'es'}"
    sizes = {"the job may use {} on this node": memory.limit, "its peak was {}": memory.peak}
    shown = [text.format(gib(size)) for text, size in sizes.items() if size is not None]
    return ", ".join([killed, *shown])


def gib(size: int) -> str:
    """Format a size for a sentence."""
    return f"{size / GIB:.3g} GiB"


def add_kills(scanner: Scanner, memory: Mapping[str, Memory], outcome: Outcome | None) -> None:
    """Add what the OOM killer did: it is the cause if a process of a rank was killed."""
    risen = {node: found for node, found in memory.items() if found.kills}
    if outcome and outcome.signal == signal.SIGKILL and outcome.node in risen:
        risen = {outcome.node: risen[outcome.node]}
    role = Role.ROOT if _is_of_rank(scanner, outcome) else Role.EITHER
    for node, found in risen.items():
        line = PrintedLine(number=0, text=memory_text(found), source=CGROUP, node=node)
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


def changes_of(lines: Iterable[LogLine]) -> tuple[Worsened, ...]:
    """Return the checks that became worse between the start and the failure."""
    found: dict[tuple[str, str, str], dict[str, ChangedCheck]] = defaultdict(dict)
    for each in sorted(lines, key=lambda line: line.node):
        if check := read_changed(each.text.decode(errors="replace")):
            found[check[:3]][each.node] = check
    return tuple(Worsened(tuple(nodes), next(iter(nodes.values()))) for nodes in found.values())


def add_changes(scanner: Scanner, changes: Iterable[Worsened]) -> None:
    """Add the checks that fail since the start and show a cause."""
    for each in changes:
        if each.check.now == Status.FAIL.value and each.check.id in _BY_CHECK:
            name, role = _BY_CHECK[each.check.id]
            line = PrintedLine(number=0, text=each.text, source=PREFLIGHT)
            for node in each.nodes:
                scanner.add(name, role, line._replace(node=node))


def add_notes(scanner: Scanner, lines: Iterable[LogLine], outcome: Outcome | None) -> None:
    """Add what the kernel and NVML reported, node by node: the table knows their messages."""
    for each in sorted(lines, key=lambda line: line.node):
        if found := read_note(each.text.decode(errors="replace")):
            source, text = found
            line = read_line(text, number=0, file="", node=each.node)
            line = line._replace(source=source, at=each.epoch_us / 1e6)
            _add(scanner, line, outcome)


def _add(scanner: Scanner, line: PrintedLine, outcome: Outcome | None) -> None:
    gpu = held_gpu(line.text)
    if gpu is not None:
        if _ran_out(scanner, line.node, gpu):
            scanner.add("gpu_memory_held_or_faulty", Role.ROOT, line)
    elif _OOM.search(line.text) and line.rank is None and not _is_of_rank(scanner, outcome):
        scanner.add("host_oom", Role.EITHER, line)
    else:
        scanner.feed(line)


def _ran_out(scanner: Scanner, node: str, gpu: int) -> bool:
    """Return whether this GPU ran out of memory, as far as the messages name GPU and node."""
    for each in scanner.causal():
        named = _GPU.search(each.line.text)
        is_here = each.line.node in ("", node) and (named is None or int(named[1]) == gpu)
        if each.cause.id == "cuda_oom" and is_here:
            return True
    return False
