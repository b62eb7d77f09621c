"""Remove old checkpoints in a thread, since many files take a while."""

from __future__ import annotations

import atexit
import shutil
import threading
from pathlib import Path

from clusterrun.rank.emit import say
from clusterrun.shared import checkpoint_files

LEAVING_S = 20.0  # for which an exiting process waits for the removal


class Tidying:
    """Runs one thread at a time; if one is interrupted, the next removes what it left."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory, keep
        self._thread: threading.Thread | None = None

    def start(self, up_to: int) -> None:
        """Start removing checkpoints older than the newest complete ones up to a step."""
        if self._thread is None:
            atexit.register(self.wait, LEAVING_S)
        self._thread = threading.Thread(target=self._tidy, args=(self._thread, up_to), daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the removal is complete."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _tidy(self, before: threading.Thread | None, up_to: int) -> None:
        if before is not None:
            before.join()
        try:
            checkpoint_files.prune(self._directory, self._keep, up_to=up_to)
            for path in checkpoint_files.awaiting_removal(self._directory):
                shutil.rmtree(path)
        except OSError as error:
            say(f"could not remove an older checkpoint: {error}")
