"""Copy the ranks' other files from the spool, into one file per node and kind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from clusterrun.node.forward.appended import AppendedFile
from clusterrun.node.forward.spool import Spool
from clusterrun.rundir.paths import RunPaths


class Leftovers:
    """Copy error files as JSON lines, NCCL's messages as text, flight recorder dumps as a tar.

    Leave out empty files.
    """

    def __init__(self, spool: Spool, paths: RunPaths, attempt: int, node: str) -> None:
        self._spool = spool
        self._errors = _Joined(paths.rank_errors(attempt, node))
        self._nccl = _Joined(paths.nccl_log(attempt, node))
        self._dumps = paths.flight_dumps(attempt, node)

    @property
    def is_written(self) -> bool:
        """Return whether everything that was read has been written."""
        return not (self._errors.pending_bytes or self._nccl.pending_bytes)

    def look(self) -> None:
        """List the files that exist now."""
        self._errors.found(self._spool.error_files())
        self._nccl.found(self._spool.nccl_files())

    def copy(self, *, is_last: bool) -> None:
        """Copy data added since the last call: whole lines, or everything if `is_last`."""
        self._errors.copy(is_last=is_last)
        self._nccl.copy(is_last=is_last)

    def pack_dumps(self) -> bool:
        """Pack the dumps once no rank is running; return whether that succeeded."""
        try:
            pack(self._spool, self._dumps)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the files."""
        self._errors.close()
        self._nccl.close()


def pack(spool: Spool, target: Path, *, is_moved: bool = False) -> None:
    """Pack the flight recorder's dumps, if there are any; `is_moved`: delete them then.

    Raises OSError.
    """
    dumps = [path for path in spool.dumps() if path.stat().st_size]
    if not dumps:
        return
    import tarfile  # few nodes need it

    temporary = target.with_name(f".{target.name}.tmp")
    temporary.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
        for path in dumps:
            archive.add(path, path.name.removeprefix("flight_"))  # as torch names them
    temporary.rename(target)
    for path in dumps if is_moved else ():
        path.unlink()


class _Joined(AppendedFile):
    """Growing files, concatenated in another file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._read: dict[Path, int] = {}

    def found(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self._read.setdefault(path, 0)

    def copy(self, *, is_last: bool) -> None:
        for path in () if self.pending_bytes else self._read:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                file.seek(self._read[path])
                data = file.read()
                whole = data if is_last else data[: data.rfind(b"\n") + 1]
                self.add(whole)
                self._read[path] += len(whole)
        self.flush()
