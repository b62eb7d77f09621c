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
_started: list[Callable[[], None]] = []  # what the ranks have yet to start
# Slurm may send these to every process of a step; the agent decides what to do.
LEFT_TO_AGENT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *WARNINGS)

_REPORT = "report this to clusterrun; --set launch.launcher=direct does the same without this line"


class Closed(Exception):
    """A fork of this process can't become a rank: why, and what the user can do."""

    def __init__(self, why: str, hint: str = INSTEAD) -> None:
        super().__init__(f"{why}; hint: {hint}")


def check(name: str) -> None:
    """Raise Closed if the import of `name` has made this process unfit."""
    if device := open_device():
        raise Closed(f"{name} opens {device}")
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        raise Closed(f"{name} initialises CUDA")
    if threads() > 1:  # OpenBLAS ends its threads before a fork, and starts new ones on demand
        if fork_answer(lambda: "alive", TRIAL_S) is None:  # this also runs the libraries' handlers
            raise Closed("a process that has imported the libraries hangs when it is forked")
        if threads() > 1:
            raise Closed(f"{name} starts threads, which a fork lacks")


def threads() -> int:
    """Return the number of threads of this process, without jemalloc's: it expects forks."""
    found = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            found += Path(f"/proc/self/task/{task}/comm").read_bytes() != b"jemalloc_bg_thd\n"
    return found


def open_device() -> str:
    """Return a device of an accelerator that this process has open; empty if none."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (target := os.readlink(f"/proc/self/fd/{descriptor}")).startswith(DEVICES):
                return target
    return ""


def imports_of_all(strategy: str, imported: Collection[str]) -> tuple[str, ...]:
    """Return what accelerate (for ZeRO) or the project imports of DeepSpeed, if it is installed."""
    names = ["deepspeed"] if "deepspeed" in imported else []
    if strategy.startswith("zero"):
        names += ["setuptools", "transformers.integrations.deepspeed"]
    return tuple(name for name in names if importlib.util.find_spec(name.partition(".")[0]))


def between_attempts(project: ProjectFiles, changed: Iterable[str]) -> tuple[str, ...]:
    """Return what ranks import only when they train: a start need not wait for it.

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
    required = [re.split(r"[^\w-]", each, maxsplit=1)[0] for each in package.requires or ()]
    names = ["datasets", *(name.replace("-", "_") for name in required)]
    places = [*project.directories, *directories(project)]
    return found is not None and found.origin == own and not shadowing(places, names)


def preload(names: Iterable[str], tell: Callable[[str], None]) -> None:
    """Import modules one by one, and check the process after each. Raises Closed."""
    for name in names:
        tell(name)
        try:
            with nvml_kept_out() as asked:
                importlib.import_module(name)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
            raise Closed(f"cannot import {name}: {text}") from error
        if asked:
            raise Closed(f"{name} asks NVML about the GPUs")
        check(name)


@contextlib.contextmanager
def nvml_kept_out() -> Iterator[list[str]]:
    """Keep NVML out of this process: a fork counts the GPUs for torch, `start_nvml` starts it.

    Yield a list of the other NVML functions that were called: such a call raises NVMLError.
    """
    asked: list[str] = []
    cuda: Any = sys.modules.get("torch.cuda")
    if not (hasattr(cuda, "_device_count_nvml") and cuda._is_compiled()):
        yield asked
        return
    ask = cuda._device_count_nvml
    count = cache(lambda: int(fork_answer(lambda: str(ask()), NVML_S) or "-1"))  # -1: unknown
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(cuda, "_device_count_nvml", count))
        if importlib.util.find_spec("pynvml"):
            module: Any = importlib.import_module("pynvml")
            start = module.nvmlInit
            stack.enter_context(_replaced(module, "nvmlInit", lambda: _started.append(start)))

            def refuse(name: str) -> NoReturn:
                asked.append(name)
                raise module.NVMLError(1)  # uninitialised

            stack.enter_context(_replaced(module, "_nvmlGetFunctionPointer", refuse))
        yield asked


def start_nvml() -> None:
    """Start NVML in a rank, if a library has at its import."""
    for start_once in _started:
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
        """Restore what was set before the forge began; node.sh had the warnings ignored."""
        for number, handler in {**self._before, **dict.fromkeys(WARNINGS, signal.SIG_DFL)}.items():
            signal.signal(number, handler)


def leave_to_agent() -> None:
    """Leave signals to the agent; the programs that this process starts have the defaults."""
    for number in LEFT_TO_AGENT:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_AGENT)


def check_environment(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raise Closed if the ranks' environment differs in a variable that an import has read.

    `ours` is the environment with which the forge began. A library that launcher and forge have
    both imported may have set a variable since. accelerate's launcher also sets each variable under
    its name in capital letters. The message shows no values: they may be secret.
    """
    same = {n.upper(): value for n, value in ours.items()}
    same |= {n: os.environ[n] for n in theirs if n in os.environ}
    names = {n for n in {*ours, *theirs} if theirs.get(n) not in (ours.get(n), same.get(n, ""))}
    late = {n for n in names if n.startswith(READ_LATE) or n == "PYTHONPATH"}
    if "libiomp" not in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"):
        late |= {n for n in names if n.startswith("KMP_")}  # Intel's OpenMP reads them
    if names - late:
        text = ", ".join(sorted(names - late))
        raise Closed(f"the ranks' environment differs before an import: {text}", _REPORT)


def added_path(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return what accelerate appends to PYTHONPATH. Raises Closed for any other change."""
    before, after = map(python_path, (ours, theirs))
    if after[: len(before)] != before:
        raise Closed("the ranks' PYTHONPATH differs", _REPORT)
    return after[len(before) :]


def python_path(env: Mapping[str, str]) -> list[str]:
    """Return the directories that PYTHONPATH names."""
    return [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]


def check_modules(project: ProjectFiles, added: Sequence[str], imported: set[str]) -> None:
    """Raise Closed if the project has modules that would be imported instead of preloaded ones."""
    if names := shadowing([*project.directories, *directories(project), *added], imported):
        why = f"modules of the project have the names of installed ones: {', '.join(names)}"
        raise Closed(why, "rename them, unless they should replace the installed ones")


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
    here = len(python_path(before))
    sys.path[here:here] = added  # behind PYTHONPATH's own
    sys.argv = [WORKER_MODULE, *entry]
    sys.orig_argv = list(module_argv(sys.executable, WORKER_MODULE, *entry))
    _refresh_seeds()
    start_nvml()
    gc.enable()
    _set_title(title)


def _refresh_seeds() -> None:
    """Draw what a fresh process draws from the system; `random` does so at each fork."""
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
    """Set the forge's title, while its first environment still shows where that is kept.

    Leave that environment in /proc: it shows to which job the process belongs.
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
