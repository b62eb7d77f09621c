"""The environment that a job was given; a submission inside the job starts from it.

An agent notes the names in CLUSTERRUN_GIVEN, and each value that env.sh has changed in
CLUSTERRUN_WAS_<name>, except secrets: env.sh passes what was before it through a pipe. A rank
notes checksums of the values with which its script starts: they show what the script changes, and
copy no secret.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping, MutableMapping

from clusterrun.shared.files import parse_object

GIVEN = "CLUSTERRUN_GIVEN"
WAS = "CLUSTERRUN_WAS_"
STARTED = "CLUSTERRUN_STARTED"
OWN_RANK = "CLUSTERRUN_RANK"  # unchanged if a script sets RANK, also for processes that it starts
# Of the agent's task, which has the CPUs of all ranks of its node: a number, or `cpu=` and one.
_CPUS = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK")
_CPU_COUNT = r"(^|\bcpu=)(\d+)"
_OF_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
STORE_PORT = "CLUSTERRUN_STORE_PORT"  # the launcher's, unchanged if a script sets MASTER_PORT
PIPE = "CLUSTERRUN_GIVEN_FD"  # which env.sh has opened
STAGED_AT = "CLUSTERRUN_STAGED_AT"  # epoch seconds, in the environment of agents
_NOT_NOTED = r"(_|PWD|OLDPWD|SHLVL)\Z|.*(KEY|TOKEN|SECRET|PASS)"


def before_setup(pipe: int) -> dict[str, str]:
    """Read the environment from before the setup lines."""
    with open(pipe, "rb") as file:
        pairs = [entry.partition(b"=") for entry in file.read().split(b"\0") if entry]
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def note_given(environ: MutableMapping[str, str], before: Mapping[str, str]) -> None:
    """Note in `environ`, which env.sh has changed, what it was `before`; keep an earlier note."""
    if environ.pop(PIPE, "") and GIVEN not in before:  # `before` was read from this pipe
        names = [name for name in before if _is_variable(name)]
        noted = {name: before[name] for name in names if not re.match(_NOT_NOTED, name)}
        environ[GIVEN] = " ".join(names)
        environ.update(noting_changes({**noted, GIVEN: environ[GIVEN]}, environ))


def task_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return what `srun --ntasks-per-node=RANKS` sets for the task that is this rank."""
    numbers = [int(env[name]) for name in _OF_RANK if env.get(name, "").isdigit()]
    if len(numbers) < len(_OF_RANK):
        return {}  # this process is not a rank
    rank, local, size, local_size = numbers
    per_node = f"{local_size}(x{size // local_size})" if size > local_size else str(local_size)
    first = rank - local  # the first rank of the node

    def cpus_of_rank(match: re.Match[str]) -> str:  # a share of those of the agent's task
        return f"{match[1]}{max(1, int(match[2]) // local_size)}"

    return {
        **{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local)},
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), str(size)),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), per_node),
        "SLURM_NTASKS_PER_NODE": str(local_size),
        "SLURM_GTIDS": ",".join(map(str, range(first, first + local_size))),
        "SLURM_DISTRIBUTION": "block" if local_size > 1 else "cyclic",
        **{name: re.sub(_CPU_COUNT, cpus_of_rank, env[name]) for name in _CPUS if name in env},
    }


def noting_changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return `after` with notes on the values of `before` that it changes."""
    known = {name: before[name] for name in before.get(GIVEN, "").split() if name in before}
    changed = {name: old for name, old in known.items() if after.get(name) != old}
    return {**after, **{WAS + name: old for name, old in changed.items()}, **_earlier_notes(before)}


def _earlier_notes(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(WAS)}


def note_start(environ: MutableMapping[str, str]) -> None:
    """Note the environment with which a rank's script starts."""
    started = {name: _checksum(value) for name, value in environ.items() if name != STARTED}
    environ[STARTED] = json.dumps(started)


def as_given(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that this job was given, with those that its script has set since."""
    if GIVEN not in environ:  # this process is not in a job
        return dict(environ)
    names = set(environ[GIVEN].split())  # it lists no exported functions: they are always kept
    given = {name: environ[name] for name in environ if name in names or not _is_variable(name)}
    given |= {name.removeprefix(WAS): old for name, old in _earlier_notes(environ).items()}
    checksums = parse_object(environ.get(STARTED, ""))
    if checksums is not None:  # a script runs, and may have set more
        for name, value in environ.items():
            if name != STARTED and checksums.get(name) != _checksum(value):
                given[name] = value
    return given


def _is_variable(name: str) -> bool:
    """Return whether bash allows a variable of this name, unlike that of an exported function."""
    return name.isascii() and name.isidentifier()


def _checksum(value: str) -> int:
    return zlib.crc32(value.encode(errors="surrogateescape"))
