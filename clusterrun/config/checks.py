"""Refuse values that Slurm or the file system would refuse later."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Final

from clusterrun.errors import UsageError
from clusterrun.shared.host_specs import parse_host
from clusterrun.shared.hostlist import parse_hostlist

SLURM_MOST: Final = 65_533  # nodes of a job, CPUs of a task
MOST: Final[Mapping[str, int]] = {
    **dict.fromkeys(("nodes", "spare_nodes", "cpus_per_task", "cpus_per_gpu"), SLURM_MOST),
    **dict.fromkeys(("gpus_per_node", "nproc_per_node"), 1024),
    **dict.fromkeys(("data_parallel_replicate", "data_parallel_shard"), SLURM_MOST * 1024),  # ranks
    **dict.fromkeys(
        ("context_parallel", "sequence_parallel", "tensor_parallel"), SLURM_MOST * 1024
    ),
    "main_process_port": 65_535,
}
RESERVED_NAMES: Final = ("", ".", "..", "by-job")

_MEMORY: Final = r"(?i)[0-9]+(?:[KMGT]B?)?\Z"
_PORT_RANGE: Final = r"([0-9]{1,5})-([0-9]{1,5})"
_WAIT_FOR: Final = (
    *("after", "afterany", "afterburstbuffer", "aftercorr", "afternotok", "afterok"),
    *("expand", "singleton"),
)
_JOB: Final = r"[0-9]+(?:_(?:[0-9]+|\*))?(?:\+[0-9]+)?"
_DEPENDENCY: Final = rf"(?i)(?:([a-z]+)(?::{_JOB})+|singleton|{_JOB})\Z"


def check_text(name: str, label: str, value: str) -> None:
    """Refuse a text that is invalid for the field; `label` names the setting. Raises UsageError."""
    check = _CHECKS.get(name)
    if check is not None:
        check(label, value)


def port_range(text: str, label: str = "port_range") -> tuple[int, int]:
    """Return both ends of a range of ports. Raises UsageError for another text.

    >>> port_range("20000-29999")
    (20000, 29999)
    """
    match = re.fullmatch(_PORT_RANGE, text)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1024 <= low < high <= 65535:  # the agents need one port, the rendezvous another
        raise UsageError(
            f"{label} {text} is not a range of ports",
            hint="write two ports between 1024 and 65535, e.g. 20000-29999",
        )
    return low, high


def list_of(name: str, text: str) -> list[str]:
    """Return the list that one text stands for: arguments are split into words.

    >>> list_of("args", "--lr 1"), list_of("setup", "module load cuda")
    (['--lr', '1'], ['module load cuda'])
    """
    try:
        return shlex.split(text) if name == "args" else [text]
    except ValueError:
        return [text]


def _memory(label: str, value: str) -> None:
    if not re.match(_MEMORY, value.strip()):
        raise UsageError(
            f"{label} must be an amount of memory, not '{value}'",
            hint="write a whole number with K, M, G or T, e.g. 200G",
        )


def _hosts(label: str, value: str) -> None:
    if "/" in value:  # sbatch reads the names from a file
        return
    if re.search(r"\s", value):
        raise UsageError(
            f"{label} must not contain spaces: '{value}'", hint="separate nodes with commas"
        )
    try:
        parse_hostlist(value)
    except UsageError as error:
        raise UsageError(f"{label}: {error.message}", hint=error.hints) from error


def _dependency(label: str, value: str) -> None:
    for part in re.split("[,?]", value):
        found = re.match(_DEPENDENCY, part.strip())
        if found is None or (found[1] and found[1].lower() not in _WAIT_FOR):
            raise UsageError(f"{label}: '{part}' is not a dependency", hint=_how_to_wait(part))


def _how_to_wait(part: str) -> str:
    kind, colon, jobs = part.partition(":")
    near = difflib.get_close_matches(kind.lower(), _WAIT_FOR, n=1)
    if near and colon:
        return f"write {near[0]}:{jobs or 'JOBID'}"
    return "write afterok:JOBID, or singleton"


def _run_name(label: str, value: str) -> None:
    if "/" in value or value in RESERVED_NAMES:
        raise UsageError(
            f"{label} {value!r} cannot be the name of a run directory",
            hint="leave out slashes; '.', '..' and 'by-job' are reserved",
        )
    if len(value.encode(errors="surrogateescape")) > 200:
        raise UsageError(
            f"{label} is longer than 200 bytes",
            hint="shorten it: it becomes the name of a directory",
        )


def _host(label: str, value: str) -> None:
    try:
        parse_host(value)
    except UsageError as error:
        raise UsageError(f"{label}: {error.message}", hint=error.hints) from error


def _ports(label: str, value: str) -> None:
    port_range(value, label)


def _command(label: str, value: str) -> None:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise UsageError(f"{label} {value!r}: {error}", hint="close each quote") from error
    if not words:
        raise UsageError(f"{label} is empty", hint="leave it out")


def _module(label: str, value: str) -> None:
    if not all(part.isidentifier() for part in value.split(".")):
        raise UsageError(
            f"{label}: '{value}' is not the name of a module",
            hint="name one installed module, such as transformers; repeat the option for others",
        )


def _node_directory(label: str, value: str) -> None:
    if not value.startswith("/") or "$" in value:
        raise UsageError(
            f"{label}: '{value}' is not an absolute path",
            hint="name a directory on the disk of each node, without variables: /local/scratch",
        )


_CHECKS: Final[Mapping[str, Callable[[str, str], None]]] = {
    **dict.fromkeys(("mem", "mem_per_gpu", "mem_per_cpu"), _memory),
    **dict.fromkeys(("nodelist", "exclude"), _hosts),
    "dependency": _dependency,
    "hosts": _host,
    "name": _run_name,
    "port_range": _ports,
    "health_command": _command,
    "preload": _module,
    "stage_dir": _node_directory,
}
