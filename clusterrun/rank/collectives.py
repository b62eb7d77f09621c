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
# The words of torch (without an errno) and safetensors (written in Rust) for disk errors.
_WORDS = (
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
        text = f"this rank has not joined the {size} ranks with which it saves and resumes"
        first = "call torch.distributed.init_process_group or create the Accelerator first"
        raise ClusterrunError(f"{text}: {first}")
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
    box = [value]
    distributed.broadcast_object_list(box, src=source)
    return box[0]


def gathered_parts(part: Callable[[], _Part]) -> tuple[list[_Part], str]:
    """Return the parts of all ranks, and the first error: if one rank raised, others would wait."""
    done, problem = [], ""
    try:
        done = [part()]
    except Exception as error:  # noqa: BLE001 - all ranks return it
        is_ours = isinstance(error, ClusterrunError)
        words = str(error) if is_ours else f"{type(error).__name__}: {error}"
        problem = disk_problem(error) or words
    parts = gathered((done, problem))
    return [value for done, _ in parts for value in done], _first(text for _, text in parts)


def _first(problems: Iterable[str]) -> str:
    return next((f"{text} (rank {n})" for n, text in enumerate(problems) if text), "")


def agreed_problem(deed: Callable[[], object] | None) -> str:
    """Call `deed` on this rank (None: nothing); on all, return the first disk error of any."""
    problem = ""
    try:
        if deed is not None:
            deed()
    except Exception as error:
        if not (problem := disk_problem(error)):
            raise
    return _first(gathered(problem))


def disk_problem(error: BaseException) -> str:
    """Return in one line why the disk failed; "" for any other error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in DISK_FAULTS:
            return cause.strerror or str(cause)
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    is_disk = any(words in text for words in _WORDS)
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

    here: int  # this rank
    groups: Sequence[Sequence[int]]  # the ranks of each such directory
    nodes: Sequence[str] = ()  # the directories' nodes, if these are apart
    at: float = field(default_factory=lambda: round(time.time(), 6))  # the time; rank 0's, if apart

    @classmethod
    def of_this_rank(cls) -> Sharing:
        """Return the groups of this world, the same on all ranks."""
        here, world_size = joined_world()
        if not (owner := os.environ.get(APART)):
            return cls(here=here, groups=(range(world_size),))
        node = os.environ.get("CLUSTERRUN_NODE") or os.uname().nodename
        every = gathered((node if owner == "1" else owner, round(time.time(), 6)))
        groups: dict[str, list[int]] = {}
        for rank, (node, _) in enumerate(every):
            groups.setdefault(node, []).append(rank)
        return cls(here=here, groups=[*groups.values()], nodes=[*groups], at=every[0][1])

    @property
    def number(self) -> int:
        """The number of this rank's group."""
        return next(n for n, ranks in enumerate(self.groups) if self.here in ranks)

    @property
    def node(self) -> str:
        """This rank's node; "" if all nodes share the directory."""
        return self.nodes[self.number] if self.nodes else ""

    @property
    def is_first(self) -> bool:
        """Return whether this rank creates and publishes the directory of its group."""
        return self.here == self.groups[self.number][0]

    def own_share(self, names: Sequence[str]) -> list[str]:
        """Return the files of the group's directory that this rank handles."""
        ranks = self.groups[self.number]
        return checkpoint_files.own_share(names, ranks.index(self.here), len(ranks))

    def each(self, value: _Part) -> list[_Part]:
        """Return on all ranks the values of the first rank of each group."""
        if not self.nodes:
            return [broadcast(value)]
        values = gathered(value)
        return [values[ranks[0]] for ranks in self.groups]


class SavedPart(NamedTuple):
    """What one node has of a checkpoint; nothing if there is a problem with its marker."""

    node: str
    path: Path
    found: Checkpoint | None
    files: Sums
    problem: str

    @classmethod
    def read(cls, path: Path, node: str) -> SavedPart:
        """Read the marker of this node's part."""
        try:
            found, files = checkpoint_files.read_marker(path)
        except IncompleteError as fault:
            problem = str(fault) if not node or path.is_dir() else "this node does not have it"
            return cls(node=node, path=path, found=None, files={}, problem=at(node, problem))
        return cls(node=node, path=path, found=found, files=files, problem="")


def at(node: str, problem: str) -> str:
    """Put the name of the node before a problem, if nodes are apart."""
    return f"{node}: {problem}" if node else problem


def problem_of(parts: Sequence[SavedPart]) -> str:
    """Return why these nodes can't use a checkpoint, to look for an older one; "" if they can.

    A node that took no part in the save may lack everything. Raises ClusterrunError if only other
    nodes have some files.
    """
    found = next((part.found for part in parts if part.found), None)
    if found is None:
        return parts[0].problem
    for part in parts:
        if part.found is None and part.node in found.nodes:
            return part.problem
        if part.found and _save(part.found) != _save(found):
            return at(part.node, "it has another save of this step")
    held = {name for part in parts for name in part.files}
    lost = {node: {*names} - held for node, names in found.nodes.items()}
    if owners := ", ".join(node for node, names in lost.items() if names):
        raise ClusterrunError(
            f"can't resume from {found.path.name}: {owners} has {len(set().union(*lost.values()))} "
            "of its files that no other node has, and is not one of this job's nodes "
            f"({', '.join(part.node for part in parts)})",
            hint=f"run on the nodes that saved it: --hosts {','.join(found.nodes)}",
        )
    return ""


def _save(found: Checkpoint) -> tuple[object, ...]:
    """Return what the markers of one save have in common."""
    return found.attempt, found.saved_at, found.world_size, found.nodes


def completed(parts: Sequence[SavedPart], sharing: Sharing) -> Checkpoint:
    """Have each node fetch the files that it lacks; return this node's checkpoint.

    Every rank takes part. Raises ClusterrunError on all ranks if a node could not write its files.
    """
    own = parts[sharing.number]
    found = next(part.found for part in parts if part.found)
    found = dataclasses.replace(found, path=own.path)
    sources = _sources(parts, sharing)
    if not sources and all(part.found for part in parts):
        return found
    every = {name: sums for part in reversed(parts) for name, sums in part.files.items()}
    sent = {name: every[name] for name in sources}
    if sharing.here == 0:
        mebibytes = (sum(size for size, _ in sent.values()) + (1 << 20) - 1) >> 20  # rounded up
        say(f"{found.path.name}: sending {mebibytes} MiB of files to nodes that lack them")
    mine = {n: sums for n, sums in sent.items() if sharing.is_first and n not in own.files}
    fault = _exchange(own.path, sent, sources, mine)
    is_changed = sharing.is_first and (mine or own.found is None)
    _, problem = gathered_parts(lambda: _keep(found, own, mine, fault) if is_changed else None)
    if problem:
        raise ClusterrunError(f"{found.path.name} can't be completed on all nodes: {problem}")
    return found


def _sources(parts: Sequence[SavedPart], sharing: Sharing) -> dict[str, int]:
    """Return the files that some nodes lack, and the first rank of the first node that has each."""
    found: dict[str, int] = {}
    for part, ranks in zip(parts, sharing.groups, strict=True):
        for name in part.files:
            found.setdefault(name, ranks[0])
    return {name: found[name] for name in sorted(found) if any(name not in p.files for p in parts)}


def _exchange(path: Path, sent: Sums, sources: Mapping[str, int], mine: Sums) -> OSError | None:
    """Send and receive the files; return this rank's error, since the others continue."""
    here, _ = joined_world()
    fault = None
    for name, source in sources.items():
        for offset in range(0, max(1, sent[name][0]), CHUNK):
            chunk = b""
            with contextlib.suppress(OSError):  # the checksums show that it is too short
                if here == source:
                    with open(path / name, "rb") as opened:
                        opened.seek(offset)
                        chunk = opened.read(CHUNK)
            chunk = broadcast(chunk, source)
            try:
                if name in mine and fault is None:
                    (path / name).parent.mkdir(parents=True, exist_ok=True)
                    with open(path / name, "ab" if offset else "wb") as opened:
                        opened.write(chunk)
            except OSError as error:
                fault = error
    return fault


def _keep(found: Checkpoint, own: SavedPart, mine: Sums, fault: OSError | None) -> None:
    """Sync what this node received, compare it with what was sent, and list it in the marker."""
    try:
        if fault:
            raise fault
        own.path.mkdir(parents=True, exist_ok=True)  # a save may have written no file here
        received = checkpoint_files.settled(own.path, list(mine))
        if wrong := [name for name in mine if received[name] != mine[name]]:
            raise ClusterrunError(f"{wrong[0]} did not arrive as it was sent")
        checkpoint_files.mark(found, {**own.files, **received})
    except Exception:
        for name in mine:
            (own.path / name).unlink(missing_ok=True)
        raise
