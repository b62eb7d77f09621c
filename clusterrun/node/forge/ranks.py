"""Import what the ranks will need, and make each fork what a fresh interpreter would be.

A process that forks ranks has one thread, no open device, and no library that does not survive a
fork. NVML starts a thread and opens the GPUs, and deepspeed asks it for GPUs when it is imported: a
fork answers, and each rank starts its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from clusterrun.node.base.processes import fork_answer
from clusterrun.node.forge.begin import INSTEAD, WARNINGS
from clusterrun.node.forge.project import (
    READ_LATE,
    ProjectFiles,
    directories,
    read_early,
    shadowing,
)
from clusterrun.shared.own_modules import WORKER_MODULE, module_argv

TRIAL_S = 5.0
NVML_S = 60.0  # for a driver that must be loaded first
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_nvml_starts: list[Callable[[], None]] = []  # NVML's start, which each rank has yet to do
# Slurm may send these to every process of a step; the agent decides what to do.
LEFT_TO_AGENT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *WARNINGS)

_REPORT = "report this as a bug in clusterrun; --set launch.launcher=direct avoids this message"


class Closed(Exception):
    """A fork of this process can't become a rank: why, and what the user can do."""

    def __init__(self, why: str, hint: str = INSTEAD) -> None:
        super().__init__(f"{why}; hint: {hint}")


def check(name: str) -> None:
    """Raise Closed if the import of `name` has made this process unfit to fork ranks."""
    if device := open_device():
        raise Closed(f"{name} opens {device}")
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        raise Closed(f"{name} initialises CUDA")
    if threads() > 1:  # at a fork, OpenBLAS ends its threads: count again after a trial
        if fork_answer(lambda: "alive", TRIAL_S) is None:
            raise Closed("a process that has imported the libraries hangs when it is forked")
        if threads() > 1:
            raise Closed(f"{name} starts threads, which do not survive a fork")


def threads() -> int:
    """Return the number of threads of this process, without jemalloc's: it expects forks."""
    count = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            count += Path(f"/proc/self/task/{task}/comm").read_bytes() != b"jemalloc_bg_thd\n"
    return count


def open_device() -> str:
    """Return a device of an accelerator that this process has open; empty if none."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (target := os.readlink(f"/proc/self/fd/{descriptor}")).startswith(DEVICES):
                return target
    return ""


def deepspeed_imports(strategy: str, imported: Collection[str]) -> tuple[str, ...]:
    """Return the modules for DeepSpeed that all ranks import, if they are installed."""
    names = ["deepspeed"] if "deepspeed" in imported else []
    if strategy.startswith("zero"):
        names += ["setuptools", "transformers.integrations.deepspeed"]
    return tuple(name for name in names if importlib.util.find_spec(name.partition(".")[0]))


def late_imports(project: ProjectFiles, changed: Iterable[str]) -> tuple[str, ...]:
    """Return what ranks import only when they train: an idle forge imports it for the next attempt.

    torch does that for an optimizer, and accelerate for a loader if datasets is installed. datasets
    is left out if the project may change a variable (`changed`) that datasets reads at its import,
    or has a `datasets` of its own.
    """
    names = ["torch._dynamo"]
    is_used = bool(project.imported & {"accelerate", "transformers"})
    if is_used and not read_early(changed, ["datasets"]) and _is_installed_datasets(project):
        names.append("datasets")
    return tuple(n for n in names if n not in sys.modules and importlib.util.find_spec(n))


def _is_installed_datasets(project: ProjectFiles) -> bool:
    """Return whether ranks would import the installed package datasets, and all that it requires.

    The project or PYTHONPATH may have other modules of these names.
    """
    from importlib import metadata

    try:
        package = metadata.distribution("datasets")
        found = importlib.util.find_spec("datasets")
    except (metadata.PackageNotFoundError, ValueError):
        return False
    own = str(package.locate_file("datasets/__init__.py"))
    required = [re.split(r"[^\w-]", line, maxsplit=1)[0] for line in package.requires or ()]
    names = ["datasets", *(name.replace("-", "_") for name in required)]
    is_installed_one = found is not None and found.origin == own
    return is_installed_one and not shadowing(directories(project), names)


def preload(names: Iterable[str], tell: Callable[[str], None]) -> None:
    """Import modules one by one, and check the process after each. Raises Closed."""
    for name in names:
        tell(name)
        try:
            with nvml_kept_out() as nvml_calls:
                importlib.import_module(name)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
            raise Closed(f"cannot import {name}: {text}") from error
        if nvml_calls:
            raise Closed(f"{name} asks NVML about the GPUs")
        check(name)


@contextlib.contextmanager
def nvml_kept_out() -> Iterator[list[str]]:
    """Keep NVML out of this process: a fork counts the GPUs for torch, and ranks start NVML later.

    Yield a list of the other NVML functions that were called: such a call raises NVMLError.
    """
    nvml_calls: list[str] = []
    cuda: Any = sys.modules.get("torch.cuda")
    if not (hasattr(cuda, "_device_count_nvml") and cuda._is_compiled()):
        yield nvml_calls
        return
    direct = cuda._device_count_nvml
    count = cache(lambda: int(fork_answer(lambda: str(direct()), NVML_S) or "-1"))  # -1: unknown
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(cuda, "_device_count_nvml", count))
        if importlib.util.find_spec("pynvml"):
            module: Any = importlib.import_module("pynvml")
            start = module.nvmlInit
            stack.enter_context(_replaced(module, "nvmlInit", lambda: _nvml_starts.append(start)))

            def refuse(name: str) -> NoReturn:
                nvml_calls.append(name)
                raise module.NVMLError(1)  # uninitialised

            stack.enter_context(_replaced(module, "_nvmlGetFunctionPointer", refuse))
        yield nvml_calls


def start_nvml() -> None:
    """Start NVML in a rank if a library has tried to at its import in the forge."""
    for start_once in _nvml_starts:
        with contextlib.suppress(Exception):  # NVML's own error, if the node has no driver
            start_once()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Handlers:
    """The signal handlers of the forge, which a rank must not inherit."""

    def __init__(self) -> None:
        self._before = {number: signal.getsignal(number) for number in LEFT_TO_AGENT}
        leave_to_agent()

    def restore(self) -> None:
        """Restore what was set before; warnings, which node.sh ignores, get their defaults."""
        for number, handler in {**self._before, **dict.fromkeys(WARNINGS, signal.SIG_DFL)}.items():
            signal.signal(number, handler)


def leave_to_agent() -> None:
    """Ignore the signals that the agent handles, but not in programs that this process starts."""
    for number in LEFT_TO_AGENT:
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, not kept at exec
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_AGENT)


def check_environment(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raise Closed if the ranks' environment differs in a variable that an import has read.

    `ours` is the environment with which the forge began. A library that launcher and forge have
    both imported may have set a variable since. accelerate's launcher also sets each variable under
    its name in capital letters. The message shows no values: they may be secret.
    """
    also = {n.upper(): value for n, value in ours.items()}  # values that are accepted, too
    also |= {n: os.environ[n] for n in theirs if n in os.environ}  # without any, "" is accepted
    changed = {n for n in {*ours, *theirs} if theirs.get(n) not in (ours.get(n), also.get(n, ""))}
    harmless = {n for n in changed if n.startswith(READ_LATE) or n == "PYTHONPATH"}
    if "libiomp" not in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"):
        harmless |= {n for n in changed if n.startswith("KMP_")}  # Intel's OpenMP reads them
    if harmful := changed - harmless:
        text = ", ".join(sorted(harmful))
        raise Closed(f"the ranks' environment differs from the forge's: {text}", _REPORT)


