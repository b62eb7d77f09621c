"""Save and find checkpoints together with the other ranks."""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from clusterrun.errors import ClusterrunError
from clusterrun.rank.emit import emit, say
from clusterrun.rank.tidying import Tidying
from clusterrun.shared import checkpoint_files
from clusterrun.shared.checkpoint_files import Checkpoint, IncompleteError, Sums

# A shared file system may show a directory that another node made only after a while.
SHOWN_WITHIN_S = 120.0
# Full, over the quota, failing, or remounted read-only.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
# How torch (without an errno) and safetensors (in Rust's words) say so.
_WORDS = (
    *("PytorchStreamWriter", "inline_container.cc"),
    *(f"(os error {number})" for number in _DISK),
    *(os.strerror(number) for number in _DISK),
)
_Part = TypeVar("_Part")


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
        self._tidying = Tidying(self.directory, keep)
        self._settings = dict(settings or {})

    def newest(self) -> Checkpoint | None:
        """Find the newest complete checkpoint, the same on all ranks; each reads its share of it.

        What is newer and not complete is said on rank 0's stderr.
        """
        here, _ = joined_world()
        paths = told(
            [path for _, path in checkpoint_files.listed(self.directory)] if here == 0 else []
        )
        for path in paths:
            found, problem = _verified(path)
            if found is not None:
                _tell_start(here, found.step)
                return found
            if here == 0:
                say(checkpoint_files.passed_over(path, problem))
        _tell_start(here, 0)
        return None

    def save(self, step: int, write: Callable[[Path], object]) -> Path | None:
        """Have all ranks call `write(directory)`, and make a checkpoint of what they wrote there.

        Returns where it lies. Where the disk takes no more it returns None on all ranks: rank 0
        says so, nothing is left behind, and the training goes on. So it does where a later attempt
        of the run has begun, whose checkpoints these would harm.
        Raises TypeError for a step that is no whole number, ClusterrunError on all ranks where
        nothing was written.
        """
        step = operator.index(step)  # a tensor or NumPy scalar would not be one in JSON
        if is_superseded():
            return None
        here, world_size = joined_world()
        unfinished = checkpoint_files.unfinished_directory(self.directory, step, own_attempt())
        final = checkpoint_files.step_directory(self.directory, step)

        def publish() -> None:
            checkpoint_files.mark(
                unfinished,
                step,
                world_size=world_size,
                attempt=own_attempt(),
                settings=self._settings,
                files=files,
            )
            checkpoint_files.publish(unfinished, final)

        files, problem = self._written(step, unfinished, write)
        if not (files or problem):
            if here == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise ClusterrunError(
                f"step {step} was not saved: nothing was written to {unfinished} "
                "(accelerate's automatic_checkpoint_naming writes elsewhere: leave it off)"
            )
        is_late = is_superseded()  # to write takes its time
        if not (problem or is_late):
            problem = agreed_problem(publish if here == 0 else None)
        if problem or is_late:
            if here == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
                if problem:
                    say_unsaved(step, problem)
            return None
        if here == 0:
            emit("checkpoint", path=str(final), step=step)
            self._tidying.start(up_to=step)
        return final

    def _written(
        self, step: int, unfinished: Path, write: Callable[[Path], object]
    ) -> tuple[Sums, str]:
        """Have all ranks write, and the files on the disk; return as `settled_together` does."""

        def begin() -> None:
            checkpoint_files.set_unfinished_aside(self.directory, own_attempt())
            unfinished.mkdir(parents=True)
            try:
                checkpoint_files.check_room(self.directory)
            except OSError:
                self._tidying.start(up_to=step)  # there may be room once it is through
                self._tidying.wait()
                checkpoint_files.check_room(self.directory)

        def fill() -> None:
            _await_directory(unfinished)
            with _refusals() as refused:
                write(unfinished)
            if refused:
                raise OSError(errno.ENOSPC, refused[0])

        here, _ = joined_world()
        problem = agreed_problem(begin if here == 0 else None) or agreed_problem(fill)
        return ({}, problem) if problem else settled_together(unfinished)


@contextlib.contextmanager
def _refusals() -> Iterator[list[str]]:
    """Collect what a disk refuses to torch.save, which returns as if it had saved.

    DeepSpeed and FSDP save between collectives: there a rank that fails alone leaves the others
    waiting.
    """
    torch: Any = sys.modules.get("torch")
    refused: list[str] = []
    if torch is None:
        yield refused
        return
    save = torch.save

    def saved(state: object, file: Any, *args: Any, **options: Any) -> None:
        try:
            save(state, file, *args, **options)
        except Exception as error:
            problem = disk_problem(error)
            if not problem:
                raise
            refused.append(problem)
            with contextlib.suppress(OSError, TypeError):
                os.truncate(file, 0)  # room for the small files that are written behind it

    torch.save = saved
    try:
        yield refused
    finally:
        torch.save = save


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


