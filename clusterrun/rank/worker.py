"""The inner entrypoint of each rank: `clusterrun.rank.worker SCRIPT ARGS…` (or `-m MODULE`).

Redirect the rank's output to separate files, check the world contract, and write an error file if
the rank fails. Otherwise run the script as plain Python does.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import functools
import gc
import io
import json
import os
import resource
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import SourceFileLoader
from itertools import compress
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any, NoReturn

from clusterrun import runtime
from clusterrun.errors import NodeExit, WorldContractError, shortened
from clusterrun.rank import contract as world
from clusterrun.rank import output
from clusterrun.rank.emit import own_rank
from clusterrun.shared import given
from clusterrun.shared.control_page import STACKS_SIGNAL
from clusterrun.shared.files import last_line, write_whole

PR_SET_PDEATHSIG = 1
STACK_LETTERS = 1 << 16  # a stack ends with the message, which may be long
_BUFFERED = frozenset((io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom))
_MACHINERY = (__file__, runpy.__file__, "<frozen runpy>")
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
_USED_LATE = (ModuleType, FunctionType, type, str, bytes, int, float, Path)
_MAY_HOLD_GROUPS = frozenset(
    ("accelerate", "deepspeed", "lightning", "peft", "pytorch_lightning", "torch", "transformers")
)
_kept: list[io.TextIOWrapper] = []  # files that must stay open
_kept_ending: list[_Ending] = []
_frozen_files: list[Any] = []  # with buffers; the garbage collector does not list them
_gc_freeze = gc.freeze
when_joined: list[Callable[[], None]] = []  # what the process that forked this one wants to know


def main() -> None:
    """Run the script that the command line names, as one rank of the job."""
    argv = sys.argv[1:]
    if not argv or argv == ["-m"]:
        sys.exit("usage: python -m clusterrun.rank.worker SCRIPT [ARGS...] | -m MODULE [ARGS...]")
    os.environ.pop(given.OWN_RANK, None)
    os.environ[given.OWN_RANK] = str(runtime.rank())
    os.environ[given.STORE_PORT] = os.environ.get("MASTER_PORT", "")
    with contextlib.suppress(OSError):
        os.unlink(_error_file())
    leave_last()
    gc.freeze = freeze  # for scripts that call it
    ending = _Ending()
    _kept_ending.append(ending)
    die_with_parent("CLUSTERRUN_LAUNCHER_PID")
    _move_output(os.environ.get("CLUSTERRUN_SPOOL"))
    faulthandler.enable()
    _show_stacks(os.environ.get("CLUSTERRUN_SPOOL"))
    if os.environ.pop("CLUSTERRUN_QUIET_LAUNCHER", ""):
        os.environ.pop("TORCH_CPP_LOG_LEVEL", None)
    runtime.emit("rank_start", pid=os.getpid(), host=os.uname().nodename)
    _act_as_a_task_of_slurm()
    given.note_start(os.environ)
    contract = world.Contract(os.environ, ending.break_off)
    contract.when_joined += when_joined
    contract.check_environment(os.environ)
    if contract.expected:
        world.install(contract)
    _run(argv, contract, ending)


def freeze() -> None:
    """Freeze all objects, and note the files that must be flushed at the end."""
    _frozen_files.extend(_buffered() if _has_files() else (sys.stdout, sys.stderr))
    _gc_freeze()


def _buffered() -> Iterable[Any]:
    """Return the files with buffers among the objects that are not frozen: there are many."""
    objects = gc.get_objects()
    return compress(objects, map(_BUFFERED.__contains__, map(type, objects)))


def _has_files() -> bool:
    """Return whether this process has opened a file or a pipe."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if descriptor > 2 and target.startswith(("/", "pipe:")) and target != "/proc/self/fd":
                return True
    return False


@functools.cache
def leave_last() -> None:
    """Register the rank's last act before anything else registers one, to run after it."""
    atexit.register(_leave)