def added_path(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return what accelerate appends to PYTHONPATH. Raises Closed for any other change."""
    before, after = map(python_path, (ours, theirs))
    if after[: len(before)] != before:
        raise Closed("the ranks' PYTHONPATH differs from the forge's", _REPORT)
    return after[len(before) :]


def python_path(env: Mapping[str, str]) -> list[str]:
    """Return the directories that PYTHONPATH names."""
    return [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]


def check_modules(project: ProjectFiles, added: Sequence[str], imported: set[str]) -> None:
    """Raise Closed if the project or a directory in `added` would replace modules in `imported`."""
    if names := shadowing([*directories(project), *added], imported):
        why = f"modules of the project have the same names as installed ones: {', '.join(names)}"
        raise Closed(why, "rename them, unless they are meant to replace the installed ones")


def become(
    entry: Sequence[str],
    environ: Mapping[str, str],
    before: Mapping[str, str],  # the environment with which the forge began
    output: str,
    title: str,
    launcher: int,  # the forge's pid
) -> None:
    """Turn this fork into a rank with `environ`, and with what the forge's imports have set."""
    os.setsid()
    target = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    os.close(target)
    effects = {n: v for n, v in os.environ.items() if before.get(n) != v and n not in environ}
    added = added_path(before, environ)
    os.environ.clear()
    os.environ.update({**environ, **effects, "CLUSTERRUN_LAUNCHER_PID": str(launcher)})
    end = len(python_path(before))  # sys.path begins with the directories of PYTHONPATH
    sys.path[end:end] = added
    sys.argv = [WORKER_MODULE, *entry]
    sys.orig_argv = list(module_argv(sys.executable, WORKER_MODULE, *entry))
    _refresh_seeds()
    start_nvml()
    gc.enable()
    _set_title(title)


def _refresh_seeds() -> None:
    """Draw again what a fresh process draws from the system; `random` does so at each fork."""
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "default_generator"):
        torch.default_generator.seed()
    for name in ("multiprocessing.process", "multiprocess.process"):  # the latter of datasets
        if (processes := sys.modules.get(name)) is not None:
            processes.current_process().authkey = os.urandom(32)
    fingerprint: Any = sys.modules.get("datasets.fingerprint")
    if hasattr(fingerprint, "fingerprint_rng"):  # it names files that ranks must not share
        fingerprint.fingerprint_rng.seed()


def set_first_title(title: str) -> None:
    """Set the forge's title before os.environ changes, by which setproctitle finds its place.

    Leave the environment in /proc: it shows to which job the process belongs.
    """
    os.environ["SPT_NOENV"] = "1"
    _set_title(title)
    del os.environ["SPT_NOENV"]


def _set_title(title: str) -> None:
    """Set the command line that `ps` shows, but not the name: Slurm misreads one with a space."""
    with contextlib.suppress(ImportError):
        import setproctitle

        name = setproctitle.getthreadtitle()
        setproctitle.setproctitle(title)
        setproctitle.setthreadtitle(name)