def told(value: _Part) -> _Part:
    """Return rank 0's value on all ranks; it is sent once, however many they are."""
    distributed = _distributed()
    if distributed is None:
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def shared(part: Callable[[], _Part]) -> tuple[list[_Part], str]:
    """Do this rank's part; return those of all ranks, or what went wrong, on all ranks alike.

    An error that a rank raised alone would leave the others waiting.
    """
    done, problem = [], ""
    try:
        done = [part()]
    except Exception as error:  # noqa: BLE001 - all are told of it
        is_ours = isinstance(error, ClusterrunError)
        words = str(error) if is_ours else f"{type(error).__name__}: {error}"
        problem = disk_problem(error) or words
    parts = gathered((done, problem))
    problem = next((f"{text} (rank {n})" for n, (_, text) in enumerate(parts) if text), "")
    return [value for done, _ in parts for value in done], problem


def settled_together(path: Path) -> tuple[Sums, str]:
    """Have all files below a directory on the disk, each rank its share of them.

    Returns their sizes and checksums, and what went wrong ("": nothing), on all ranks alike.
    To be called when all ranks have written theirs.
    """
    here, world_size = joined_world()
    names, problem = told(_named(path) if here == 0 else ([], ""))
    if problem:
        return {}, problem
    mine = checkpoint_files.own_share(names, here, world_size)
    parts, problem = shared(lambda: checkpoint_files.settled(path, mine))
    found = {name: sums for part in parts for name, sums in part.items()}
    return ({} if problem else {name: found[name] for name in names}), problem


def _named(path: Path) -> tuple[list[str], str]:
    try:
        return checkpoint_files.file_names(path), ""
    except OSError as error:
        return [], f"{disk_problem(error) or error} (rank 0)"


def own_attempt() -> int:
    """Return the number of this attempt of the run; 1 outside a run."""
    return int(os.environ.get("CLUSTERRUN_ATTEMPT", "1"))


def is_superseded() -> bool:
    """Say, on all ranks alike, whether a later attempt of the run has begun.

    Slurm starts a job again whose node has lost touch with it, and the ranks there may run on.
    """
    here, _ = joined_world()
    run_dir, later = os.environ.get("CLUSTERRUN_RUN_DIR", ""), own_attempt() + 1
    is_late = told(here == 0 and bool(run_dir) and _has_begun(run_dir, later))
    if is_late and here == 0:
        _say_once(f"attempt {later} of this run has begun: attempt {later - 1} saves no more")
    return is_late


def _has_begun(run_dir: str, attempt: int) -> bool:
    try:  # a list is new, where NFS remembers for a minute that a name was not there
        return str(attempt) in os.listdir(f"{run_dir}/attempts")
    except OSError:
        return False


def say_unsaved(step: int, problem: str) -> None:
    """Tell people and the agent that a step was not saved."""
    say(f"step {step} was not saved: {problem}; training goes on")
    emit("unsaved", step=step, reason=problem)


def _tell_start(here: int, step: int) -> None:
    if here == 0:
        emit("resumed", step=step)


@functools.cache
def _say_once(line: str) -> None:
    say(line)


def _verified(path: Path) -> tuple[Checkpoint | None, str]:
    """Read a checkpoint, each rank its share of the files: return it, or what is wrong with it.

    Raises ClusterrunError on all ranks where one of them can't read anything.
    """
    here, world_size = joined_world()
    found, files, problem = told(_marker(path) if here == 0 else (None, {}, ""))
    if problem:
        return None, problem
    mine = {name: files[name] for name in checkpoint_files.own_share(list(files), here, world_size)}

    def fault_by(check: Callable[[Path, Sums], None]) -> str:
        _await_directory(path)
        try:
            check(path, mine)
        except IncompleteError as fault:
            return str(fault)
        return ""

    for check in (checkpoint_files.check_sizes, checkpoint_files.check_contents):
        faults, problem = shared(functools.partial(fault_by, check))
        if problem:
            raise ClusterrunError(f"{path.name} can't be read: {problem}")
        if any(faults):
            return None, min(filter(None, faults))  # begins with a name: the first, as of one rank
    return found, ""


def _marker(path: Path) -> tuple[Checkpoint | None, Sums, str]:
    try:
        return *checkpoint_files.read_marker(path), ""
    except IncompleteError as problem:
        return None, {}, str(problem)


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
    while not _is_listed(path):
        if time.monotonic() > deadline:
            raise ClusterrunError(
                f"{path} is on rank 0's node and not on this one: "
                "checkpoints need a directory that all nodes share"
            )
        time.sleep(0.05)


def _is_listed(path: Path) -> bool:
    """Look a directory up in its parent: a list is new, where NFS remembers single names."""
    try:
        return path.name in os.listdir(path.parent)
    except OSError:
        return False
