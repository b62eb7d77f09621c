"""A setting: its kind, its row in the table, its valid values, and its text in every source.

Values that Slurm or the file system would refuse later are refused here.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

from clusterrun.config.environments import CONTROL, read_step
from clusterrun.config.hosts import parse_host, split_hosts
from clusterrun.config.secrets import is_secret, is_secret_value, named_secrets
from clusterrun.errors import UsageError
from clusterrun.shared.amounts import (
    clock,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_seconds,
    parse_slurm_minutes,
    parse_span,
)
from clusterrun.shared.wording import nearest


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
    """A row of the table of settings; `is_common`: the short help shows its options."""

    name: str
    key: str
    kind: Kind
    flags: tuple[str, ...]
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


_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*\Z"
_LEFT_OUT = "leave it out to use the default"
_NAME = "use letters, digits and underscores, and do not begin with a digit"


def check_type(field: Field, value: Any) -> None:
    """Refuse a value of another type, which only Python code can pass."""
    if value is None and field.default is None:
        return
    types, what = _FORMATS[field.kind][:2]
    is_wrong_bool = isinstance(value, bool) and bool not in types  # True is also an int
    if is_wrong_bool or not isinstance(value, types):
        found = "None" if value is None else type(value).__name__
        raise UsageError(f"{field.name} must be {what}, not {found}")
    items: Any = value if field.kind is Kind.TEXTS else ()
    items = (*value, *value.values()) if isinstance(value, Mapping) else items
    if not all(isinstance(item, str) for item in items):
        raise UsageError(f"{field.name} must be {what}")  # not which item: it may be a secret


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
    elif field.kind is Kind.TEXTS:
        _refuse_nul(label, value)
        for text in value:
            _check_item(field.name, label, text)
    elif field.kind is Kind.MAPPING:
        _refuse_nul(label, value.values())
        for name in value:
            _check_variable_name(label, name)


def _check_item(name: str, label: str, text: str) -> None:
    """Check one text of a list; `name` is the field's. Raises UsageError."""
    _check_text(name, label, text)
    if name == "setup":
        read_step(text)  # raises UsageError for an environment without a name
    if name in ("sbatch_args", "srun_args"):
        _refuse_control(label, text)
    if name == "pass_env":
        _check_variable_name(label, text)


def _check_variable_name(label: str, name: str) -> None:
    if not re.match(_VARIABLE, name):
        raise UsageError(f"{label}: {name!r} is not a variable name", hint=_NAME)


def _refuse_nul(label: str, texts: Iterable[str]) -> None:
    if "\x00" in "".join(texts):
        raise UsageError(f"{label} contains a NUL byte", hint="remove it")


def _check_number(field: Field, label: str, value: Any) -> None:
    """Refuse a number outside its bounds; kinds of text have no `least`. Raises UsageError."""
    least, most = _FORMATS[field.kind].least, MOST.get(field.name, math.inf)
    if field.kind is Kind.REAL and not 0 < value < math.inf:
        raise UsageError(f"{label} must be a number above 0, not {value}", hint=_LEFT_OUT)
    if least is not None and not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        raise UsageError(f"{label} must be {bound}, not {value}", hint=_LEFT_OUT)


def _refuse_control(label: str, value: str) -> None:
    if re.search(CONTROL, value):
        text = f"{label} contains a newline or control character: {value!r}"
        raise UsageError(text, hint="remove it: a Slurm directive is one line")


# The rules of single settings

SLURM_MOST: Final = 65_533  # nodes of a job, CPUs of a task
MOST: Final[Mapping[str, int]] = {
    **dict.fromkeys(("nodes", "spare_nodes", "cpus_per_task", "cpus_per_gpu"), SLURM_MOST),
    **dict.fromkeys(("gpus_per_node", "nproc_per_node"), 1024),
    **{"main_process_port": 65_535, "epochs": 10**6, "mfu": 1},
}

