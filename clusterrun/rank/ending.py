"""How a rank ends: it reports its end once to the agent, and takes down its process group last."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import json
import os
import sys
import time
import traceback
from itertools import compress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from clusterrun import runtime
from clusterrun.errors import ClusterrunError, NodeExit, shortened
from clusterrun.rank.emit import own_rank, spool_file
from clusterrun.shared.files import write_whole

STACK_LETTERS = 1 << 16  # a stack ends with the message, which may be long
_BUFFERED = frozenset((io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom))
_INSTALLED = (
    os.path.dirname(os.path.dirname(__file__)),
    "site-packages",
    "dist-packages",
    "/lib/python",
    "<frozen",
)
FEW_BLOCKS = 5_000_000  # of memory, whose objects are collected within half a second
FEW_PARTS = 20_000  # of a collection
# What a `__del__` commonly uses, and what may hold a process group.
_PLAIN_TYPES = (ModuleType, FunctionType, type, str, bytes, int, float, Path)
_MAY_HOLD_GROUPS = frozenset(
    ("accelerate", "deepspeed", "lightning", "peft", "pytorch_lightning", "torch", "transformers")
)
endings: list[RankEnd] = []  # of this rank, at its end


class RankEnd:
    """Ends the rank: reports the end once to the agent, and avoids an abort at exit."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._code = 0

    def fail(self, code: int, message: str, cause: str, error: BaseException) -> None:
        """Write the error files, and report the failure to the agent."""
        if os.getpid() == self._pid:  # not a process that the script forked
            self._code = code
            _report(code, message, cause, error)

    def break_off(self, error: ClusterrunError, kind: str) -> NoReturn:
        """Report the broken contract (Cause `kind`); exit without running code of the script."""
        details = [f"cause: {error.cause}"] if error.cause else []
        details += [f"hint: {hint}" for hint in error.hints]
        title = f"clusterrun: error: the world contract is broken: {error.message}"
        code = int(NodeExit.WORLD_BROKEN)
        _report(code, "\n".join([f"world contract broken: {error.message}", *details]), kind, error)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.write("\n  ".join([title, *details]) + "\n")
            sys.stderr.flush()
        os._exit(code)

    def leave(self) -> None:
        """Report a successful end, and destroy the process group last."""
        if os.getpid() != self._pid:  # a process that the script forked
            return
        distributed: Any = sys.modules.get("torch.distributed")
        is_joined = hasattr(distributed, "is_initialized") and distributed.is_initialized()
        runtime.emit("peaks", **_peaks())
        if self._code and is_joined:
            self._exit_at_once()
        if not self._code:
            runtime.report_end()
            runtime.emit("rank_exit", code=0)
        # gloo's threads may outlive the group and abort at Python's exit: DeepSpeed and FSDP keep a
        # group alive after its destruction, and about one successful run in four ended with SIGABRT
        # (torch 2.13). With a GPU in use the process exits as usual: profilers write at exit.
        cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
        is_alone = os.environ.get("CLUSTERRUN_WORLD_SIZE", "1") == "1"
        may_abort = not is_alone and hasattr(cuda, "is_initialized") and not cuda.is_initialized()
        c10d = getattr(distributed, "distributed_c10d", None)
        kept_groups = [*getattr(getattr(c10d, "_world", None), "pg_map", ())]  # freeing may hang
        if not may_abort:
            kept_groups.clear()
        if is_joined:
            distributed.destroy_process_group()
        if may_abort:
            with contextlib.suppress(BaseException):  # such as a signal's handler of the script
                # A rank that is not joined may have destroyed groups, which must not be collected.
                _release_globals(may_collect=is_joined or distributed is None)
            self._exit_at_once()

    def _exit_at_once(self) -> NoReturn:
        """Flush the open files, and exit without Python's own end."""
        # Destroying the group may hang if peers are gone. If it remains, gloo's threads abort the
        # process at exit ("terminate called without an active exception"): its status is lost.
        gc.unfreeze()  # the collector does not list what a script, or the forge, has frozen
        objects = gc.get_objects()  # there are many: compress and map loop over them in C
        for file in compress(objects, map(_BUFFERED.__contains__, map(type, objects))):
            with contextlib.suppress(OSError, ValueError):
                file.flush()
        os._exit(self._code)


