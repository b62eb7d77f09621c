"""What all ranks do together: exchange values, agree on an error, complete each other's files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from clusterrun.errors import ClusterrunError
from clusterrun.rank.emit import say
from clusterrun.shared import checkpoint_files
from clusterrun.shared.checkpoint_files import Checkpoint, IncompleteError, Sums
from clusterrun.shared.files import DISK_FAULTS

CHUNK = 16 << 20
APART = "CLUSTERRUN_HOSTS_APART"  # 1, or the node whose directory this one shares
# Texts in the disk errors of torch (it sets no errno) and safetensors (written in Rust).
_DISK_ERROR_TEXTS = (
    *("PytorchStreamWriter", "inline_container.cc"),
    *(f"(os error {number})" for number in DISK_FAULTS),
    *(os.strerror(number) for number in DISK_FAULTS),
)
_Part = TypeVar("_Part")


def joined_world() -> tuple[int, int]:
    """Return this process's rank and the size of the world that it has joined."""
    if (distributed := _distributed()) is not None:
        return distributed.get_rank(), distributed.get_world_size()
    if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
        problem = f"this rank has not joined the {size} ranks with which it saves and resumes"
        remedy = "call torch.distributed.init_process_group or create the Accelerator first"
        raise ClusterrunError(f"{problem}: {remedy}")
    return 0, 1


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks in order, once all have called."""
    if (distributed := _distributed()) is None:
        return [value]
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def broadcast(value: _Part, source: int = 0) -> _Part:
    """Return the value of rank `source` on all ranks."""
    if (distributed := _distributed()) is None:
        return value
    values = [value]  # torch replaces its only item on the other ranks
    distributed.broadcast_object_list(values, src=source)
    return values[0]


def gathered_parts(part: Callable[[], _Part]) -> tuple[list[_Part], str]:
    """Call `part` on all ranks; return on all of them what it returned, and the first error."""
    results, problem = [], ""
    try:
        results = [part()]
    except Exception as error:  # noqa: BLE001 - if it were raised here, the other ranks would wait
        is_ours = isinstance(error, ClusterrunError)
        text = str(error) if is_ours else f"{type(error).__name__}: {error}"
        problem = disk_problem(error) or text
    outcomes = gathered((results, problem))
    parts = [result for results, _ in outcomes for result in results]  # none of a rank that failed
    return parts, _first_problem(problem for _, problem in outcomes)


def _first_problem(problems: Iterable[str]) -> str:
    return next((f"{text} (rank {n})" for n, text in enumerate(problems) if text), "")


def agreed_problem(action: Callable[[], object] | None) -> str:
    """Call `action` on this rank, unless it is None; return the first disk error of all ranks."""
    problem = ""
    try:
        if action is not None:
            action()
    except Exception as error:
        if not (problem := disk_problem(error)):
            raise
    return _first_problem(gathered(problem))


def disk_problem(error: BaseException) -> str:
    """Return in one line how the disk failed, if that caused the error; else ""."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in DISK_FAULTS:
            return cause.strerror or str(cause)
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    is_disk = any(part in text for part in _DISK_ERROR_TEXTS)
    return f"the disk refused a write ({text.splitlines()[0]})" if is_disk else ""


def _distributed() -> Any:
    """Return torch.distributed if this process has joined a group; never import it."""
    module: Any = sys.modules.get("torch.distributed")
    is_joined = module is not None and module.is_available() and module.is_initialized()
    return module if is_joined else None


# Checkpoints of nodes that share no directory: each keeps a part, and fetches what it lacks


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The ranks that share the checkpoint directory of this rank: all, or its node's."""

    rank: int  # this rank
    groups: Sequence[Sequence[int]]  # the ranks that share each directory
    nodes: Sequence[str] = ()  # the node of each group, if nodes share no directory
    saved_at: float = field(default_factory=lambda: round(time.time(), 6))  # see of_this_rank

    @classmethod
    def of_this_rank(cls) -> Sharing:
        """Return the groups of this world; if nodes are apart, all ranks take rank 0's time."""
        own, world_size = joined_world()
        if not (owner := os.environ.get(APART)):  # "1", or the node whose directory this shares
            return cls(rank=own, groups=(range(world_size),))
        node = os.environ.get("CLUSTERRUN_NODE") or os.uname().nodename
        of_ranks = gathered((node if owner == "1" else owner, round(time.time(), 6)))
        groups: dict[str, list[int]] = {}
        for rank, (node, _) in enumerate(of_ranks):
            groups.setdefault(node, []).append(rank)
        return cls(rank=own, groups=[*groups.values()], nodes=[*groups], saved_at=of_ranks[0][1])

    @property
    def number(self) -> int:
        """The index of this rank's group."""
        return next(n for n, ranks in enumerate(self.groups) if self.rank in ranks)

    @property
    def node(self) -> str:
        """This rank's node; "" if all nodes share the directory."""
        return self.nodes[self.number] if self.nodes else ""

    @property
    def is_first(self) -> bool:
        """Return whether this rank creates and publishes the directory of its group."""
        return self.rank == self.groups[self.number][0]

    def own_share(self, names: Sequence[str]) -> list[str]:
        """Return the files of the group's directory that this rank handles."""
        ranks = self.groups[self.number]
        return checkpoint_files.own_share(names, ranks.index(self.rank), len(ranks))

    def from_groups(self, value: _Part) -> list[_Part]:
        """Return on all ranks the values of the first rank of each group."""
        if not self.nodes:
            return [broadcast(value)]
        values = gathered(value)
        return [values[ranks[0]] for ranks in self.groups]