RESERVED_NAMES: Final = ("", ".", "..", "by-job")  # of runs
# A setting's pattern, the message for any other value, and a hint.
_PATTERNS: Final[Mapping[str, tuple[str, str, str]]] = {
    **dict.fromkeys(
        ("mem", "mem_per_gpu", "mem_per_cpu"),
        (
            r"(?i)[0-9]+[kmgt]?b?\Z",
            "must be an amount of memory, not",
            "write a whole number with its unit, e.g. 200G; without a unit, Slurm reads megabytes",
        ),
    ),
    "clusters": (r"[^,]+\Z", "must name one cluster, not", "name one cluster: a job runs on one"),
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
    """Return both ends of a range of ports. Raises UsageError for another text."""
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1024 <= low < high <= 65535:  # the agents need one port, the rendezvous another
        hint = "write two ports between 1024 and 65535, e.g. 20000-29999"
        raise UsageError(f"{label} {text} is not a valid range of ports", hint=hint)
    return low, high


def _check_text(name: str, label: str, value: str) -> None:
    """Refuse a text that is invalid for the field; `label` names the setting. Raises UsageError."""
    pattern, says, hint = _PATTERNS.get(name, ("", "", ""))  # "" matches any text
    if not re.match(pattern, value):
        raise UsageError(f"{label} {says} '{value}'", hint=hint)
    if name == "port_range":
        port_range(value, label)
    if name == "hosts":
        parse_host(value)


# From the text of a setting to its value, and back

Raw = str | tuple[str, ...] | Mapping[str, str]

_INTEGER: Final = r"-?[0-9]{1,15}\Z"
_LARGEST: Final = 10**15
_FLAGS: Final = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_OTHER_DEVICES: Final = ("tpu", "xla", "npu", "xpu", "hpu")  # spelled like "cpu", but not meant so
_OTHER_SCHEDULERS: Final = ("lsf", "bsub", "pbs", "torque", "qsub", "flux", "sge")
_ALLOCATION_HINT: Final = "pass --cluster allocation inside an allocation of that scheduler"
# The names in other tools.
_SYNONYMS: Final = {
    **dict.fromkeys(("fp32", "float32", "false", "off"), "no"),
    **{"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "gpu": "cuda", "ib": "infiniband"},
    **{"multi_gpu": "ddp", "fsdp2": "fsdp", "hsdp": "fsdp-hybrid", "deepspeed": "zero2"},
}


def interpret(field: Field, raw: Raw, *, label: str) -> Any:
    """Read the value of a setting; `label` names it in messages.

    Raises UsageError for a text that is not a value of the field.
    """
    if field.kind is Kind.MAPPING:
        value: Any = _mapping(raw, label)
    elif field.kind is Kind.TEXTS:
        value = _list(field, raw, label)
    elif isinstance(raw, str):
        value = _FORMATS[field.kind].read(field, raw, label)
    else:
        raise UsageError(f"{label} must be a single value", hint="write one value, not several")
    check_value(field, value, label=label)  # as JobSpec does, which does not know the label
    _refuse_secrets(field, value, label)
    return value


def written(field: Field, value: Any) -> Raw:
    """Return the text that `interpret` reads as this value.

    >>> from clusterrun.config.spec import BY_KEY
    >>> written(BY_KEY["slurm.time"], 90), written(BY_KEY["launch.timeout"], 1800)
    ('01:30:00', '30m')
    """
    return _FORMATS[field.kind].write(value)


def _written_real(value: float) -> str:
    if value == int(value):
        return str(int(value))
    mantissa, mark, exponent = repr(value).partition("e")  # YAML's numbers have a point
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}{mark}{exponent}"


def _integer(field: Field, text: str, label: str) -> int:
    if re.match(_INTEGER, text.strip()):
        return int(text)
    value = parse_count(text)  # such as 16k or 1e6
    if value is not None and value < _LARGEST and value == int(value):
        return int(value)
    raise UsageError(f"{label} must be a whole number, not '{text}'", hint="write a number, e.g. 4")


def _real(field: Field, text: str, label: str) -> float:
    is_time = field.name.endswith("_s")
    value = parse_span(text) if is_time else parse_count(text)
    if value is None:
        hint = "write 4.5 (seconds), 4.5s or 450ms" if is_time else "write 0.4, 8.03e9 or 8.03B"
        raise UsageError(f"{label} must be a number, not '{text}'", hint=hint)
    return float(value)


def _flag(_field: Field, text: str, label: str) -> bool:
    value = _FLAGS.get(text.strip().lower())
    if value is None:
        raise UsageError(f"{label} must be true or false, not '{text}'", hint="write true or false")
    return value


def _enum(field: Field, text: str, _label: str) -> Enum:
    """Read a word; the hint corrects a misspelling, or a word of another tool."""
    assert field.choices is not None  # every ENUM declares them
    names = [str(member.value) for member in field.choices]
    name = text.strip().lower()
    with contextlib.suppress(ValueError):
        return field.choices(name)  # also a scheduler of an installed package
    near = _SYNONYMS.get(name)
    if near not in names:
        near = None if name in _OTHER_DEVICES else nearest(name, names)  # tpu is not cpu
    hint = f"use '{near}'" if near else f"use one of: {', '.join(names)}"
    if field.name == "cluster" and not near:
        of_slurm = f"{hint}; to choose a Slurm cluster, pass --set slurm.clusters={name}"
        hint = _ALLOCATION_HINT if name in _OTHER_SCHEDULERS else of_slurm
    raise UsageError(f"unknown {field.name.replace('_', ' ')} '{text}'", hint=hint)


def _list(field: Field, raw: Raw, label: str) -> tuple[str, ...]:
    """Read a list; only hosts may also be a single text. Raises UsageError."""
    if field.name == "hosts" and not isinstance(raw, Mapping):
        texts = (raw,) if isinstance(raw, str) else raw
        return tuple(host for text in texts for host in split_hosts(text))
    if isinstance(raw, str | Mapping):
        hint = f"write {field.key.rpartition('.')[2]}: [first, second]"
        hint += ", or an environment as setup: {conda: NAME}" if field.name == "setup" else ""
        raise UsageError(f"{label} must be a list", hint=hint)
    return raw


def _mapping(raw: Raw, label: str) -> dict[str, str]:
    """Read a mapping, or texts of the form NAME=VALUE. Raises UsageError for a text without =."""
    if isinstance(raw, Mapping):
        return dict(raw)
    pairs = [text.partition("=") for text in ((raw,) if isinstance(raw, str) else raw)]
    for name, equals, _ in pairs:
        if not equals:
            hint = f"write {name}=VALUE, or --pass-env {name} to pass your shell's value"
            raise UsageError(f"{label}: '{name}' has no value", hint=hint)
    return {name: value for name, _, value in pairs}


def _refuse_secrets(field: Field, value: Any, label: str) -> None:
    """Refuse secrets: others can read the files of a run. `resolve` only warns of those in args."""
    names: list[str] = []
    if field.kind is Kind.MAPPING:
        names = [n for n, text in value.items() if is_secret(n, text)]
    elif field.name == "setup":
        names = [name for line in value for name, _ in named_secrets(line) if name]
    if names:
        text = f"{label}: {names[0]} looks like a secret and would be written to the run directory"
        hint = f"export it in your shell and write pass_env: [{names[0]}]; its value is not stored"
        raise UsageError(text, hint=hint)
    text = value if field.kind is Kind.TEXT else ""
    if field.kind is Kind.TEXTS and field.name != "args":
        text = "\n".join(value)
    if is_secret_value(text):
        what = "what looks like a secret and would be written to the run directory"
        hint = "export it as a variable in your shell, and list the variable's name in pass_env"
        raise UsageError(f"{label} contains {what}", hint=hint)


def _of_text(parse: Callable[[str], int]) -> Callable[[Field, str, str], int]:
    return lambda _field, text, _label: parse(text)


class Format(NamedTuple):
    """How values of a kind are in Python, read from a text (not lists), and written."""

    types: tuple[type, ...]
    what: str  # the types, in messages
    read: Callable[[Field, str, str], Any] = lambda _field, text, _label: text
    write: Callable[[Any], Raw] = str
    least: int | None = None  # the least value, in the unit of the kind


_WHOLE: Final = ((int,), "a whole number")
_FORMATS: Final[Mapping[Kind, Format]] = {
    **dict.fromkeys((Kind.TEXT, Kind.PATH), Format((str,), "a str")),
    Kind.COUNT: Format(*_WHOLE, _integer, least=1),
    Kind.NUMBER: Format(*_WHOLE, _integer, least=0),
    Kind.REAL: Format((int, float), "a number", _real, _written_real, least=0),
    Kind.FLAG: Format((bool,), "True or False", _flag, lambda value: str(value).lower()),
    # Before resolution, the word of a member.
    Kind.ENUM: Format((str,), "a str", _enum, lambda value: str(value.value)),
    Kind.TEXTS: Format((tuple, list), "a list of str", write=tuple),
    Kind.MAPPING: Format((Mapping,), "a mapping of str to str", write=dict),
    Kind.MINUTES: Format(*_WHOLE, _of_text(parse_slurm_minutes), lambda m: clock(60 * m), 1),
    Kind.SECONDS: Format(*_WHOLE, _of_text(parse_seconds), format_seconds, 1),
    Kind.DURATION: Format(*_WHOLE, _of_text(parse_seconds), format_seconds, 0),
    Kind.BYTES: Format(*_WHOLE, _of_text(parse_bytes), format_bytes, 1),
}
