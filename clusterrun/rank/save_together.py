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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from clusterrun.errors import ClusterrunError
from clusterrun.rank.emit import emit, say, say_once
from clusterrun.rank.tidying import Tidying
from clusterrun.shared import checkpoint_files
from clusterrun.shared.checkpoint_files import Checkpoint, IncompleteError, Sums
from clusterrun.shared.files import DISK_FAULTS

# A shared file system may show late a directory that another node created.
SHOWN_WITHIN_S = 120.0
# The words of torch (without an errno) and safetensors (written in Rust) for disk errors.
_WORDS = (
    *("PytorchStreamWriter", "inline_container.cc"),
    *(f"(os error {number})" for number in DISK_FAULTS),
    *(os.strerror(number) for number in DISK_FAULTS),
)
_Part = TypeVar("_Part")


class Checkpoints:
    """The checkpoints of one training, in a directory that all its nodes share.

    `directory` defaults to that of the run, which all attempts share. The newest `keep` complete
    checkpoints are kept. `settings` are the values that must not change on a resume, such as the
    effective batch; each checkpoint stores them as JSON. Settings named in `override` may change:
    the change is reported, and stored in later checkpoints.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        keep: int = 2,
        settings: Mapping[str, Any] | None = None,
        override: Collection[str] = (),
    ) -> None:
        found = directory or os.environ.get("CLUSTERRUN_CHECKPOINT_DIR")
        if not found:
            raise ValueError("a directory is required outside a run of clusterrun")
        if keep < 1:
            raise ValueError(f"keep={keep}: keep at least 1 checkpoint")
        self.directory = Path(os.path.abspath(found))
        self._tidying = Tidying(self.directory, keep)
        self._settings = dict(settings or {})
        self._override = override
        self._overrides: Sequence[Mapping[str, Any]] = ()

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, the same on all ranks; each verifies its share.

        Rank 0 reports newer incomplete ones and overridden settings on its stderr. Raises
        ClusterrunError for a name in `override` that is not a setting.
        """
        found = self._newest()
        self._note_overrides(found)
        return found

    def _newest(self) -> Checkpoint | None:
        here, _ = joined_world()
        found = None
        listed = checkpoint_files.listed(self.directory) if here == 0 else []
        for path in broadcast([path for _, path in listed]):
            found, problem = _verified(path)
            if found is not None:
                break
            if here == 0:
                say(checkpoint_files.passed_over(path, problem))
        if here == 0:
            emit("resumed", step=found.step if found else 0)
        return found

    def _note_overrides(self, found: Checkpoint | None) -> None:
        if found is not None:
            self._overrides = overridden(found, self._settings, self._override)

    def resumable(
        self, world_size: int | None = None, *, overridable: Collection[str] = ()
    ) -> Checkpoint | None:
        """Return the checkpoint to resume from, the same on all ranks; None to start anew.

        `world_size` is the required world size (None: any). `overridable` lists the settings that
        the script's flag --override may name. Raises SystemExit with reason and hint, on all ranks,
        if the settings differ.
        """
        if wrong := sorted({*self._override} - {*overridable}):
            allowed = f"override only {', '.join(overridable)}" if overridable else ""
            raise refusal(f"can't override {', '.join(wrong)}", allowed)
        try:
            found = self._newest()
            words = found and found.difference(world_size, self._settings, override=self._override)
        except ClusterrunError as error:
            raise refusal(error.message, *error.hints) from None
        if found and words:
            more = {*overridable} - {*self._override}
            advice = _advice(found, world_size, found.changed(self._settings), more)
            raise refusal(f"can't resume from {found.path}: {words}", advice)
        self._note_overrides(found)
        return found

    def save(self, step: int, write: Callable[[Path], object]) -> Path | None:
        """Call `write(directory)` on all ranks, and publish what they wrote as a checkpoint.

        Return its path. If the disk is full, return None on all ranks: rank 0 reports it, nothing
        is left behind, and the training continues. Also return None if a later attempt of the run
        has begun: this one must not touch its checkpoints.
        Raises TypeError for a step that is not a whole number, ClusterrunError on all ranks if
        nothing was written.
        """
        step = operator.index(step)  # JSON accepts no tensor or NumPy scalar
        if is_superseded():
            return None
        here, _ = joined_world()
        unfinished = checkpoint_files.unfinished_directory(self.directory, step, _own_attempt())
        final = checkpoint_files.step_directory(self.directory, step)

        def publish() -> None:
            mark(unfinished, step, self._settings, files, self._overrides)
            checkpoint_files.publish(unfinished, final)

        files, problem = self._written(step, unfinished, write)
        if not (files or problem):
            if here == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise ClusterrunError(
                f"step {step} was not saved: nothing was written to {unfinished} "
                "(turn off accelerate's automatic_checkpoint_naming: it writes elsewhere)"
            )
        is_late = is_superseded()  # check again: writing takes long
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
        """Have all ranks write and sync their files; return what `settled_together` returns."""

        def begin() -> None:
            checkpoint_files.set_unfinished_aside(self.directory, _own_attempt())
            unfinished.mkdir(parents=True)
            try:
                checkpoint_files.check_room(self.directory)
            except OSError:
                self._tidying.start(up_to=step)  # may make room
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


