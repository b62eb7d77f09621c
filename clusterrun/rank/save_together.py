"""Save and find checkpoints together with the other ranks."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import operator
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterrun.errors import ClusterrunError
from clusterrun.rank.collectives import (
    SavedPart,
    Sharing,
    agreed_problem,
    broadcast,
    complete_parts,
    disk_problem,
    gathered_parts,
    joined_world,
    problem_of,
    with_node,
)
from clusterrun.rank.emit import emit, say, say_once
from clusterrun.shared import checkpoint_files
from clusterrun.shared.checkpoint_files import Checkpoint, IncompleteError, Sums

# A shared file system may show late a directory that another node created.
SHOWN_WITHIN_S = 120.0
LEAVING_S = 20.0  # for which an exiting process waits for the removal


class Checkpoints:
    """The checkpoints of one run, in a directory that all nodes share, or in one on each node.

    `directory` defaults to that of the run, which all attempts share. The newest `keep` complete
    checkpoints are kept. `settings` are the values that must not change when a run resumes, such as
    the effective batch; each checkpoint stores them as JSON. Settings named in `override` may
    change: clusterrun reports the change, and stores it in later checkpoints.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        keep: int = 2,
        settings: Mapping[str, Any] | None = None,
        override: Collection[str] = (),
    ) -> None:
        if not (chosen := directory or os.environ.get("CLUSTERRUN_CHECKPOINT_DIR")):
            raise ValueError("outside a run of clusterrun, a directory is required")
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.directory = Path(os.path.abspath(chosen))
        self._keep = keep
        self._tidying: threading.Thread | None = None
        self._settings = dict(settings or {})
        self._override = override
        self._overrides: Sequence[Mapping[str, Any]] = ()

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, the same on all ranks; each checks its share.

        Rank 0 reports newer incomplete ones and overridden settings on its stderr. Raises
        ClusterrunError for a name in `override` that is not a setting.
        """
        if found := self._newest():
            self._overrides = overridden(found, self._settings, self._override)
        return found

    def _newest(self) -> Checkpoint | None:
        """Try the checkpoints of all directories, the newest first; report the one that is used."""
        sharing = Sharing.of_this_rank()
        found = None
        listed = checkpoint_files.listed(self.directory) if sharing.is_first else []
        listings = sharing.from_groups([path.name for _, path in listed])
        names = {name for listing in listings for name in listing}
        for _, path in checkpoint_files.newest_first(self.directory / name for name in names):
            found, problem = _verified(path, sharing)
            if found is not None:
                break
            if sharing.rank == 0:
                say(checkpoint_files.passed_over(path, problem))
        if sharing.rank == 0:
            emit("resumed", step=found.step if found else 0)
        return found

    def resumable(
        self, world_size: int | None = None, *, overridable: Collection[str] = ()
    ) -> Checkpoint | None:
        """Return the checkpoint to resume from, the same on all ranks; None to start over.

        `world_size` is the required world size (None: any). `overridable` lists the settings that
        the script's flag --override may name. Raises SystemExit with reason and hint, on all ranks,
        if the settings differ.
        """
        if wrong := sorted({*self._override} - {*overridable}):
            allowed = f"override only {', '.join(overridable)}" if overridable else ""
            raise refusal(f"can't override {', '.join(wrong)}", allowed)
        try:
            if (found := self._newest()) is None:
                return None
            difference = found.difference(world_size, self._settings, override=self._override)
        except ClusterrunError as error:
            raise refusal(error.message, *error.hints) from None
        if difference:
            more = {*overridable} - {*self._override}
            advice = _advice(found, world_size, found.changed(self._settings), more)
            raise refusal(f"can't resume from {found.path}: {difference}", advice)
        self._overrides = overridden(found, self._settings, self._override)
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
        sharing = Sharing.of_this_rank()
        unfinished = checkpoint_files.unfinished_directory(self.directory, step, own_attempt())
        final = checkpoint_files.step_directory(self.directory, step)
        parts, problem = self._write_and_sync(step, unfinished, write, sharing)
        if not (any(parts) or problem):
            if sharing.is_first:
                shutil.rmtree(unfinished, ignore_errors=True)
            text = f"step {step} was not saved: nothing was written to {unfinished}"
            remedy = "turn off accelerate's automatic_checkpoint_naming: it writes elsewhere"
            raise ClusterrunError(f"{text} ({remedy})")
        is_late = is_superseded()  # check again: writing takes long
        if not (problem or is_late):
            about = (self._settings, parts, self._overrides, sharing)
            write_marker = functools.partial(mark, unfinished, step, *about)
            problem = _publish(unfinished, final, write_marker, sharing)
        if problem or is_late:
            if sharing.is_first:
                shutil.rmtree(unfinished, ignore_errors=True)
            if problem and sharing.rank == 0:
                say_unsaved(step, problem)
            return None
        if sharing.rank == 0:
            emit("checkpoint", path=str(final), step=step)
        if sharing.is_first:
            self._start_tidying(step)
        return final

    def _write_and_sync(
        self, step: int, unfinished: Path, write: Callable[[Path], object], sharing: Sharing
    ) -> tuple[Sequence[Sums], str]:
        """Have all ranks write and sync; return the files of each group of ranks, and the error."""

        def begin() -> None:
            checkpoint_files.set_unfinished_aside(self.directory, own_attempt())
            unfinished.mkdir(parents=True)
            try:
                checkpoint_files.check_room(self.directory, sharing.node)
            except OSError:
                self._start_tidying(step)  # may make room
                self._await_tidying()
                checkpoint_files.check_room(self.directory, sharing.node)

        def fill() -> None:
            _await_directory(unfinished)
            with _disk_errors_of_torch() as errors:
                write(unfinished)
            if errors:
                # torch.save would have raised it; any errno of a full disk serves agreed_problem.
                raise OSError(errno.ENOSPC, errors[0])

        problem = agreed_problem(begin if sharing.is_first else None) or agreed_problem(fill)
        return ((), problem) if problem else settled_together(unfinished, sharing)

    def _start_tidying(self, up_to: int) -> None:
        """Start a thread that removes all but the newest complete checkpoints up to a step."""
        earlier = self._tidying
        if earlier is None:
            atexit.register(self._await_tidying, LEAVING_S)

        def tidy() -> None:
            if earlier is not None:
                earlier.join()  # one removal at a time
            try:
                checkpoint_files.prune(self.directory, self._keep, up_to=up_to)
                for path in checkpoint_files.awaiting_removal(self.directory):
                    shutil.rmtree(path)
            except OSError as error:
                say(f"could not remove an older checkpoint: {error}")

        self._tidying = threading.Thread(target=tidy, daemon=True)
        self._tidying.start()

    def _await_tidying(self, timeout_s: float | None = None) -> None:
        """Wait until the removal is complete; None waits without limit."""
        if self._tidying is not None:
            self._tidying.join(timeout_s)


def _publish(
    unfinished: Path, final: Path, write_marker: Callable[[], object], sharing: Sharing
) -> str:
    """Mark and publish a checkpoint, in all directories or none; return the error."""
    published = []

    def publish() -> None:
        checkpoint_files.publish(unfinished, final)
        published.append(final)

    problem = agreed_problem(write_marker if sharing.is_first else None)
    problem = problem or agreed_problem(publish if sharing.is_first else None)
    if problem:
        for path in published:  # another node could not publish its part
            shutil.rmtree(path, ignore_errors=True)
    return problem


def overridden(
    found: Checkpoint, settings: Mapping[str, Any], override: Collection[str]
) -> Sequence[Mapping[str, Any]]:
    """Return the checkpoint's overrides and those of this resume, which rank 0 reports."""
    # `difference` raises ClusterrunError for an override that is no setting. Only `newest`, which
    # refuses no difference, gets here with another one: it reports and adds no override then.
    differs_otherwise = bool(found.difference(None, settings, override=override))  # None: any world
    if differs_otherwise or not (changed := found.changed(settings)):
        return found.overrides
    own_rank, _ = joined_world()
    if own_rank == 0:
        words = ", ".join(f"{name} {now} instead of {was}" for name, (was, now) in changed.items())
        say(f"resuming with {words} (override)")
        emit("overridden", step=found.step, settings=changed)
    return (*found.overrides, {"step": found.step, "settings": changed})


