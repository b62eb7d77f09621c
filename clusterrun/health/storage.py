"""Measure a shared directory from a node, and judge what all nodes measured at the same moment."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterrun.health.medians import slow
from clusterrun.shared.finding import Finding, fail, note, ok, skip
from clusterrun.shared.hostlist import named, natural_key
from clusterrun.shared.wording import count

FILE_BYTES: Final = 8 << 20
PIECE: Final = 1 << 20
# A server that shares its capacity evenly serves all nodes together as fast as one node alone. It
# breaks if it serves them much slower; short measurements vary by a factor of two.
COLLAPSE: Final = 0.25
LEAST: Final = 0.2  # of the median of the others, measured for half a second
MARK: Final = "seen-"
STATS: Final = 64  # names asked for one by one, when a cached listing lacks them
SEEN_S: Final = 2.0
PAUSE_S: Final = 0.5
_LESS_LOAD: Final = (
    "keep data, environment and caches on a disk of the node, write checkpoints less often, "
    "or ask the administrator for a parallel file system"
)
OTHER: Final = "choose a directory that all nodes share with --run-dir"


@dataclass(frozen=True, kw_only=True)
class StorageRates:
    """What a node measured: metadata operations and MB read in a second; None if unknown."""

    metadata: float | None = None
    read: float | None = None


def measure(directory: Path, seconds: float = 0.5) -> StorageRates:
    """Measure metadata, then reading, for `seconds` each, and leave nothing behind.

    Raises OSError if the directory can't be written. One operation that hangs is not interrupted.
    """
    place = Path(tempfile.mkdtemp(prefix=".clusterrun-", dir=directory))
    try:
        return StorageRates(metadata=_metadata(place, seconds), read=_read(place / "file", seconds))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _metadata(place: Path, seconds: float) -> float:
    """Create, look at, rename and delete files; return operations per second."""
    begin = time.monotonic()
    for done, operation in enumerate(_operations(place), start=1):
        operation()
        if (passed := time.monotonic() - begin) >= seconds:
            return done / passed
    raise AssertionError


def _operations(place: Path) -> Iterator[Callable[[], object]]:
    first, second = place / "a", place / "b"
    while True:
        yield lambda: os.close(os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield lambda: os.stat(first)
        yield lambda: os.rename(first, second)
        yield lambda: os.unlink(second)


def _read(file: Path, seconds: float) -> float | None:
    """Write a file, and read it past this node's cache; return MB per second."""
    piece = mmap.mmap(-1, PIECE)  # aligned, as direct reading needs
    if not _write(file, piece, time.monotonic() + seconds / 2):
        return None
    size = passed = 0.0
    with _uncached(file) as descriptor:
        begin = time.monotonic()
        while passed < seconds / 2:  # again and again, so that all nodes read at the same moment
            if got := os.readv(descriptor, [piece]):
                size += got
            else:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.lseek(descriptor, 0, os.SEEK_SET)
            passed = time.monotonic() - begin
    return size / 1e6 / passed


def _write(file: Path, piece: mmap.mmap, deadline: float) -> bool:
    """Write pieces until the deadline; return whether there is one."""
    written = 0
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        while written < FILE_BYTES and time.monotonic() < deadline:
            written += os.write(descriptor, piece)
            os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return written >= PIECE


@contextlib.contextmanager
def _uncached(file: Path) -> Iterator[int]:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # the file system can't
        descriptor = os.open(file, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def rates(alone: StorageRates, together: Mapping[str, StorageRates]) -> Finding:
    """Compare what each node measured while all did with what one measured alone."""
    name = "path.rate"
    if len(together) < 2:
        return skip(name, "no other node is there")
    parts = [
        each
        for what, unit, field in (
            ("metadata", "operations/s", "metadata"),
            ("reading", "MB/s", "read"),
        )
        if (each := _part(what, unit, getattr(alone, field), _known(field, together)))
    ]
    if not parts:
        return skip(name, "no node measured the file system")
    findings = [each for each in parts if each.hint]
    text = "; ".join(each.text for each in findings or parts)
    return note(name, text, findings[0].hint) if findings else ok(name, text)


def _known(field: str, together: Mapping[str, StorageRates]) -> dict[str, float]:
    found = {node: getattr(each, field) for node, each in together.items()}
    return {node: value for node, value in found.items() if value is not None}


@dataclass(frozen=True)
class _Part:
    text: str
    hint: str = ""


def _part(what: str, unit: str, alone: float | None, found: Mapping[str, float]) -> _Part | None:
    if alone is None or not found:
        return None
    low, high = min(found.values()), max(found.values())
    span = _number(low) if _number(low) == _number(high) else f"{_number(low)}-{_number(high)}"
    on = f"{count(len(found), 'node')} at once"
    text = f"{what}: {_number(alone)} {unit} on one node alone, {span} on each of {on}"
    if math.fsum(found.values()) < COLLAPSE * alone:
        return _Part(f"{text}: the file server breaks under this load", _LESS_LOAD)
    if behind := slow(found, LEAST):
        nodes, share = named(list(behind)), max(behind.values())
        text = f"{what}: {nodes} at most {share:.0%} of the median of the others; {text}"
        return _Part(text, f"leave out with --exclude {nodes}, and tell the administrator")
    return _Part(text)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def mark(directory: Path, node: str) -> None:
    """Write the file that other nodes must see. Raises OSError."""
    (directory / f"{MARK}{node}").touch()


def unseen(directory: Path, nodes: Sequence[str]) -> list[str]:
    """Return the nodes whose files are not seen, after all have called `mark`; wait for them.

    Raises OSError if the directory can't be read.
    """
    deadline = time.monotonic() + SEEN_S
    missing = list(nodes)
    while (missing := _unseen(directory, missing)) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    return missing


def visible(missed: Mapping[str, Collection[str]], number: int) -> dict[str, Finding]:
    """Judge which nodes do not see the files of which others of `number` nodes.

    A node that has its directory for itself sees none of the others, and none of them sees it.
    """
    name, most = "path.visible", (number + 1) // 2
    unseen_by = Counter(node for missing in missed.values() for node in missing)
    hidden = {node for node, times in unseen_by.items() if times >= most}
    where = "in the directory of the runs"
    bad = dict.fromkeys(hidden, f"the others do not see what it writes {where}")
    for node, missing in missed.items():
        if theirs := set(missing) - (hidden if len(missing) < most else set()):
            bad[node] = f"it does not see what {named(list(theirs))} wrote {where}"
    good = ok(name, f"the files of the other nodes are seen {where}")
    nodes = sorted({*missed, *bad}, key=natural_key)
    return {node: fail(name, bad[node], OTHER) if node in bad else good for node in nodes}


def _unseen(directory: Path, nodes: Sequence[str]) -> list[str]:
    """A listing that is cached may lack some: they are asked for by name, if they are few."""
    listed = set(os.listdir(directory))
    missing = [node for node in nodes if f"{MARK}{node}" not in listed]
    gone = [node for node in missing[:STATS] if not (directory / f"{MARK}{node}").exists()]
    return gone + missing[STATS:]
