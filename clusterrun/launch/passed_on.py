"""Check the additional options that the user passes to sbatch and srun."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from clusterrun.errors import UsageError
from clusterrun.launch.plan import Directive

REQUEUE_DELAY: Final = (
    "SchedulerParameters=requeue_delay= (before Slurm 25.11: AuthInfo=cred_expire=)"
)
_ONE_TASK: Final = "leave it out: Slurm starts one task per node"
_NODES: Final = "use clusterrun's own option: it applies to the whole job"
_LAUNCH: Final = "leave it out: clusterrun starts, watches and ends the step"

# Options that would change the launch itself, and what to use instead.
_OWNED: Final = {
    "chdir": "submit from the directory that the ranks are to run in",
    **dict.fromkeys(("error", "output"), "leave it out: the output is in the run directory"),
    **dict.fromkeys(("export", "export-file"), "use --env NAME=VALUE or --pass-env NAME"),
    "input": "leave it out: the ranks read no standard input",
    "nodes": "use -N",
    **dict.fromkeys(("ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket"), _ONE_TASK),
    **dict.fromkeys(
        ("ntasks-per-node", "tasks-per-node"),
        "use --nproc-per-node: Slurm starts one task per node",
    ),
    "test-only": "use 'clusterrun submit --dry-run'",
}
_OWNED_BY_SBATCH: Final = {
    **_OWNED,
    "array": "submit once for each value: clusterrun submits no job arrays",
    "clusters": "use --set slurm.clusters=NAME",
    "cpus-per-gpu": "use --set slurm.cpus_per_gpu=N",
    **dict.fromkeys(("help", "usage", "version"), "run sbatch itself with it"),
    "no-requeue": "use --set slurm.requeue=false",
    "ntasks": "use -N and --nproc-per-node: Slurm starts one task per node",
    "requeue": (
        "leave it out: clusterrun passes a plain --requeue; --requeue=expedite would hold every "
        f"job that fails; a site can shorten the wait after a requeue: {REQUEUE_DELAY}"
    ),
    "wait": "use 'clusterrun submit --wait'",
    "wrap": "name a script",
}
_OWNED_BY_SRUN: Final = {
    **_OWNED,
    **dict.fromkeys(("cpus-per-task", "exclude", "nodelist", "relative"), _NODES),
    "ntasks": _OWNED["ntasks-per-node"],
    **dict.fromkeys(("attach", "het-group", "immediate", "jobid", "kill-on-bad-exit"), _LAUNCH),
    **dict.fromkeys(("label", "multi-prog", "no-allocate", "no-kill", "overlap", "pty"), _LAUNCH),
    **dict.fromkeys(("unbuffered", "wait", "help", "usage", "version"), _LAUNCH),
}
SHORT: Final = {
    **{"A": "account", "C": "constraint", "D": "chdir", "G": "gpus", "H": "hold", "J": "job-name"},
    **{"M": "clusters", "N": "nodes", "V": "version", "W": "wait", "a": "array", "b": "begin"},
    **{"c": "cpus-per-task", "d": "dependency", "e": "error", "h": "help", "i": "input"},
    **{"n": "ntasks", "o": "output", "p": "partition", "q": "qos", "t": "time"},
    **{"w": "nodelist", "x": "exclude"},
    # Of srun alone
    **{"I": "immediate", "K": "kill-on-bad-exit", "Z": "no-allocate", "k": "no-kill"},
    **{"l": "label", "r": "relative", "u": "unbuffered"},
}
_MEMORY: Final = ("mem", "mem-per-cpu", "mem-per-gpu")
_NO_BEGINNINGS: Final = ("gpus", "mem", "time")  # although longer names begin with them
_CONTAINER_OPTION: Final = r"--(no-)?container-(?!id)"  # of Slurm's plugin pyxis
SBATCH: Final = "sbatch"
SRUN: Final = "srun"
_HINTS: Final = {SBATCH: _OWNED_BY_SBATCH, SRUN: _OWNED_BY_SRUN}


def asks_for_gpus(arg: str) -> bool:
    """Return whether an option of sbatch or srun requests GPUs, or parts of one.

    >>> [asks_for_gpus(arg) for arg in ("--gres=gpu:h100:4,nvme:1", "-G4", "--gres=nvme:1")]
    [True, True, False]
    """
    name = _option_name(arg)
    is_of_gpu = name.startswith(("gres", "tres-per")) and re.search(r"\b(gpu|shard|mps)\b", arg)
    return name.startswith("gpus") or bool(is_of_gpu)


def as_one_word(program: str, args: Iterable[str]) -> tuple[str, ...]:
    """Join each option with its value, since a directive is one word. Raises UsageError.

    >>> as_one_word(SBATCH, ["-p gpu", "--gres gpu:4", "--licenses=a b"])
    ('-pgpu', '--gres=gpu:4', '--licenses=a b')
    """
    words, flag = [], f"--{program}-arg"
    for arg in args:
        option = re.match(r"(-[A-Za-z]|--[A-Za-z][\w-]*)\s+(?=\S)", arg)
        separator = "=" if arg.startswith("--") else ""
        word = f"{option[1]}{separator}{arg[option.end() :]}" if option else arg
        # The text of a comment may look like an option.
        if re.search(r"\s(-[A-Za-z]\b|--[a-z])", word) and "comment" not in arg:
            hint = f"pass each one separately, as in {flag}=--nice=100 {flag}=--tmp=1G"
            raise UsageError(f"{flag}: {arg!r} contains several options", hint=hint)
        words.append(word)
    return tuple(words)


def sets_cpus(arg: str) -> bool:
    """Return whether an option of sbatch sets the CPUs of a task.

    >>> sets_cpus("-c8"), sets_cpus("--cpus-per-gpu=2"), sets_cpus("--nice=100")
    (True, True, False)
    """
    return _option_name(arg).startswith("cpus-per-")


def check_options(program: str, args: Iterable[str], lines: Iterable[Directive] = ()) -> None:
    """Refuse options that clusterrun sets itself or that break the launch.

    `lines` are clusterrun's own directives. Raises UsageError for the first problem.
    """
    own_names = sorted({line.name for line in lines})
    for arg in args:
        for text, hint in _problems(program, arg, own_names):
            raise UsageError(f"--{program}-arg {text}", hint=hint)


def _problems(program: str, arg: str, own_names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each problem of an option, with a hint.

    Slurm accepts the beginning of a long option, so --arr is refused like --array.
    """
    if not re.match(r"--?[A-Za-z]", arg):
        text = f"{arg!r} is not an option of {program}"
        yield text, f"write an option as one word: --{program}-arg=--nice=100"
    if program == SBATCH and re.match(_CONTAINER_OPTION, arg):
        yield f"{arg} would also run the batch script in the container", f"use --srun-arg={arg}"
    name, is_long = _option_name(arg), arg.startswith("--")
    for owned, hint in sorted(_HINTS[program].items()):
        if owned == name or (is_long and owned.startswith(name)):
            yield f"{arg} does not apply to a clusterrun job", hint
    is_memory = name == "mem" or name.startswith("mem-p")  # Slurm takes only one of _MEMORY
    for own in own_names:
        is_beginning = is_long and name not in _NO_BEGINNINGS and own.startswith(name)
        if own == name or is_beginning or (is_memory and own in _MEMORY):
            yield f"{arg} duplicates clusterrun's own --{own}", "keep one of them"


def _option_name(arg: str) -> str:
    """Return the long option that an argument sets."""
    if arg.startswith("--"):
        return arg[2:].partition("=")[0]
    return SHORT.get(arg[1:2], arg[1:2])
