"""The inner entrypoint of each rank: `clusterrun.rank.worker SCRIPT ARGS…` (or `-m MODULE`).

Redirect the rank's output to separate files, check the world contract, and write an error file if
the rank fails. Otherwise run the script as plain Python does.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import errno
import faulthandler
import io
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from clusterrun import runtime
from clusterrun.errors import shortened
from clusterrun.rank import contract as world
from clusterrun.rank.emit import spool_file
from clusterrun.rank.ending import RankEnd, endings, leave_last, one_line
from clusterrun.shared import given
from clusterrun.shared.control_page import STACKS_SIGNAL
from clusterrun.shared.files import DISK_FAULTS, last_line

PR_SET_PDEATHSIG = 1
_MACHINERY = (__file__, runpy.__file__, "<frozen runpy>")
_FORGIVEN = DISK_FAULTS | {errno.EFBIG}
_kept: list[io.TextIOWrapper] = []  # files that must stay open
when_joined: list[Callable[[], None]] = []  # what the process that forked this one wants to know


def main() -> None:
    """Run the script that the command line names, as one rank of the job."""
    argv = sys.argv[1:]
    if not argv or argv == ["-m"]:
        sys.exit("usage: python -m clusterrun.rank.worker SCRIPT [ARGS...] | -m MODULE [ARGS...]")
    os.environ.pop(given.OWN_RANK, None)  # an inherited one
    os.environ[given.OWN_RANK] = str(runtime.rank())
    os.environ[given.STORE_PORT] = os.environ.get("MASTER_PORT", "")
    with contextlib.suppress(OSError):
        os.unlink(spool_file("error.json"))
    leave_last()
    endings.append(ending := RankEnd())
    if (launcher := os.environ.get("CLUSTERRUN_LAUNCHER_PID", "")).isdigit():
        # Die with the launcher, or rather with its thread that started this process (prctl(2)).
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != int(launcher):  # it has already died
            os._exit(128 + signal.SIGKILL)
    if spool_file("out"):
        _move_output()
    faulthandler.enable()
    if os.environ.pop("CLUSTERRUN_QUIET_LAUNCHER", ""):
        os.environ.pop("TORCH_CPP_LOG_LEVEL", None)
    runtime.emit("rank_start", pid=os.getpid(), host=os.uname().nodename)
    # For Slurm the agent is one task of a node: give scripts the values of this rank.
    task = {**given.task_variables(os.environ), "SLURM_TASK_PID": str(os.getpid())}
    of_slurm = {name: value for name, value in task.items() if name in os.environ}
    os.environ.update(given.noting_changes(os.environ, {**os.environ, **of_slurm}))
    given.note_start(os.environ)  # for jobs that the script submits
    contract = world.Contract(os.environ, ending.break_off)
    contract.when_joined += when_joined
    contract.check_environment(os.environ)
    if contract.expected:
        world.install(contract)
    _run(argv, contract, ending)


def _move_output() -> None:
    """Send stdout and stderr to files, which no stopped agent can block, and stacks to a third."""
    for descriptor, stream, ending in ((1, sys.stdout, "out"), (2, sys.stderr, "err")):
        stream.flush()
        target = os.open(spool_file(ending), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(target, descriptor)
        os.close(target)
    moved = [file for file in (sys.stdout, sys.stderr) if isinstance(file, io.TextIOWrapper)]
    for file in moved:
        _forgive_full_disk(file.buffer)
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.write_through:
        sys.stdout.reconfigure(line_buffering=True)  # whole lines survive a crash
    _kept.append(file := open(spool_file("stacks"), "w", encoding="utf-8"))  # noqa: SIM115 - open until exit
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=False, chain=False)


def _forgive_full_disk(buffer: Any) -> None:
    """Let prints succeed when their disk is full, and count the output that can't be written.

    Replace only the `write` of the stream's binary buffer: a custom stream class would lose the
    fast paths that `io` has for its classes. What a script writes to that buffer is no longer
    buffered: on a full disk it would stay there, and raise at each later flush.
    """
    write_raw = getattr(buffer, "raw", buffer).write  # `python -u` has no buffer
    lost, why = 0, ""

    def report_lost() -> None:
        nonlocal lost
        words = f"clusterrun: {lost} bytes of output were lost here: {why}"
        if lost and write_raw(f"\n{words}\n".encode()):  # the last line may have been cut
            lost = 0

    def write(data: Any) -> int | None:
        nonlocal lost, why
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            report_lost()
            while rest:
                if (written := write_raw(rest)) is None:
                    return None  # only the script can make it non-blocking
                rest = rest[written:]
        except OSError as error:
            if error.errno not in _FORGIVEN:
                raise
            lost, why = lost + len(rest), str(error.strerror)
        return size

    def report_at_exit() -> None:
        with contextlib.suppress(OSError):
            report_lost()

    buffer.write = write
    atexit.register(report_at_exit)


def _run(argv: Sequence[str], contract: world.Contract, ending: RankEnd) -> None:
    """Run the script; report its failure, or check the contract if it succeeds."""
    try:
        _execute(argv)
    except SystemExit as stop:
        code = (stop.code or 0) & 0xFF if isinstance(stop.code, int | None) else 1  # it has 8 bits
        if code == 0:
            contract.check_end()
        else:
            message = stop.code.strip().splitlines() if isinstance(stop.code, str) else []
            reason = shortened(message[0]) if message else _last_line_on_stderr()
            why = f": {reason}" if reason else ""
            ending.fail(code, f"the script exited with status {code}{why}", "exit", stop)
        raise
    except BaseException as error:  # noqa: BLE001 - any exception that ends the script is its failure
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _MACHINERY:
            trace = trace.tb_next  # Python's tracebacks begin with the script's first frame
        error.__traceback__ = trace
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        ending.fail(code, one_line(error), "exception", error)
        sys.excepthook(type(error), error, trace)
        sys.exit(code)
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
    if os.path.isdir(script):
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


def _look_first_in(directory: str) -> None:
    """Put a directory first on sys.path, as Python does for a script, unless `python -P` runs."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, directory)


def _last_line_on_stderr() -> str:
    """Return the last line that the script wrote to stderr, such as argparse's error."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    return last_line(Path(spool_file("err")))


if __name__ == "__main__":
    # Run the module under its own name: `__main__` becomes the script.
    from clusterrun.rank import worker

    worker.main()
