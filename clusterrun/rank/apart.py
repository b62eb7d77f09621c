"""Checkpoints of nodes that share no directory: each keeps a part, and fetches what it lacks."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from clusterrun.errors import ClusterrunError
from clusterrun.rank.collectives import broadcast, gathered, gathered_parts, joined_world
from clusterrun.rank.emit import say
from clusterrun.shared import checkpoint_files
from clusterrun.shared.checkpoint_files import Checkpoint, IncompleteError, Sums

CHUNK = 16 << 20
APART = "CLUSTERRUN_HOSTS_APART"  # 1, or the node whose directory this one shares
_Value = TypeVar("_Value")


def is_apart() -> bool:
    """Return whether nodes have checkpoint directories of their own."""
    return bool(os.environ.get(APART))


def _own_node() -> str:
    """Return this node's name, or that of the node whose directory it shares."""
    owner = os.environ[APART]
    return owner if owner != "1" else os.environ.get("CLUSTERRUN_NODE") or os.uname().nodename


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The ranks that share this rank's checkpoint directory: all, or those of its node.

    `groups` are the ranks of each such directory. If nodes are apart, `nodes` are the directories'
    nodes, and `at` is rank 0's time.
    """

    here: int
    groups: Sequence[Sequence[int]]
    nodes: Sequence[str] = ()
    at: float | None = None

    @classmethod
    def of_this_rank(cls) -> Sharing:
        """Return the groups of this world, the same on all ranks."""
        here, world_size = joined_world()
        if not is_apart():
            return cls(here=here, groups=(range(world_size),))
        every = gathered((_own_node(), time.time()))
        groups: dict[str, list[int]] = {}
        for rank, (node, _) in enumerate(every):
            groups.setdefault(node, []).append(rank)
        return cls(here=here, groups=[*groups.values()], nodes=[*groups], at=every[0][1])

    @property
    def is_apart(self) -> bool:
        """Return whether each node has its own directory."""
        return bool(self.nodes)

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

    def each(self, value: _Value) -> list[_Value]:
        """Return on all ranks the values of the first rank of each group."""
        if not self.is_apart:
            return [broadcast(value)]
        values = gathered(value)
        return [values[ranks[0]] for ranks in self.groups]


@dataclass(frozen=True, kw_only=True)
class SavedPart:
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

    Raises ClusterrunError if they lack files that only other nodes have. A node that took no part
    in the save may lack everything.
    """
    found = next((part.found for part in parts if part.found), None)
    if found is None:
        return parts[0].problem
    for part in parts:
        if part.found is None and part.node in found.nodes:
            return part.problem
        if part.found and _save(part.found) != _save(found):
            return at(part.node, "it has another save of this step")
        if {*found.nodes.get(part.node, ())} - {*part.files}:
            return at(part.node, "its part was replaced by that of another node")
    _refuse_without_owners(found, parts)
    return ""


def _save(found: Checkpoint) -> tuple[object, ...]:
    """Return what the markers of one save have in common."""
    return found.attempt, found.saved_at, found.world_size, found.nodes


def _refuse_without_owners(found: Checkpoint, parts: Sequence[SavedPart]) -> None:
    held = {name for part in parts for name in part.files}
    lost = {node: {*names} - held for node, names in found.nodes.items()}
    if not (owners := [node for node, names in lost.items() if names]):
        return
    nodes = ", ".join(filter(None, (part.node for part in parts)))
    owner, where = ", ".join(owners), f" ({nodes})" if nodes else ""
    count = len(set().union(*lost.values()))
    bare = next((part for part in parts if part.found is None), None)
    copy = f", or copy its {found.path.name} to {bare.path} on {bare.node}" if bare else ""
    raise ClusterrunError(
        f"can't resume from {found.path.name}: {owner} has {count} of its files that no other node "
        f"has, and is not one of this job's nodes{where}",
        hint=f"run on the nodes that saved it: --hosts {','.join(found.nodes)}{copy}",
    )


