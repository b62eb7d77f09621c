"""Adopt, watch and kill the processes of a job on this node, and divide its CPUs among them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SYS_PIDFD_OPEN = 434  # on x86-64, arm64 and ppc64
KILL_S = 5.0
_STATE, _EXIT_CODE = 0, 49  # fields of /proc/<pid>/stat, counted from the one after the name


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies; exit now if it is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def exit_code(pid: int) -> int | None:
    """Return how an unreaped process exited (negative: by a signal); None if it still runs."""
    fields = stat_fields(pid)
    has_ended = len(fields) > _EXIT_CODE and fields[_STATE] == "Z"
    return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE])) if has_ended else None


def open_pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable when a process ends. Raises OSError."""
    if hasattr(os, "pidfd_open"):  # not in a Python that was built for older kernels, as conda's
        return os.pidfd_open(pid)
    descriptor = int(ctypes.CDLL(None, use_errno=True).syscall(SYS_PIDFD_OPEN, pid, 0))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "pidfd_open")
    return descriptor


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    fields = stat_fields(pid)
    return bool(fields) and fields[_STATE] not in ("Z", "X")


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the process's name; [] if it is gone."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
        return text.rpartition(")")[2].split()
    return []


def how_ended(code: int) -> str:
    """Describe an exit status (negative: a signal), as in `was killed by SIGKILL`."""
    if code >= 0:
        return f"exited with status {code}"
    names = {int(number): number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def kill_descendants(unawaited: Collection[int] = (), spared: Collection[int] = ()) -> list[int]:
    """Kill and reap all descendants of this process but the `spared`; return the pids left.

    The `unawaited` may be stuck in the kernel: they are killed, but not waited for.
    """
    deadline = time.monotonic() + KILL_S
    while left := [pid for pid in _kill_all(spared) if pid not in unawaited]:
        with contextlib.suppress(ChildProcessError):  # none is left
            while os.waitpid(-1, os.WNOHANG)[0]:  # reap all that have ended
                continue
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


def _kill_all(spared: Collection[int]) -> list[int]:
    """Kill all descendants but the `spared`; return the pids that were found."""
    # The kernel may leave out a child while another exits: list again if there seems to be none.
    found = [pid for pid in descendants() or descendants() if pid not in spared]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def descendants(pid: int | None = None) -> list[int]:
    """Return the pids of all descendants of a process; None is this process."""
    found = _children(pid or os.getpid())
    for pid in found:  # the list grows in the loop
        found += _children(pid)
    return found


def _children(pid: int) -> list[int]:
    """Return the pids of a process's children, without listing all processes of the machine."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("[0-9]*"):
        try:
            found += map(int, (thread / "children").read_text().split())
        except ProcessLookupError:  # the thread has ended
            continue
        except FileNotFoundError:
            if thread.exists():  # a kernel without CONFIG_PROC_CHILDREN
                return _children_among_all(pid)
    return found


def _children_among_all(pid: int) -> list[int]:
    import psutil  # not in the forge, which needs little of this module

    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def fork() -> int:
    """Fork; Python 3.12 warns if there is any other thread."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


@contextlib.contextmanager
def held(*numbers: int) -> Iterator[None]:
    """Block signals in this thread and in the processes that it starts; deliver them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def fork_answer(work: Callable[[], str], timeout_s: float) -> str | None:
    """Return what `work` returns in a fork without other threads; None if it fails or is late."""
    reader, writer = os.pipe()
    if not (child := fork()):
        try:
            signal.set_wakeup_fd(-1)  # a signal must not write to the parent's
            with open(writer, "wb") as answer:
                answer.write(work().encode())
        finally:
            os._exit(0)
    os.close(writer)
    deadline, parts = time.monotonic() + timeout_s, list[bytes]()
    try:
        with open(reader, "rb", buffering=0) as pipe:
            while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                if not (part := pipe.read(1 << 16)):  # the fork has closed its end
                    return b"".join(parts).decode() or None
                parts.append(part)
        return None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def has_children(besides: Collection[int] = ()) -> bool:
    """Return whether this process has running children other than `besides`."""
    return any(pid not in besides and is_running(pid) for pid in _children(os.getpid()))


def reap_adopted(besides: Collection[int]) -> None:
    """Reap ended orphans except those in `besides`; no other thread may wait for a child."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in besides:
                return  # other code reaps it; until then, waitid would return it again
            os.waitpid(ended.si_pid, 0)


def allocated_cpus(env: Mapping[str, str]) -> int:
    """Count the CPUs that this node's task may use."""
    requested = env.get("SLURM_CPUS_PER_TASK", "")
    allowed = len(os.sched_getaffinity(0))
    return min(int(requested), allowed) if requested.isdigit() and int(requested) else allowed


def openmp_threads(names: Collection[str], *, ranks: int, nodes: int) -> dict[str, str]:
    """Return OMP_NUM_THREADS for `ranks` per node; {} if it is in `names`, which the job sets."""
    if "OMP_NUM_THREADS" in names:
        return {}
    # Simulated nodes share one machine.
    processes = ranks * (nodes if "CLUSTERRUN_LOCAL_NODE_RANK" in os.environ else 1)
    return {"OMP_NUM_THREADS": str(max(1, allocated_cpus(os.environ) // processes))}