def _release_globals(*, may_collect: bool) -> None:
    """Free what the script and its modules hold, as Python's own end does: this closes archives.

    Models stay: their destructors may need a process group. Cycles stay if they may contain groups
    that the script has destroyed.
    """
    if threading := sys.modules.get("threading"):  # daemon threads may now fail: print nothing
        threading.excepthook = lambda *_: None  # type: ignore[attr-defined]
    for module in (sys.modules["__main__"], *reversed(list(sys.modules.values()))):
        names = vars(module) if isinstance(module, ModuleType) else {}
        if (file := names.get("__file__")) and not any(part in file for part in _INSTALLED):
            _release(names)
    if may_collect and sys.getallocatedblocks() < FEW_BLOCKS:
        gc.collect()


def _release(names: dict[str, Any], *, is_module: bool = True) -> None:
    """Set the variables of a module to None, the newest first, so that they are closed.

    Keep plain values, which a `__del__` may use, and torch's, which may need a process group. Of an
    object with some of torch's, clear the other attributes (`names`, with `is_module` False).
    """
    for name, value in reversed(list(names.items())):
        if _is_plain(value) or (is_module and name.startswith("__")):
            continue
        attributes = getattr(value, "__dict__", {})
        if not any(map(_is_of_torch, (value, *attributes.values()))):
            names[name] = None
        elif is_module and not _is_of_torch(value):
            _release(attributes, is_module=False)


def _is_plain(value: object) -> bool:
    """Return whether a value has nothing to close, or too many parts to look for that."""
    if not isinstance(value, (list, dict, set, tuple)):
        return isinstance(value, _PLAIN_TYPES)
    parts = value.values() if isinstance(value, dict) else value
    return len(value) > FEW_PARTS or all(isinstance(part, _PLAIN_TYPES) for part in parts)


def _is_of_torch(value: object) -> bool:
    roots = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    return not roots.isdisjoint(_MAY_HOLD_GROUPS)


def _peaks() -> dict[str, int]:
    """Return the peak memory of this process and what it has written, in bytes."""
    peaks: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        # getrusage() counts what this process was before exec, too.
        status = Path("/proc/self/status").read_text(errors="replace")
        peaks["rss_bytes"] = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):
        peaks["written_bytes"] = int(Path("/proc/self/io").read_text().split()[3])  # wchar
    cuda: Any = sys.modules.get("torch.cuda")
    with contextlib.suppress(Exception):  # a broken context must not hide the end of the rank
        if cuda is not None and cuda.is_initialized():
            peaks["cuda_allocated_bytes"] = int(cuda.max_memory_allocated())
            peaks["cuda_reserved_bytes"] = int(cuda.max_memory_reserved())
    return peaks


def _report(code: int, message: str, cause: str, error: BaseException) -> None:
    """Report the rank's failure once: a process that it started may have reported it."""
    error_file = spool_file("error.json")  # the agent looks for it
    if error_file and os.path.exists(error_file):
        return
    at = round(time.time(), 6)
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    callstack = shortened("".join(lines), STACK_LETTERS)
    # In torchelastic's format, for torch's report and for the agent. The time is a JSON number:
    # torch parses it with `int()`, which refuses "1.5".
    extra = {"py_callstack": callstack, "timestamp": at, "rank": own_rank()}
    text = json.dumps({"message": {"message": message, "extraInfo": extra}}) + "\n"
    for path in filter(None, (os.environ.get("TORCHELASTIC_ERROR_FILE"), error_file)):
        with contextlib.suppress(OSError):
            write_whole(Path(path), text)
    runtime.emit("rank_exit", code=code, message=message, cause=cause, where=_where(error), ts=at)


@functools.cache
def leave_last() -> None:
    """Register the rank's last act before anything else registers one, to run after it."""
    atexit.register(_leave)


def _leave() -> None:
    for ending in endings:
        ending.leave()


def one_line(error: BaseException) -> str:
    """Return the message of an error with its notes (PEP 678; Python 3.11 prints them)."""
    lines = [line.strip() for line in traceback.format_exception_only(type(error), error)]
    notes = [line for note in getattr(error, "__notes__", ()) for line in str(note).splitlines()]
    printed = len(notes) if sys.version_info >= (3, 11) else 0  # they follow the message
    text = lines[-1 - printed]
    if isinstance(error, SyntaxError) and error.lineno:
        text += f" ({error.filename}:{error.lineno})"
    return shortened("; ".join([text, *notes]))


def _where(error: BaseException) -> str:
    """Return the place that raised, in the user's code if the traceback has any."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in _INSTALLED)]
    frame = (own or frames)[-1] if frames else None
    return f"{frame.filename}:{frame.lineno}" if frame else ""