def refusal(reason: str, *hints: str) -> SystemExit:
    """Return the SystemExit that ends a script with an error line and hints below it."""
    lines = [f"error: {reason}", *(f"  hint: {hint}" for hint in hints if hint)]
    return SystemExit("\n".join(lines))


def _advice(
    found: Checkpoint,
    world_size: int | None,
    changed: Mapping[str, Sequence[Any]],
    overridable: Collection[str],
) -> str:
    """Return a hint on how to resume from a checkpoint that differs."""
    parts = []
    if "effective_batch" in changed:
        parts.append(f"keep batch size x accumulation x ranks = {changed['effective_batch'][0]}")
    if world_size not in (None, found.world_size):
        parts.append(f"keep the number of ranks at {found.world_size}")
    if names := [name for name in changed if name in overridable]:
        parts.append(f"accept the change with --override {','.join(names)}")
    anew = "start anew in another directory"
    return "; ".join([*parts, f"or {anew}"]) if parts else anew


@contextlib.contextmanager
def _disk_errors_of_torch() -> Iterator[list[str]]:
    """Collect disk errors of torch.save: raised between collectives, they would hang the others."""
    torch: Any = sys.modules.get("torch")
    errors: list[str] = []
    if torch is None:
        yield errors
        return
    save = torch.save

    def save_if_possible(state: object, file: Any, *args: Any, **options: Any) -> None:
        try:
            save(state, file, *args, **options)
        except Exception as error:
            if not (problem := disk_problem(error)):
                raise
            errors.append(problem)
            with contextlib.suppress(OSError, TypeError):
                os.truncate(file, 0)  # make room for the small files that follow

    torch.save = save_if_possible
    try:
        yield errors
    finally:
        torch.save = save


