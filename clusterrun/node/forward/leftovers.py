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
        self._spool, self._dumps = spool, paths.flight_dumps(attempt, node)
        self._sources = {
            _Joined(paths.rank_errors(attempt, node)): spool.error_files,
            _Joined(paths.nccl_log(attempt, node)): spool.nccl_files,
        }

    @property
    def is_written(self) -> bool:
        """Return whether everything that was read has been written."""
        return not any(file.pending_bytes for file in self._sources)

    def copy(self, *, is_last: bool) -> None:
        """Copy data added since the last call: whole lines, or everything if `is_last`."""
        for file, found in self._sources.items():
            file.copy(found(), is_last=is_last)

    def pack_dumps(self) -> bool:
        """Pack the dumps once no rank is running; return whether that succeeded."""
        try:
            pack(self._spool, self._dumps)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the files."""
        for file in self._sources:
            file.close()


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

    def copy(self, paths: Iterable[Path], *, is_last: bool) -> None:
        for path in () if self.pending_bytes else paths:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
                whole = data if is_last else data[: data.rfind(b"\n") + 1]
                self.add(whole)
                self._read[path] = self._read.get(path, 0) + len(whole)
        self.flush()
