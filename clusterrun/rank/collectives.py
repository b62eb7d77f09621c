"""What all ranks do together: exchange values, and agree on the first error of any rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from clusterrun.errors import ClusterrunError
from clusterrun.shared.files import DISK_FAULTS

# The words of torch (without an errno) and safetensors (written in Rust) for disk errors.
_WORDS = (
    *("PytorchStreamWriter", "inline_container.cc"),
    *(f"(os error {number})" for number in DISK_FAULTS),
    *(os.strerror(number) for number in DISK_FAULTS),
)
_Part = TypeVar("_Part")


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


def broadcast(value: _Part, source: int = 0) -> _Part:
    """Return the value of rank `source` on all ranks."""
    distributed = _distributed()
    if distributed is None:
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=source)
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