@dataclass(frozen=True, kw_only=True)
class _Transfer:
    """A file that some nodes lack: who sends it, and its size and checksum there."""

    name: str
    source: int
    sums: tuple[int, int]


def completed(parts: Sequence[SavedPart], sharing: Sharing) -> Checkpoint:
    """Have each node fetch the files that it lacks; return this node's checkpoint.

    Every rank takes part. Raises ClusterrunError on all ranks if a node could not write its files.
    """
    own = parts[sharing.number]
    found = next(part.found for part in parts if part.found)
    found = dataclasses.replace(found, path=own.path)
    transfers = _transfers(parts, sharing)
    if not transfers and all(part.found for part in parts):
        return found
    if sharing.here == 0:
        total = sum(transfer.sums[0] for transfer in transfers)
        say(f"{found.path.name}: sending {-(-total >> 20)} MiB to the nodes that lack them")
    lacking = {t.name: t.sums for t in transfers if t.name not in own.files}
    mine = lacking if sharing.is_first else {}
    _, problem = gathered_parts(lambda: _make_room(own.path, mine))
    if not problem:
        fault = _exchange(own.path, transfers, mine)
        is_changed = sharing.is_first and (mine or own.found is None)
        _, problem = gathered_parts(lambda: _keep(found, own, mine, fault) if is_changed else None)
    if problem:
        raise ClusterrunError(f"{found.path.name} can't be completed on all nodes: {problem}")
    return found


def _transfers(parts: Sequence[SavedPart], sharing: Sharing) -> list[_Transfer]:
    """Return the files that some nodes lack, each from the first node that has it."""
    sources: dict[str, _Transfer] = {}
    for part, ranks in zip(parts, sharing.groups, strict=True):
        for name, sums in part.files.items():
            sources.setdefault(name, _Transfer(name=name, source=ranks[0], sums=sums))
    return [sources[name] for name in sorted(sources) if any(name not in p.files for p in parts)]


def _make_room(path: Path, files: Sums) -> None:
    """Create these files, empty. Raises OSError if the disk has no room for their contents."""
    if not files:
        return
    path.mkdir(parents=True, exist_ok=True)
    disk = shutil.disk_usage(path)
    if disk.total and disk.free < sum(size for size, _ in files.values()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for name in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"")


def _exchange(path: Path, transfers: Sequence[_Transfer], mine: Sums) -> OSError | None:
    """Send and receive the files; return this rank's error, since the others continue."""
    fault = None
    for file in transfers:
        for offset in range(0, file.sums[0], CHUNK):
            chunk = broadcast(_chunk(path / file.name, offset, file.source), file.source)
            try:
                if file.name in mine and fault is None:
                    with open(path / file.name, "ab") as opened:
                        opened.write(chunk)
            except OSError as error:
                fault = error
    return fault


def _chunk(file: Path, offset: int, source: int) -> bytes:
    """Return a piece of the file on the rank that sends it; less if it can't be read."""
    if joined_world()[0] != source:
        return b""
    try:
        with open(file, "rb") as opened:
            opened.seek(offset)
            return opened.read(CHUNK)
    except OSError:
        return b""


def _keep(found: Checkpoint, own: SavedPart, mine: Sums, fault: OSError | None) -> None:
    """Sync what this node received, compare it with what was sent, and list it in the marker."""
    try:
        if fault:
            raise fault
        own.path.mkdir(parents=True, exist_ok=True)  # a save may have written no file here
        received = checkpoint_files.settled(own.path, list(mine))
        if wrong := [name for name in mine if received[name] != mine[name]]:
            raise ClusterrunError(f"{wrong[0]} did not arrive as it was sent")
        checkpoint_files.mark(
            own.path,
            found.step,
            world_size=found.world_size,
            attempt=found.attempt,
            settings=found.settings,
            overrides=found.overrides,
            nodes=found.nodes,
            saved_at=found.saved_at,
            files={**own.files, **received},
        )
    except Exception:
        for name in mine:
            (own.path / name).unlink(missing_ok=True)
        raise