def _leave() -> None:
    for ending in _kept_ending:
        ending.leave()


def _act_as_a_task_of_slurm() -> None:
    """Give Slurm's variables the values of this rank, for scripts that read them.

    Slurm started the agent as its task, one for each node.
    """
    task = {**given.of_task(os.environ), "SLURM_TASK_PID": str(os.getpid())}
    found = {name: value for name, value in task.items() if name in os.environ}
    os.environ.update(given.noting_changes(os.environ, {**os.environ, **found}))


def die_with_parent(variable: str) -> None:
    """Have the kernel kill this process when its parent dies; exit now if it is already dead.

    `variable` names the environment variable with the parent's pid; do nothing without it. For the
    kernel, the parent is the thread that started this process (prctl(2)).
    """
    parent = os.environ.get(variable, "")
    if not parent.isdigit():
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(parent):
        os._exit(128 + signal.SIGKILL)


def _move_output(spool: str | None) -> None:
    """Redirect fd 1 and 2 to files, so that a stopped agent can't block a rank that prints."""
    if not spool:
        return
    for descriptor, stream, ending in ((1, sys.stdout, "out"), (2, sys.stderr, "err")):
        path = os.path.join(spool, f"rank_{own_rank()}.{ending}")
        stream.flush()
        target = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(target, descriptor)
        os.close(target)
    moved = [file for file in (sys.stdout, sys.stderr) if isinstance(file, io.TextIOWrapper)]
    output.forgive_full_disk(*moved)
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.write_through:
        sys.stdout.reconfigure(line_buffering=True)  # whole lines survive a crash


def _show_stacks(spool: str | None) -> None:
    """Have this rank write its stack to a file on a signal, which the agent sends in a hang."""
    if spool:
        path = os.path.join(spool, f"rank_{own_rank()}.stacks")
        _kept.append(file := open(path, "w", encoding="utf-8"))  # noqa: SIM115 - open until exit
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=False, chain=False)


def contract_of_child() -> world.Contract:
    """Return the contract for a process that a rank spawned."""
    return world.Contract(os.environ, _Ending().break_off, is_child=True)


def _run(argv: Sequence[str], contract: world.Contract, ending: _Ending) -> None:
    try:
        _execute(argv)
    except SystemExit as stop:
        code = _status(stop)
        if code == 0:
            contract.check_end()
        else:
            message = stop.code.strip().splitlines() if isinstance(stop.code, str) else []
            reason = shortened(message[0]) if message else _last_line_on_stderr()
            why = f": {reason}" if reason else ""
            ending.fail(code, f"the script exited with status {code}{why}", "exit", stop)
        raise
    except BaseException as error:  # noqa: BLE001 - any exception that ends the script is its failure
        error.__traceback__ = _own_frames_left_out(error.__traceback__)
        ending.fail(_exception_status(error), _one_line(error), "exception", error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(_exception_status(error))
    else:
        contract.check_end()


def _execute(argv: Sequence[str]) -> None:
    """Execute the script or module in a fresh `__main__`, as the interpreter does."""
    main_module = ModuleType("__main__")
    main_module.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main_module.__annotations__ = {}
    sys.modules["__main__"] = main_module
    if argv[0] == "-m":
        sys.argv = ["-m", *argv[2:]]
        _look_first_in(os.getcwd())
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]  # what `python -m` calls
        return
    sys.argv = list(argv)
    script = argv[0]
    if os.path.isdir(script) or not _is_source(script):
        _look_first_in(os.path.abspath(script))
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # python DIR
        return
    _look_first_in(os.path.dirname(os.path.realpath(script)))
    path = os.path.abspath(script)
    main_module.__dict__.update(
        __file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path)
    )
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main_module.__dict__)


def _is_source(script: str) -> bool:
    """Return whether the file is Python source, not a zip archive with a `__main__.py`."""
    with open(script, "rb") as file:
        return not file.read(4).startswith(b"PK\x03\x04")


