"""Write files completely or not at all, private by default; and how many may be open.

Agents, ranks and commands share this module, so it imports little.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import stat
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO

from clusterrun.errors import shortened

PRIVATE = 0o600
PRIVATE_EXECUTABLE = 0o700
BY_UMASK = 0o666
TAIL_BYTES = 4096
MOST_BYTES = 64 << 20  # of a file that is read whole
RECORD_BYTES = 16 << 10  # more than any record of a run
# Full, over quota, failing or remounted read-only.
DISK_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside `path`; rename it to `path` if the block succeeds, or else remove it."""
    temporary = _beside(path)
    try:
        yield temporary
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_full(directory: Path) -> bool:
    """Return whether a disk has no room for one more record; a quota is not considered."""
    disk = os.statvfs(directory)  # 0 blocks or files if the file system does not count them
    lacks_bytes = disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < RECORD_BYTES
    return lacks_bytes or (disk.f_files > 0 and disk.f_favail == 0)  # no free inode


def open_new(path: Path, mode: int = PRIVATE) -> BinaryIO:
    """Open a file that must not exist yet. Raises FileExistsError."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb")


def unnamed_file() -> int:
    """Open a file that has no name; return its descriptor."""
    if hasattr(os, "memfd_create"):  # not if Python was built with an old glibc
        return os.memfd_create("clusterrun")
    import tempfile  # slow to import

    descriptor, path = tempfile.mkstemp()
    os.unlink(path)
    return descriptor


def write_whole(path: Path, content: str | bytes, *, mode: int = PRIVATE) -> None:
    """Replace a file atomically: no reader sees part of it."""
    with replacing(path) as temporary, open_new(temporary, mode) as file:
        file.write(_encoded(content))


def create(path: Path, content: str | bytes = b"", *, mode: int = PRIVATE) -> None:
    """Write a file that must not exist yet: the first writer succeeds. Raises FileExistsError."""
    temporary = _beside(path)
    try:
        with open_new(temporary, mode) as file:
            file.write(_encoded(content))
        os.link(temporary, path)
    except FileExistsError:
        # NFS repeats a request whose answer was lost, and finds its own link: then there are two.
        if temporary.stat().st_nlink != 2:
            raise
    finally:
        temporary.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name[:32]}.{os.urandom(6).hex()}.tmp")


_damage: ContextVar[list[Path] | None] = ContextVar("_damage", default=None)


@contextlib.contextmanager
def noting_damage() -> Iterator[list[Path]]:
    """Yield a list that gets the path of each damaged file that is read in the block."""
    found: list[Path] = []
    token = _damage.set(found)
    try:
        yield found
    finally:
        _damage.reset(token)


def note_damage(path: Path) -> None:
    """Add a damaged file to the list of the enclosing `noting_damage`, if there is one."""
    damaged = _damage.get()
    if damaged is not None and path not in damaged:
        damaged.append(path)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read it: to open a FIFO or a device may block. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    note_damage(path)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_whole(path: Path) -> bytes:
    """Read a regular file of a moderate size. Raises OSError."""
    with open_regular(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if the file is missing, damaged or not an object."""
    try:
        data = parse_object(read_whole(path))
    except FileNotFoundError:
        return None
    except OSError:
        data = None
    if data is None:
        note_damage(path)
    return data


def parse_object(text: str | bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None for anything else, such as a partial line."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def last_line(path: Path, letters: int = 300) -> str:
    """Return the last non-empty line of a file, shortened; "" if there is none."""
    lines = end_of(path, TAIL_BYTES).strip(b"\0").decode(errors="replace").splitlines()
    return next((shortened(line.strip(), letters) for line in reversed(lines) if line.strip()), "")


def end_of(path: Path, most_bytes: int, *, since: int = 0, until: int | None = None) -> bytes:
    """Return the last bytes of a file, or of its part from `since` to `until`; b"" on an error."""
    end = size_of(path) if until is None else until
    start = max(since, end - most_bytes)
    most = most_bytes if until is None else max(0, until - start)  # None: it may have grown since
    try:
        with open_regular(path) as file:
            file.seek(start)
            return file.read(most)
    except OSError:
        return b""


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _encoded(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape")


def write_crash(error: BaseException) -> Path:
    """Write the traceback of a fault to the user's cache; return its path. Raises OSError."""
    import time
    import traceback

    import clusterrun

    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(cache, "clusterrun", f"crash-{time.strftime('%Y%m%d')}-{os.getpid()}.txt")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    report = f"clusterrun {clusterrun.__version__}\n{''.join(traceback.format_exception(error))}"
    write_whole(path, report.encode("utf-8", "backslashreplace"))
    return path


# The limit of open files: the usual 1,024 are enough only for small jobs

ENOUGH = 1 << 20  # a limit of 10^9, as in containers, slows programs that close all descriptors
SPARE = 256  # recommended for all other files of a process


def needed_descriptors(nodes: int, ranks: int) -> int:
    """Return what one process opens: the conductor 2 for each node, rank 0 one for each rank."""
    return 2 * nodes + ranks


def raise_descriptor_limit(wanted: int = ENOUGH) -> int:
    """Raise the soft limit to `wanted`, but not above the hard limit; return the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted  # rather than -1, which means unlimited
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < possible:
        with contextlib.suppress(OSError, ValueError):  # macOS has another limit beside these
            resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
            return possible
    return soft
