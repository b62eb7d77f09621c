"""The directory of the runs: whether it can be written, and what is free there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from clusterrun.errors import ClusterrunError
from clusterrun.health.check import Check, fail, note, ok, skip
from clusterrun.health.machine import gib
from clusterrun.launch.inputs import PLACES_OF_ONE_MACHINE
from clusterrun.shared import shell

MOUNTS: Final = Path("/proc/self/mountinfo")
QUOTA_S: Final = 2.0
LEAST_BYTES: Final = 100 << 20
FEW_BYTES: Final = 10 << 30
LEAST_INODES: Final = 1000
FEW_INODES: Final = 20_000
_LOCAL: Final = frozenset({"btrfs", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs"})
_ELSEWHERE: Final = "choose another directory with --run-dir, or run_dir: in clusterrun.yaml"
_SHARED: Final = "name a directory that all nodes share with --run-dir"


def runs(path: Path, *, is_shared: bool) -> Check:
    """Look whether a run directory can be created; `is_shared`: other machines must see it."""
    name, place = "path.runs", _existing(path)
    if not place.is_dir():
        return fail(name, f"{place} is not a directory", _ELSEWHERE)
    if not os.access(place, os.W_OK | os.X_OK):
        return fail(name, f"{place} cannot be written", _ELSEWHERE)
    if is_shared and f"{os.path.realpath(place)}/".startswith(_places_of_one_machine()):
        text = f"{path} is on a disk of this machine; the nodes cannot see it"
        return fail(name, text, _SHARED)
    kind = _file_system(place) if is_shared else ""
    if kind in _LOCAL:
        text = f"{path} is on {kind}, which is seldom shared with the nodes"
        return note(name, text, f"check on a node: srun ls -d {place}; else {_SHARED}")
    return ok(name, f"{path} can be written" if place == path else f"{path} can be created")


def disk(path: Path) -> Check:
    """Look at the free bytes."""
    name, found = "path.disk", os.statvfs(_existing(path))
    free = found.f_bavail * found.f_frsize
    if not found.f_blocks:
        return skip(name, "the file system does not report its size")
    text = f"{gib(free)} are free for {path}"
    if free >= FEW_BYTES:
        return ok(name, text)
    return (fail if free < LEAST_BYTES else note)(name, f"only {text}", _room(path))


def inodes(path: Path) -> Check:
    """Look at the free inodes."""
    name, found = "path.inodes", os.statvfs(_existing(path))
    if not found.f_files:
        return skip(name, "the file system does not count its inodes")
    text = f"{found.f_favail} inodes are free for {path}"
    if found.f_favail >= FEW_INODES:
        return ok(name, text)
    is_full = found.f_favail < LEAST_INODES
    return (fail if is_full else note)(name, f"only {text}", _room(path))


def quota() -> Check:
    """Ask `quota` whether a limit of the user is reached."""
    name = "path.quota"
    if shell.find("quota") is None:
        return skip(name, "the command quota was not found")
    try:
        done = shell.run(["quota", "-q"], timeout_s=QUOTA_S, tries=1)
    except ClusterrunError:
        return skip(name, f"quota did not answer within {QUOTA_S:g} s")
    if words := " ".join(done.stdout.split()):
        return fail(name, words[:200], "list your usage with `quota -s`, and delete files")
    if done.rc != 0:
        return skip(name, f"quota exited with status {done.rc}: {done.stderr.strip()[:200]}")
    return ok(name, "no quota is exceeded")


def _room(path: Path) -> str:
    return f"delete old runs in {path}, or choose another --run-dir"


def _existing(path: Path) -> Path:
    """Return a path, or the nearest directory above it that exists."""
    return next((each for each in (path, *path.parents) if os.path.lexists(each)), Path("/"))


def _places_of_one_machine() -> tuple[str, ...]:
    return tuple(f"{place}/" for place in PLACES_OF_ONE_MACHINE)


def _file_system(path: Path) -> str:
    """Return the kind of file system that a path is on; "" if that is unknown."""
    real = f"{os.path.realpath(path)}/"
    try:
        lines = MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    found = {_decoded(line.split()[4]): line.partition(" - ")[2].split(" ")[0] for line in lines}
    above = [place for place in found if real.startswith(f"{place.rstrip('/')}/")]
    return found[max(above, key=len)] if above else ""


def _decoded(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