def _look_first_in(directory: str) -> None:
    """Add the directory that Python puts first on a script's path."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, directory)


def _status(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    return stop.code & 0xFF if isinstance(stop.code, int) else 1


def _last_line_on_stderr() -> str:
    """Return the last line that the script wrote to stderr, such as argparse's error."""
    spool = os.environ.get("CLUSTERRUN_SPOOL")
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    return last_line(Path(spool) / f"rank_{runtime.rank()}.err") if spool else ""


def _exception_status(error: BaseException) -> int:
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _one_line(error: BaseException) -> str:
    """Return the message of an error with its notes (PEP 678; Python 3.11 prints them)."""
    lines = [line.strip() for line in traceback.format_exception_only(type(error), error)]
    notes = [line for note in getattr(error, "__notes__", ()) for line in str(note).splitlines()]
    shown = len(notes) if sys.version_info >= (3, 11) else 0
    text = lines[-1 - shown]
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


def _own_frames_left_out(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames before the script's first, as Python's tracebacks do."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _MACHINERY:
        trace = trace.tb_next
    return trace


class _Ending:
    """Ends the rank: reports the end once to the agent, and avoids an abort at exit."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._code = 0

    def fail(self, code: int, message: str, cause: str, error: BaseException) -> None:
        """Write the error files, and report the failure to the agent."""
        if os.getpid() == self._pid:  # not a process that the script forked
            self._code = code
            _report(code, message, cause, error)

    def break_off(self, error: WorldContractError, kind: str) -> NoReturn:
        """Report the broken world contract, and exit without running code of the script."""
        more = [f"cause: {error.cause}"] if error.cause else []
        more += [f"hint: {hint}" for hint in error.hints]
        lines = [f"clusterrun: error: the world contract is broken: {error.message}"]
        lines += [f"  {line}" for line in more]
        code = int(NodeExit.WORLD_BROKEN)
        message = "\n".join([f"world contract broken: {error.message}", *more])
        _report(code, message, kind, error)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()
        os._exit(code)

    def leave(self) -> None:
        """Destroy the process group last, and report a successful end."""
        if os.getpid() != self._pid:
            return
        distributed: Any = sys.modules.get("torch.distributed")
        is_joined = distributed is not None and distributed.is_initialized()
        runtime.emit("peaks", **_peaks())
        if self._code and is_joined:
            self._exit_at_once()
        if not self._code:
            runtime.report_end()
            runtime.emit("rank_exit", code=0)
        may_abort = _may_abort()
        c10d = getattr(distributed, "distributed_c10d", None)
        kept = [*getattr(getattr(c10d, "_world", None), "pg_map", ())]  # see Contract.gloo_groups
        if not may_abort:
            kept.clear()
        if is_joined:
            distributed.destroy_process_group()
        if may_abort:
            with contextlib.suppress(BaseException):  # such as a signal's handler of the script
                _release_globals(may_collect=is_joined or distributed is None)
            self._exit_at_once()

    def _exit_at_once(self) -> NoReturn:
        # Destroying the group may hang if peers are gone. Without it, gloo's threads abort the
        # process ("terminate called without an active exception") and its exit status is lost.
        for file in (*_frozen_files, *_buffered()):
            with contextlib.suppress(OSError, ValueError):
                file.flush()
        os._exit(self._code)


def _release_globals(*, may_collect: bool) -> None:
    """Free what the script and its modules hold, as Python's own end does: it closes archives.

    Models stay: their destructors may need a process group. Cycles stay if they may contain groups
    that the script has destroyed.
    """
    if threading := sys.modules.get("threading"):
        threading.excepthook = lambda *_: None  # type: ignore[attr-defined]  # daemons keep running
    for module in (sys.modules["__main__"], *reversed(list(sys.modules.values()))):
        names = vars(module) if isinstance(module, ModuleType) else {}
        if (file := names.get("__file__")) and not any(part in file for part in _INSTALLED):
            _release(names)
    if may_collect and sys.getallocatedblocks() < FEW_BLOCKS:
        gc.collect()


def _release(names: dict[str, Any], *, is_module: bool = True) -> None:
    """Set to None what may have to be closed, the newest first; keep what that may still use."""
    for name, value in reversed(list(names.items())):
        if _is_plain(value) or (is_module and name.startswith("__")):
            continue
        inner = getattr(value, "__dict__", {})
        if not any(map(_is_of_torch, (value, *inner.values()))):
            names[name] = None
        elif is_module and not _is_of_torch(value):
            _release(inner, is_module=False)


def _is_plain(value: object) -> bool:
    """Return whether a value has nothing to close, or too much to look for it."""
    if not isinstance(value, (list, dict, set, tuple)):
        return isinstance(value, _USED_LATE)
    parts = value.values() if isinstance(value, dict) else value
    return len(value) > FEW_PARTS or all(isinstance(part, _USED_LATE) for part in parts)


def _is_of_torch(value: object) -> bool:
    roots = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    return not roots.isdisjoint(_MAY_HOLD_GROUPS)


def _peaks() -> dict[str, int]:
    """Return the peak memory of this process and what it has written, in bytes."""
    peaks = {"rss_bytes": _peak_rss()}
    with contextlib.suppress(OSError, ValueError):
        peaks["written_bytes"] = int(Path("/proc/self/io").read_text().split()[3])
    cuda: Any = sys.modules.get("torch.cuda")
    with contextlib.suppress(Exception):  # a broken context must not hide the end of the rank
        if cuda is not None and cuda.is_initialized():
            peaks["cuda_allocated_bytes"] = int(cuda.max_memory_allocated())
            peaks["cuda_reserved_bytes"] = int(cuda.max_memory_reserved())
    return peaks


def _peak_rss() -> int:
    """Return the peak RSS of this program in bytes; getrusage includes the process before exec."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            line = next(line for line in file if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _may_abort() -> bool:
    """Return whether gloo's threads may outlive the group and abort at Python's exit.

    DeepSpeed and FSDP keep a group alive after its destruction: about one successful run in four
    ended with SIGABRT (torch 2.13). With a GPU in use the process exits as usual, since profilers
    write their results at exit.
    """
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    is_alone = os.environ.get("CLUSTERRUN_WORLD_SIZE", "1") == "1"
    return not is_alone and hasattr(cuda, "is_initialized") and not cuda.is_initialized()


def _report(code: int, message: str, cause: str, error: BaseException) -> None:
    """Report the rank's failure once: a process that it started may have reported it."""
    ours = _error_file()
    if ours and os.path.exists(ours):
        return
    at = round(time.time(), 6)
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    _write_error_files(message, shortened("".join(lines), STACK_LETTERS), at)
    where = _where(error)
    runtime.emit("rank_exit", code=code, message=message, cause=cause, where=where, ts=at)


def _error_file() -> str:
    spool = os.environ.get("CLUSTERRUN_SPOOL")
    return os.path.join(spool, f"rank_{own_rank()}.error.json") if spool else ""


def _write_error_files(message: str, callstack: str, at: float) -> None:
    """Write the error in torchelastic's format, for torch's report and for the agent.

    The time is a JSON number: torch parses it with `int()`, which refuses "1.5".
    """
    extra = {"py_callstack": callstack, "timestamp": at, "rank": own_rank()}
    text = json.dumps({"message": {"message": message, "extraInfo": extra}}) + "\n"
    for path in filter(None, (os.environ.get("TORCHELASTIC_ERROR_FILE"), _error_file())):
        with contextlib.suppress(OSError):
            write_whole(Path(path), text)


if __name__ == "__main__":
    # Run the module under its own name: `__main__` becomes the script.
    from clusterrun.rank import worker

    worker.main()