class SavedPart(NamedTuple):
    """What one node has of a checkpoint; None and no files if its marker has a problem."""

    node: str
    path: Path
    checkpoint: Checkpoint | None
    files: Sums
    problem: str

    @classmethod
    def read(cls, path: Path, node: str) -> SavedPart:
        """Read the marker of this node's part."""
        try:
            checkpoint, files = checkpoint_files.read_marker(path)
        except IncompleteError as fault:
            is_absent = bool(node) and not path.is_dir()
            problem = with_node(node, "this node does not have it" if is_absent else str(fault))
            return cls(node=node, path=path, checkpoint=None, files={}, problem=problem)
        return cls(node=node, path=path, checkpoint=checkpoint, files=files, problem="")


def with_node(node: str, problem: str) -> str:
    """Put the name of the node before a problem, if nodes are apart."""
    return f"{node}: {problem}" if node else problem


def problem_of(parts: Sequence[SavedPart]) -> str:
    """Return why these nodes can't use a checkpoint, and need an older one; "" if they can.

    A node that took no part in the save may lack everything. Raises ClusterrunError if some files
    are only on nodes that are not in this job.
    """
    saved = next((part.checkpoint for part in parts if part.checkpoint), None)
    if saved is None:
        return parts[0].problem
    for part in parts:
        if part.checkpoint is None and part.node in saved.nodes:
            return part.problem
        if part.checkpoint and _save_identity(part.checkpoint) != _save_identity(saved):
            return with_node(part.node, "it has another save of this step")
    held = {name for part in parts for name in part.files}
    lost = {node: gone for node, names in saved.nodes.items() if (gone := {*names} - held)}
    if lost:
        raise ClusterrunError(
            f"can't resume from {saved.path.name}: {len(set().union(*lost.values()))} of its files "
            f"can be found only on {', '.join(lost)}, not on this job's nodes "
            f"({', '.join(part.node for part in parts)})",
            hint=f"run on the nodes that saved it: --hosts {','.join(saved.nodes)}",
        )
    return ""


def _save_identity(checkpoint: Checkpoint) -> tuple[object, ...]:
    """Return what the markers of one save have in common."""
    return checkpoint.attempt, checkpoint.saved_at, checkpoint.world_size, checkpoint.nodes


def complete_parts(parts: Sequence[SavedPart], sharing: Sharing) -> Checkpoint:
    """Have each node fetch the files that it lacks; return this node's checkpoint.

    Every rank takes part. Raises ClusterrunError on all ranks if a node could not write its files.
    """
    own = parts[sharing.number]
    saved = next(part.checkpoint for part in parts if part.checkpoint)
    saved = dataclasses.replace(saved, path=own.path)
    senders = _senders(parts, sharing)
    if not senders and all(part.checkpoint for part in parts):
        return saved  # no node lacks a file or the marker
    # If several nodes have a file, the sums of the first count, since it sends the file.
    all_sums = {name: sums for part in reversed(parts) for name, sums in part.files.items()}
    sent = {name: all_sums[name] for name in senders}
    if sharing.rank == 0:
        mebibytes = (sum(size for size, _ in sent.values()) + (1 << 20) - 1) >> 20  # rounded up
        say(f"{saved.path.name}: sending {mebibytes} MiB of files to nodes that lack them")
    lacking = {n: sums for n, sums in sent.items() if sharing.is_first and n not in own.files}
    fault = _exchange(own.path, sent, senders, lacking)
    is_changed = sharing.is_first and (lacking or own.checkpoint is None)
    _, problem = gathered_parts(lambda: _keep(saved, own, lacking, fault) if is_changed else None)
    if problem:
        raise ClusterrunError(f"{saved.path.name} can't be completed on all nodes: {problem}")
    return saved


def _senders(parts: Sequence[SavedPart], sharing: Sharing) -> dict[str, int]:
    """Return the files that some nodes lack, and the first rank of the first node that has each."""
    senders: dict[str, int] = {}
    for part, ranks in zip(parts, sharing.groups, strict=True):
        for name in part.files:
            senders.setdefault(name, ranks[0])
    lacking = {name for name in senders if any(name not in part.files for part in parts)}
    return {name: senders[name] for name in sorted(lacking)}


def _exchange(path: Path, sent: Sums, senders: Mapping[str, int], lacking: Sums) -> OSError | None:
    """Send and receive the files; return this rank's error: raising it would hang the others."""
    own_rank, _ = joined_world()
    fault = None
    for name, sender in senders.items():
        for offset in range(0, max(1, sent[name][0]), CHUNK):  # over its size; at least one chunk
            chunk = b""
            with contextlib.suppress(OSError):  # the checksums show that it is incomplete
                if own_rank == sender:
                    with open(path / name, "rb") as opened:
                        opened.seek(offset)
                        chunk = opened.read(CHUNK)
            chunk = broadcast(chunk, sender)
            try:
                if name in lacking and fault is None:
                    (path / name).parent.mkdir(parents=True, exist_ok=True)
                    with open(path / name, "ab" if offset else "wb") as opened:
                        opened.write(chunk)
            except OSError as error:
                fault = error
    return fault


def _keep(checkpoint: Checkpoint, own: SavedPart, sent: Sums, fault: OSError | None) -> None:
    """Sync what this node received, compare it with what was sent, and list it in the marker."""
    try:
        if fault:
            raise fault
        own.path.mkdir(parents=True, exist_ok=True)  # a save may have written no file here
        received = checkpoint_files.sync(own.path, list(sent))
        if wrong := [name for name in sent if received[name] != sent[name]]:
            raise ClusterrunError(f"{wrong[0]} did not arrive as it was sent")
        checkpoint_files.mark(checkpoint, {**own.files, **received})
    except Exception:
        for name in sent:
            (own.path / name).unlink(missing_ok=True)
        raise
