"""A setting: its kind, its row in the table, and its valid values.

Values that Slurm or the file system would refuse later are refused here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

from clusterrun.config.environments import read_step
from clusterrun.errors import UsageError
from clusterrun.shared.host_specs import parse_host
from clusterrun.shared.hostlist import parse_hostlist


class Kind(str, Enum):
    """The format of a value's text."""

    TEXT = "text"
    PATH = "path"
    COUNT = "count"  # an integer >= 1
    NUMBER = "number"  # an integer >= 0
    REAL = "real"  # a number above 0: 0.4, 8.03e9, 8.03B, 4.5s
    FLAG = "flag"
    ENUM = "enum"
    TEXTS = "texts"  # a list; a repeatable option
    MAPPING = "mapping"  # NAME: value; a repeatable NAME=VALUE option
    MINUTES = "minutes"  # Slurm's time formats, kept as whole minutes
    SECONDS = "seconds"  # 90, 90s, 30m, 2h; kept as whole seconds
    DURATION = "duration"  # the same, and 0
    BYTES = "bytes"  # 4096, 64KiB, 1GiB; kept as bytes


class Field(NamedTuple):
    """A row of the table of settings: its YAML key, options, kind and meaning.

    `former` are options that it had once; `is_common`: the short help shows its options.
    """

    name: str
    key: str
    kind: Kind
    flags: tuple[str, ...]
    former: tuple[str, ...]
    group: str
    help: str
    default: Any
    choices: type[Enum] | None
    metavar: str | None
    is_common: bool

    @property
    def env(self) -> str:
        """Return the environment variable that sets this field."""
        return "CLUSTERRUN_" + self.key.replace(".", "_").upper()


_CONTROL = r"[\x00-\x1f\x7f]"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*\Z"
_TYPES: dict[Kind, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys((Kind.TEXT, Kind.PATH), ((str,), "a str")),
    **dict.fromkeys(
        (Kind.COUNT, Kind.NUMBER, Kind.MINUTES, Kind.SECONDS, Kind.DURATION, Kind.BYTES),
        ((int,), "a whole number"),
    ),
    Kind.REAL: ((int, float), "a number"),
    Kind.FLAG: ((bool,), "True or False"),
    Kind.ENUM: ((str,), "one of its values"),  # before resolution, the word of a member
    Kind.TEXTS: ((tuple, list), "a list of str"),
    Kind.MAPPING: ((Mapping,), "a mapping of str to str"),
}


_LEFT_OUT = "leave it out to use the default"
_NAME = "use letters, digits and underscores"
# The least value of each kind of whole number, in its unit: minutes, seconds, bytes.
_LEAST = {
    **dict.fromkeys((Kind.COUNT, Kind.MINUTES, Kind.SECONDS, Kind.BYTES), 1),
    **dict.fromkeys((Kind.NUMBER, Kind.DURATION), 0),
}


def check_type(field: Field, value: Any) -> None:
    """Refuse a value of another type, which only Python code can pass."""
    if (value is None and field.default is None) or value == () == field.default:
        return
    types, what = _TYPES[field.kind]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        found = "None" if value is None else type(value).__name__
        raise UsageError(f"{field.name} must be {what}, not {found}")
    items: Any = (*value, *value.values()) if isinstance(value, Mapping) else value
    if not isinstance(items, str | int | float) and not all(isinstance(x, str) for x in items):
        raise UsageError(f"{field.name} must be {what}")  # an item may be a secret


def check_value(field: Field, value: Any, *, label: str) -> None:
    """Refuse values such as a count of 0, a control character, a bad variable name.

    `label`: the setting's name in its source. Raises UsageError.
    """
    if value is None:
        return
    _check_number(field, label, value)
    if field.kind in (Kind.TEXT, Kind.PATH):
        if not value:
            raise UsageError(f"{label} is empty", hint=_LEFT_OUT)
        _refuse_control(label, value)
        _check_text(field.name, label, value)
    texts = value if field.kind is Kind.TEXTS else ()
    texts = tuple(value.values()) if field.kind is Kind.MAPPING else texts
    if "\x00" in "".join(texts):
        raise UsageError(f"{label} contains a NUL byte", hint="remove it")
    for text in texts if field.kind is Kind.TEXTS else ():
        _check_text(field.name, label, text)
        if field.name == "setup":
            read_step(text)
        if field.name in ("sbatch_args", "srun_args"):
            _refuse_control(label, text)
    for name in value if field.kind is Kind.MAPPING or field.name == "pass_env" else ():
        if not re.match(_VARIABLE, name):
            raise UsageError(f"{label}: {name!r} is not a variable name", hint=_NAME)