def settled_together(path: Path, sharing: Sharing) -> tuple[Sequence[Sums], str]:
    """Sync all files below a directory to the disk, each rank its share, once all have written.

    Return on all ranks the sizes and checksums of the files, one mapping for each group of ranks
    that share a directory, and the error ("" for none).
    """
    names: list[str] = []
    problem = ""
    try:
        names = checkpoint_files.file_names(path) if sharing.is_first else []
    except OSError as error:
        problem = f"{disk_problem(error) or error} (rank {sharing.rank})"
    listings = sharing.from_groups((names, problem))
    if problem := next((problem for _, problem in listings if problem), ""):
        return (), problem
    group, names_of_groups = sharing.number, [names for names, _ in listings]
    share = sharing.own_share(names_of_groups[group])
    parts, problem = gathered_parts(lambda: (group, checkpoint_files.sync(path, share)))
    if problem:
        return (), problem
    found = {(group, name): sums for group, part in parts for name, sums in part.items()}
    return [{name: found[n, name] for name in names} for n, names in enumerate(names_of_groups)], ""


def mark(
    path: Path,
    step: int,
    settings: Mapping[str, Any],
    parts: Sequence[Sums],
    overrides: Sequence[Mapping[str, Any]],
    sharing: Sharing,
) -> None:
    """Mark this rank's directory as complete; `parts` are the files of each group of ranks."""
    found = Checkpoint(
        path=path,
        step=step,
        world_size=joined_world()[1],
        attempt=own_attempt(),
        saved_at=sharing.saved_at,
        settings=settings,
        overrides=overrides,
        nodes=dict(zip(sharing.nodes, map(list, parts), strict=False)),  # {} if all share it
    )
    checkpoint_files.mark(found, parts[sharing.number])


def own_attempt() -> int:
    """Return the number of this attempt; 1 outside a run."""
    return int(os.environ.get("CLUSTERRUN_ATTEMPT", "1"))


def is_superseded() -> bool:
    """Return on all ranks whether a later attempt has begun: ranks of a lost node may still run."""
    own_rank, _ = joined_world()
    is_late = broadcast(own_rank == 0 and has_successor())
    if is_late and own_rank == 0:
        own = own_attempt()
        say_once(f"attempt {own + 1} of this run has begun: attempt {own} no longer saves")
    return is_late


def has_successor() -> bool:
    """Return whether the next attempt of this run has begun."""
    run_dir = os.environ.get("CLUSTERRUN_RUN_DIR", "")
    return bool(run_dir) and _is_listed(Path(run_dir, "attempts", str(own_attempt() + 1)))


def say_unsaved(step: int, problem: str) -> None:
    """Report to people and the agent that a step was not saved."""
    say(f"step {step} was not saved: {problem}; training continues")
    emit("unsaved", step=step, reason=problem)


def _verified(path: Path, sharing: Sharing) -> tuple[Checkpoint | None, str]:
    """Verify a checkpoint, each rank its share of the files; return it, or None and the problem.

    Raises ClusterrunError on all ranks if one of them can't read its share.
    """
    markers = sharing.from_groups(SavedPart.read(path, sharing.node) if sharing.is_first else None)
    parts = [part for part in markers if part]
    own = parts[sharing.number]
    if problem := problem_of(parts):
        return None, problem
    share = {name: own.files[name] for name in sharing.own_share(list(own.files))}

    def check_share() -> str:
        if own.checkpoint:
            _await_directory(path)
        try:
            checkpoint_files.check(path, share)
        except IncompleteError as error:
            return with_node(sharing.node, str(error))
        return ""

    faults, problem = gathered_parts(check_share)
    if problem:
        raise ClusterrunError(f"{path.name} can't be read: {problem}")
    if any(faults):
        return None, min(filter(None, faults))  # in file order, as with one rank
    return complete_parts(parts, sharing) if sharing.nodes else own.checkpoint, ""


def _await_directory(path: Path) -> None:
    """Wait until this node sees a directory that rank 0 created or found."""
    deadline = time.monotonic() + SHOWN_WITHIN_S
    while not _is_listed(path):
        if time.monotonic() > deadline:
            text = f"{path} exists on rank 0's node but not on this one"
            raise ClusterrunError(f"{text}: choose a checkpoint directory that all nodes share")
        time.sleep(0.05)


def _is_listed(path: Path) -> bool:
    """Return whether its parent lists a path: NFS caches that a name is missing, but no listing."""
    with contextlib.suppress(OSError):
        return path.name in os.listdir(path.parent)
    return False
