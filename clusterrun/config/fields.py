"""A setting: its kind, its row in the table, and its valid values.

Values that Slurm or the file system would refuse later are refused here.
"""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Callable, Mapping
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
    is_other = not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
    if is_other:
        is_one_text = field.kind is Kind.TEXTS and isinstance(value, str)
        hint = f"write {list_of(field.name, value)}" if is_one_text else ()
        raise UsageError(f"{field.name} must be {what}, not {_type(value)}", hint=hint)
    if field.kind is Kind.TEXTS:
        for text in value:
            if not isinstance(text, str):
                raise UsageError(
                    f"{field.name} must contain str only, not {text!r}",
                    hint=f"write it as '{text}'",
                )
    if field.kind is Kind.MAPPING:
        _check_variable_types(field, value)


def _check_variable_types(field: Field, variables: Mapping[Any, Any]) -> None:
    for name, text in variables.items():
        if not isinstance(name, str):
            raise UsageError(f"{field.name}: {name!r} is not a variable name", hint=_NAME)
        if not isinstance(text, str):  # may be a secret, so the message does not repeat it
            raise UsageError(
                f"{field.name}: the value of {name} must be a str, not {_type(text)}",
                hint="pass it as a str",
            )


def _type(value: object) -> str:
    return "None" if value is None else type(value).__name__


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
        check_text(field.name, label, value)
    if field.kind is Kind.TEXTS:
        _check_texts(field, label, value)
    if field.kind is Kind.MAPPING:
        for name, text in value.items():
            if not re.match(_VARIABLE, name):
                raise UsageError(f"{label}: {name!r} is not a variable name", hint=_NAME)
            if "\x00" in text:
                raise UsageError(
                    f"{label}: the value of {name} contains a NUL byte", hint="remove it"
                )


def _check_number(field: Field, label: str, value: Any) -> None:
    least, most = _LEAST.get(field.kind), MOST.get(field.name, math.inf)
    if field.kind is Kind.REAL and not 0 < value < math.inf:
        raise UsageError(f"{label} must be a number above 0, not {value}", hint=_LEFT_OUT)
    if least is not None and not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        valid = f"{least} or more" if value < least else f"{most} or less"
        valid += " (Slurm's maximum)" if value > most == SLURM_MOST else ""
        raise UsageError(
            f"{label} must be {bound}, not {value}", hint=f"write {valid}, or leave it out"
        )


def _check_texts(field: Field, label: str, values: tuple[str, ...]) -> None:
    for text in values:
        if "\x00" in text:
            raise UsageError(f"{label} contains a NUL byte: {text!r}", hint="remove it")
    for text in values:
        check_text(field.name, label, text)
        if field.name == "setup":
            read_step(text)
        if field.name in ("sbatch_args", "srun_args"):
            _refuse_control(label, text)
        if field.name == "pass_env" and not re.match(_VARIABLE, text):
            raise UsageError(
                f"{label}: {text!r} is not a variable name",
                hint="list names of variables of your shell, without values",
            )


def _refuse_control(label: str, value: str) -> None:
    if re.search(_CONTROL, value):
        raise UsageError(
            f"{label} contains a newline or control character: {value!r}",
            hint="remove it: a Slurm directive is one line",
        )


# The rules of single settings

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
            hint="list installed modules, such as [transformers, datasets]",
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