def _check_number(field: Field, label: str, value: Any) -> None:
    least, most = _LEAST.get(field.kind), MOST.get(field.name, math.inf)
    if field.kind is Kind.REAL and not 0 < value < math.inf:
        raise UsageError(f"{label} must be a number above 0, not {value}", hint=_LEFT_OUT)
    if least is not None and not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        valid = f"{least} or more" if value < least else f"{most} or less"
        raise UsageError(
            f"{label} must be {bound}, not {value}", hint=f"write {valid}, or leave it out"
        )


def _refuse_control(label: str, value: str) -> None:
    if re.search(_CONTROL, value):
        raise UsageError(
            f"{label} contains a newline or control character: {value!r}",
            hint="remove it: a Slurm directive is one line",
        )


# The rules of single settings

SLURM_MOST: Final = 65_533  # nodes of a job, CPUs of a task
_MOST_RANKS: Final = SLURM_MOST * 1024
MOST: Final[Mapping[str, int]] = {
    **dict.fromkeys(("nodes", "spare_nodes", "cpus_per_task", "cpus_per_gpu"), SLURM_MOST),
    **dict.fromkeys(("gpus_per_node", "nproc_per_node"), 1024),
    **dict.fromkeys(("data_parallel_replicate", "data_parallel_shard"), _MOST_RANKS),
    **dict.fromkeys(("context_parallel", "sequence_parallel", "tensor_parallel"), _MOST_RANKS),
    "main_process_port": 65_535,
}

RESERVED_NAMES: Final = ("", ".", "..", "by-job")  # of runs
_MEMORY: Final = (
    r"(?i)\s*[0-9]+(?:[KMGT]B?)?\s*\Z",
    "must be an amount of memory, not",
    "write a whole number with K, M, G or T, e.g. 200G",
)
# A setting's pattern, the message for any other value, and a hint.
_PATTERNS: Final[Mapping[str, tuple[str, str, str]]] = {
    **dict.fromkeys(("mem", "mem_per_gpu", "mem_per_cpu"), _MEMORY),
    **dict.fromkeys(
        ("nodelist", "exclude"),
        (r"\S+\Z", "must not contain spaces:", "separate nodes with commas"),
    ),
    "name": (
        r"(?!(?:\.|\.\.|by-job)\Z)[^/]+\Z",
        "cannot be the name of a run directory:",
        "leave out slashes; '.', '..' and 'by-job' are reserved",
    ),
    "stage_dir": (
        r"/[^$]*\Z",
        "must be an absolute path, not",
        "name a directory on the disk of each node, without variables: /local/scratch",
    ),
}


def port_range(text: str, label: str = "port_range") -> tuple[int, int]:
    """Return both ends of a range of ports. Raises UsageError for another text.

    >>> port_range("20000-29999")
    (20000, 29999)
    """
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1024 <= low < high <= 65535:  # the agents need one port, the rendezvous another
        raise UsageError(
            f"{label} {text} is not a range of ports",
            hint="write two ports between 1024 and 65535, e.g. 20000-29999",
        )
    return low, high


def _check_text(name: str, label: str, value: str) -> None:
    """Refuse a text that is invalid for the field; `label` names the setting. Raises UsageError."""
    pattern, says, hint = _PATTERNS.get(name, ("", "", ""))
    if not re.match(pattern, value):
        raise UsageError(f"{label} {says} '{value}'", hint=hint)
    if name == "port_range":
        port_range(value, label)
    try:
        if name in ("nodelist", "exclude") and "/" not in value:  # else sbatch reads the file
            parse_hostlist(value)
        elif name == "hosts":
            parse_host(value)
    except UsageError as error:
        raise UsageError(f"{label}: {error.message}", hint=error.hints) from error