def overridden(
    found: Checkpoint, settings: Mapping[str, Any], override: Collection[str]
) -> Sequence[Mapping[str, Any]]:
    """Return the checkpoint's overrides and those of this resume, which rank 0 reports.

    A resume that will be refused overrides nothing.
    """
    refused = found.difference(None, settings, override=override)
    if refused or not (changed := found.changed(settings)):
        return found.overrides
    here, _ = joined_world()
    if here == 0:
        words = ", ".join(f"{name} {now} instead of {was}" for name, (was, now) in changed.items())
        say(f"resuming with {words} (override)")
        emit("overridden", step=found.step, settings=changed)
    return (*found.overrides, {"step": found.step, "settings": changed})


def refusal(reason: str, *hints: str) -> SystemExit:
    """Return the SystemExit that ends a script with an error line and hints below it."""
    return SystemExit(
        "\n".join([f"error: {reason}", *(f"  hint: {hint}" for hint in hints if hint)])
    )


def _advice(
    found: Checkpoint,
    world_size: int | None,
    changed: Mapping[str, Sequence[Any]],
    overridable: Collection[str],
) -> str:
    """Return a hint on how to resume from a checkpoint that differs."""
    parts = []
    if "effective_batch" in changed:
        was = changed["effective_batch"][0]
        parts.append(f"keep batch size x accumulation x ranks = {was}")
    if world_size not in (None, found.world_size):
        parts.append(f"keep the number of ranks at {found.world_size}")
    if names := [name for name in changed if name in overridable]:
        parts.append(f"accept the change with --override {','.join(names)}")
    return "; ".join([*parts, "or " * bool(parts) + "start anew in another directory"])


@contextlib.contextmanager
def _refusals() -> Iterator[list[str]]:
    """Collect the disk errors of torch.save instead of raising them.

    DeepSpeed and FSDP save between collectives: if a rank raised there, the others would wait.
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
                os.truncate(file, 0)  # make room for the small files that follow

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
            f"this rank has not joined the {size} ranks with which it saves and resumes: "
            "call torch.distributed.init_process_group or create the Accelerator first"
        )
    return 0, 1


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks in order, once all have called."""
    distributed = _distributed()
    if distributed is None:
        return [value]
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def broadcast(value: _Part) -> _Part:
    """Return rank 0's value on all ranks."""
    distributed = _distributed()
    if distributed is None:
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def gathered_parts(part: Callable[[], _Part]) -> tuple[list[_Part], str]:
    """Call `part` on this rank; on all ranks return the parts of all, and the first error.

    If only one rank raised, the others would wait.
    """
    done, problem = [], ""
    try:
        done = [part()]
    except Exception as error:  # noqa: BLE001 - all ranks return it
        is_ours = isinstance(error, ClusterrunError)
        words = str(error) if is_ours else f"{type(error).__name__}: {error}"
        problem = disk_problem(error) or words
    parts = gathered((done, problem))
    return [value for done, _ in parts for value in done], _first(text for _, text in parts)


def _first(problems: Iterable[str]) -> str:
    return next((f"{text} (rank {n})" for n, text in enumerate(problems) if text), "")


def settled_together(path: Path) -> tuple[Sums, str]:
    """Sync all files below a directory to the disk, each rank its share, once all have written.

    On all ranks return their sizes and checksums, and the error ("" for none).
    """
    here, world_size = joined_world()
    names, problem = broadcast(_named(path) if here == 0 else ([], ""))
    if problem:
        return {}, problem
    mine = checkpoint_files.own_share(names, here, world_size)
    parts, problem = gathered_parts(lambda: checkpoint_files.settled(path, mine))
    found = {name: sums for part in parts for name, sums in part.items()}
    return ({} if problem else {name: found[name] for name in names}), problem


