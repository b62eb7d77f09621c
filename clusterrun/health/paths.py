"""The directories of a job: whether they can be written, and what is free there."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path
from typing import Final

from clusterrun.health.machine import gib, text_of
from clusterrun.rundir.paths import PLACES_OF_ONE_MACHINE
from clusterrun.shared.finding import BAD, Finding, bad, fail, note, ok, skip

MOUNTS: Final = Path("/proc/self/mountinfo")
LEAST_BYTES: Final = 100 << 20
FEW_BYTES: Final = 10 << 30
LEAST_INODES: Final = 1000
FEW_INODES: Final = 20_000
SCRATCH_BYTES: Final = (16 << 20, 1 << 30)  # containers may have 64 MiB
SCRATCH_INODES: Final = (200, 10_000)
SLOW_S: Final = 1.0
_TEMPORARY: Final = ("TMPDIR", "TEMP", "TMP")  # as tempfile looks for them
LOCAL: Final = frozenset({"btrfs", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs"})
_ELSEWHERE: Final = "choose another directory with --run-dir, or run_dir: in clusterrun.yaml"
_DELETE: Final = "delete old runs in {}, or choose another --run-dir"
_SHARED: Final = "set --run-dir to a directory that all nodes share"


def runs(path: Path, *, is_shared: bool) -> Finding:
    """Look whether a run directory can be created; `is_shared`: other machines must see it."""
    name, start = "path.runs", time.monotonic()
    place = existing(path)
    if not place.is_dir():
        return fail(name, f"{place} is not a directory", _ELSEWHERE)
    if not os.access(place, os.W_OK | os.X_OK):
        return fail(name, f"{place} is not writable", _ELSEWHERE)
    if is_shared and f"{os.path.realpath(place)}/".startswith(PLACES_OF_ONE_MACHINE):
        text = f"{path} is on a disk of this machine; the nodes cannot see it"
        return fail(name, text, _SHARED)
    kind = file_system(place) if is_shared else ""
    if kind in LOCAL:
        text = f"{path} is on {kind}, which is seldom shared with the nodes"
        return note(name, text, f"check on a node: srun ls -d {place}; if that fails, {_SHARED}")
    if (took_s := time.monotonic() - start) > SLOW_S:
        return slow_finding(path, f"answered after {took_s:.1f} s")
    return ok(name, f"{path} is writable" if place == path else f"{path} can be created")


def slow_finding(path: Path, how: str = "does not answer") -> Finding:
    """Return the finding for a file system that does not answer, or answers slowly."""
    return note("path.runs", f"{path} {how}", f"if 'time ls -d {path}' is still slow, {_ELSEWHERE}")


def disk(path: Path) -> Finding:
    """Look at the free bytes."""
    return _room("path.disk", path, (LEAST_BYTES, FEW_BYTES), _DELETE.format(path))


def inodes(path: Path) -> Finding:
    """Look at the free inodes."""
    levels = (LEAST_INODES, FEW_INODES)
    return _room("path.inodes", path, levels, _DELETE.format(path), of_inodes=True)


def scratch() -> Finding:
    """Look at the directory of temporary files, to which the ranks write their output."""
    name = "node.tmp"
    requested = next((os.environ[each] for each in _TEMPORARY if os.environ.get(each)), "/tmp")
    hint = "delete files there, or name another directory on the node: --env TMPDIR=DIRECTORY"
    try:
        place = Path(tempfile.gettempdir())
    except OSError:
        return fail(name, f"none of {requested}, /tmp and /var/tmp is writable", hint)
    found = [_room(name, place, SCRATCH_BYTES, hint)]
    found.append(_room(name, place, SCRATCH_INODES, hint, of_inodes=True))
    if os.path.realpath(place) != os.path.realpath(requested):
        found.append(note(name, f"{requested} is not writable; {place} is used instead", hint))
    wrong = [each for each in found if each.severity in BAD]
    worst = min(wrong, key=lambda each: BAD.index(each.severity), default=None)
    return worst or ok(name, "; ".join(each.text for each in found))


def _room(
    name: str, path: Path, levels: tuple[int, int], hint: str, *, of_inodes: bool = False
) -> Finding:
    """Judge what is free; below the first of `levels` a job fails, below the second it may."""
    least, few = levels
    disk = os.statvfs(existing(path))
    total, free = disk.f_blocks, disk.f_bavail * disk.f_frsize
    amount = gib(free)
    if of_inodes:
        total, free = disk.f_files, disk.f_favail
        amount = f"{free} inodes"
    if not total:
        return skip(name, "the file system does not report how much is free")
    text = f"{amount} are free in {path}"
    return ok(name, text) if free >= few else bad(name, f"only {text}", hint, is_sure=free < least)


def existing(path: Path) -> Path:
    """Return a path, or the nearest directory above it that exists."""
    return next((each for each in (path, *path.parents) if os.path.lexists(each)), Path("/"))


def file_system(path: Path) -> str:
    """Return the kind of file system that a path is on; "" if that is unknown."""
    real = f"{os.path.realpath(path)}/"
    kinds: dict[str, str] = {}  # of the file systems, by mount point
    # `... MOUNT_POINT OPTIONS ... - KIND ...`, blanks in octal: \040
    for line in text_of(MOUNTS).splitlines():
        place = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line.split()[4])
        kinds[place] = line.partition(" - ")[2].split(" ")[0]
    above = [place for place in kinds if real.startswith(f"{place.rstrip('/')}/")]
    return kinds[max(above, key=len)] if above else ""
