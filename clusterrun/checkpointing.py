"""Save and find checkpoints together with the other ranks."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clusterrun import checkpoints
from clusterrun.checkpoints import Checkpoint
from clusterrun.errors import ClusterrunError
from clusterrun.events import emit, say

# A shared file system may show a directory that another node made only after a while.
SHOWN_WITHIN_S = 10.0
# Full, over the quota, failing, or remounted read-only.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
# How torch (without an errno) and safetensors (in Rust's words) say so.
_WORDS = (
    *("PytorchStreamWriter", "inline_container.cc"),
    *(f"(os error {number})" for number in _DISK),
    *(os.strerror(number) for number in _DISK),
)


class Checkpoints:
    """The checkpoints of one training, in a directory that all its nodes share.

    `directory` is by default the run's own, which later attempts find again; `keep` complete ones
    are kept. `settings` is what must be equal for a resumed run to be the same training, such as
    the effective batch: it is written into each checkpoint (as JSON) and comes back with it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        keep: int = 2,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        found = directory or os.environ.get("CLUSTERRUN_CHECKPOINT_DIR")
        if not found:
            raise ValueError("outside a run of clusterrun a directory must be given")
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must be kept")
        self.directory = Path(os.path.abspath(found))
        self._keep = keep
        self._settings = dict(settings or {})

    def newest(self) -> Checkpoint | None:
        """Find the newest complete checkpoint, the same on all ranks.

        What is newer and not complete is said on rank 0's stderr.
        """
        here, _ = joined_world()
        found, notes = checkpoints.newest(self.directory) if here == 0 else (None, [])
        for note in notes:
            say(note)
        chosen: Checkpoint | None = gathered(found)[0]
        if chosen is not None:
            _await_directory(chosen.path)
        return chosen

    def save(self, step: int, write: Callable[[Path], object]) -> Path | None:
        """Have all ranks call `write(directory)`, and make a checkpoint of what they wrote there.

        Returns where it lies. Where the disk takes no more it returns None on all ranks: rank 0
        says so, nothing is left behind, and the training goes on.
        """
        here, world_size = joined_world()
        attempt = int(os.environ.get("CLUSTERRUN_ATTEMPT", "1"))
        unfinished = checkpoints.unfinished_directory(self.directory, step, attempt)
        final = checkpoints.step_directory(self.directory, step)

        def begin() -> None:
            checkpoints.remove_unfinished(self.directory, attempt)
            unfinished.mkdir(parents=True)
            checkpoints.check_room(self.directory)

        def fill() -> None:
            _await_directory(unfinished)
            write(unfinished)

        def finish() -> None:
            checkpoints.mark(
                unfinished, step, world_size=world_size, attempt=attempt, settings=self._settings
            )
            checkpoints.publish(unfinished, final)

        for deed, by_all in ((begin, False), (fill, True), (finish, False)):
            problem = agreed_problem(deed if by_all or here == 0 else None)
            if problem:
                if here == 0:
                    shutil.rmtree(unfinished, ignore_errors=True)
                    say(f"step {step} was not saved: {problem}; training goes on")
                return None
        if here == 0:
            emit("checkpoint", path=str(final), step=step)
            self._prune(step)
        return final

    def _prune(self, step: int) -> None:
        try:
            checkpoints.prune(self.directory, self._keep, up_to=step)
        except OSError as error:
            say(f"an older checkpoint could not be removed: {error}")


def joined_world() -> tuple[int, int]:
    """Return this process's rank and the size of the world that it has joined."""
    distributed = _distributed()
    if distributed is not None:
        return distributed.get_rank(), distributed.get_world_size()
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1":
        raise ClusterrunError(
            f"{size} ranks save and resume together, and this one has not joined the others: "
            "call torch.distributed.init_process_group, or make the Accelerator, first"
        )
    return 0, 1


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks in their order, once all have come here."""
    distributed = _distributed()
    if distributed is None:
        return [value]
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def disk_problem(error: BaseException) -> str:
    """Return in one line what the disk refused; "" where the error is about something else."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _DISK:
            return cause.strerror or str(cause)
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    is_disk = any(words in text for words in _WORDS)
    return f"the disk took no more ({text.splitlines()[0]})" if is_disk else ""


def _distributed() -> Any:
    """Return torch.distributed where this process has joined a group, without importing it."""
    module: Any = sys.modules.get("torch.distributed")
    is_joined = module is not None and module.is_available() and module.is_initialized()
    return module if is_joined else None


def agreed_problem(deed: Callable[[], object] | None) -> str:
    """Do this rank's part; return, on all ranks alike, what a disk refused to one of them."""
    problem = ""
    try:
        if deed is not None:
            deed()
    except Exception as error:
        problem = disk_problem(error)
        if not problem:
            raise
    problems = gathered(problem)
    return next((f"{text} (rank {n})" for n, text in enumerate(problems) if text), "")


def _await_directory(path: Path) -> None:
    """Wait until a directory that rank 0 made or found is seen here, too."""
    deadline = time.monotonic() + SHOWN_WITHIN_S
    while not path.is_dir():
        if time.monotonic() > deadline:
            raise ClusterrunError(
                f"{path} is on rank 0's node and not on this one: "
                "checkpoints need a directory that all nodes share"
            )
        time.sleep(0.05)