def _named(path: Path) -> tuple[list[str], str]:
    try:
        return checkpoint_files.file_names(path), ""
    except OSError as error:
        return [], f"{disk_problem(error) or error} (rank 0)"


def mark(
    path: Path,
    step: int,
    settings: Mapping[str, Any],
    files: Sums,
    overrides: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Mark a directory as a complete checkpoint of this attempt."""
    _, size = joined_world()
    checkpoint_files.mark(
        path,
        step,
        world_size=size,
        attempt=_own_attempt(),
        settings=settings,
        overrides=overrides,
        files=files,
    )


def _own_attempt() -> int:
    """Return the number of this attempt; 1 outside a run."""
    return int(os.environ.get("CLUSTERRUN_ATTEMPT", "1"))


def is_superseded() -> bool:
    """Return on all ranks whether a later attempt of the run has begun.

    Slurm requeues the job of a node that it can't reach, while the ranks there may still run.
    """
    here, _ = joined_world()
    run_dir, later = os.environ.get("CLUSTERRUN_RUN_DIR", ""), _own_attempt() + 1
    is_late = broadcast(here == 0 and bool(run_dir) and _has_begun(run_dir, later))
    if is_late and here == 0:
        say_once(f"attempt {later} of this run has begun: attempt {later - 1} no longer saves")
    return is_late


def _has_begun(run_dir: str, attempt: int) -> bool:
    try:  # NFS caches for a minute that a name is missing, but a listing is fresh
        return str(attempt) in os.listdir(f"{run_dir}/attempts")
    except OSError:
        return False


def say_unsaved(step: int, problem: str) -> None:
    """Report to people and the agent that a step was not saved."""
    say(f"step {step} was not saved: {problem}; training continues")
    emit("unsaved", step=step, reason=problem)


def _verified(path: Path) -> tuple[Checkpoint | None, str]:
    """Verify a checkpoint, each rank its share of the files; return it, or None and the problem.

    Raises ClusterrunError on all ranks if one of them can't read its share.
    """
    here, world_size = joined_world()
    found, files, problem = broadcast(_marker(path) if here == 0 else (None, {}, ""))
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
        faults, problem = gathered_parts(functools.partial(fault_by, check))
        if problem:
            raise ClusterrunError(f"{path.name} can't be read: {problem}")
        if any(faults):
            return None, min(filter(None, faults))  # in file order, as with one rank
    return found, ""


def _marker(path: Path) -> tuple[Checkpoint | None, Sums, str]:
    try:
        return *checkpoint_files.read_marker(path), ""
    except IncompleteError as problem:
        return None, {}, str(problem)


def disk_problem(error: BaseException) -> str:
    """Return in one line why the disk failed; "" for any other error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in DISK_FAULTS:
            return cause.strerror or str(cause)
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    is_disk = any(words in text for words in _WORDS)
    return f"the disk refused a write ({text.splitlines()[0]})" if is_disk else ""


def _distributed() -> Any:
    """Return torch.distributed if this process has joined a group; never import it."""
    module: Any = sys.modules.get("torch.distributed")
    is_joined = module is not None and module.is_available() and module.is_initialized()
    return module if is_joined else None


def agreed_problem(deed: Callable[[], object] | None) -> str:
    """Call `deed` on this rank; on all ranks return the first disk error of any rank."""
    problem = ""
    try:
        if deed is not None:
            deed()
    except Exception as error:
        problem = disk_problem(error)
        if not problem:
            raise
    return _first(gathered(problem))


def _await_directory(path: Path) -> None:
    """Wait until this node sees a directory that rank 0 created or found."""
    deadline = time.monotonic() + SHOWN_WITHIN_S
    while not _is_listed(path):
        if time.monotonic() > deadline:
            raise ClusterrunError(
                f"{path} exists on rank 0's node but not on this one: "
                "choose a checkpoint directory that all nodes share"
            )
        time.sleep(0.05)


def _is_listed(path: Path) -> bool:
    """Return whether its parent lists a directory: NFS caches names, but a listing is fresh."""
    try:
        return path.name in os.listdir(path.parent)
    except OSError:
        return False
