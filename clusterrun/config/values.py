"""Turn the text of a setting into its value, for all sources of settings."""

from __future__ import annotations

import contextlib
import os.path
import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final

from clusterrun.config.environments import in_place
from clusterrun.config.fields import Field, Kind, check_value
from clusterrun.config.hosts import split_hosts
from clusterrun.config.secrets import is_secret, is_secret_value, named_secrets
from clusterrun.errors import UsageError
from clusterrun.shared.durations import (
    clock,
    format_seconds,
    parse_seconds,
    parse_slurm_minutes,
    parse_span,
)
from clusterrun.shared.sizes import format_bytes, parse_bytes, parse_count
from clusterrun.shared.wording import nearest

Raw = str | tuple[str, ...] | Mapping[str, str]

_INTEGER: Final = r"-?[0-9]{1,15}\Z"
_LARGEST: Final = 10**15
_FLAGS: Final = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_DEVICES: Final = ("tpu", "xla", "npu", "xpu", "hpu")  # nearest to "cpu"
_SCHEDULERS: Final = ("lsf", "bsub", "pbs", "torque", "qsub", "flux", "sge")
_OF_SCHEDULERS: Final = "pass --cluster allocation inside an allocation of that scheduler"
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
    if "\x00" in "".join(_texts(raw)):
        raise UsageError(f"{label} contains a NUL byte", hint="remove it")
    value = _READERS[field.kind](field, raw, label)
    check_value(field, value, label=label)  # the rules of JobSpec, while the origin is known
    _refuse_secrets(field, value, label)
    return value


def written(field: Field, value: Any) -> Raw:
    """Return the text that `interpret` reads as this value.

    >>> from clusterrun.config.keys import BY_KEY
    >>> written(BY_KEY["slurm.time"], 90), written(BY_KEY["launch.timeout"], 1800)
    ('01:30:00', '30m')
    """
    if field.kind is Kind.MAPPING:
        return dict(value)
    return tuple(value) if field.kind is Kind.TEXTS else _scalar_text(field, value)


def _scalar_text(field: Field, value: Any) -> str:
    if field.kind is Kind.MINUTES:
        return clock(60 * value)
    if field.kind in (Kind.SECONDS, Kind.DURATION):
        return format_seconds(value)
    if field.kind is Kind.BYTES:
        return format_bytes(value)
    if field.kind is Kind.FLAG:
        return "true" if value else "false"
    if field.kind is Kind.REAL:
        if value == int(value):
            return str(int(value))
        mantissa, mark, exponent = repr(value).partition("e")  # YAML's numbers have a point
        return f"{mantissa if '.' in mantissa else mantissa + '.0'}{mark}{exponent}"
    return str(value.value) if isinstance(value, Enum) else str(value)


def anchored(field: Field, value: Any, *, directory: str | None, home: str | None) -> Any:
    """Make a path absolute: relative to the directory of its file, and `~` to the home."""

    def absolute(path: str) -> str:
        if home and (path == "~" or path.startswith("~/")):
            return home.rstrip("/") + path[1:]
        return path if directory is None else os.path.normpath(os.path.join(directory, path))

    if field.name == "setup":
        return tuple(in_place(line, absolute) for line in value)
    is_program = field.name == "python" and isinstance(value, str) and "/" in value
    if is_program and value.startswith("~/"):
        return value  # the home of whichever machine runs it
    return absolute(value) if field.kind is Kind.PATH or is_program else value


def _texts(raw: Raw) -> tuple[str, ...]:
    if isinstance(raw, str):
        return (raw,)
    return (*raw, *raw.values()) if isinstance(raw, Mapping) else raw


def _scalar(read: Callable[[Field, str, str], Any]) -> Callable[[Field, Raw, str], Any]:
    def reader(field: Field, raw: Raw, label: str) -> Any:
        if isinstance(raw, str):
            return read(field, raw, label)
        raise UsageError(f"{label} must be a single value", hint="write one value, not several")

    return reader


def _integer(field: Field, text: str, label: str) -> int:
    if re.match(_INTEGER, text.strip()):
        return int(text)
    value = parse_count(text)
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
    assert field.choices is not None  # every ENUM declares them
    names = [str(member.value) for member in field.choices]
    name = text.strip().lower()
    with contextlib.suppress(ValueError):
        return field.choices(name)
    near = _SYNONYMS.get(name)
    near = near if near in names else nearest(name, names) if name not in _DEVICES else None
    hint = f"use '{near}'" if near else f"use one of: {', '.join(names)}"
    if field.name == "cluster" and not near:
        hint += f"; to choose a Slurm cluster, pass --set slurm.clusters={name}"
        hint = _OF_SCHEDULERS if name in _SCHEDULERS else hint
    raise UsageError(f"unknown {field.name.replace('_', ' ')} '{text}'", hint=hint)


def _list(field: Field, raw: Raw, label: str) -> tuple[str, ...]:
    if field.name == "hosts" and not isinstance(raw, Mapping):
        return tuple(host for text in _texts(raw) for host in split_hosts(text))
    if isinstance(raw, str | Mapping):
        hint = f"write {field.key.rpartition('.')[2]}: [first, second]"
        hint += ", or an environment as setup: {conda: NAME}" if field.name == "setup" else ""
        raise UsageError(f"{label} must be a list", hint=hint)
    return raw


def _mapping(_field: Field, raw: Raw, label: str) -> dict[str, str]:
    if isinstance(raw, Mapping):
        return dict(raw)
    pairs = [text.partition("=") for text in ((raw,) if isinstance(raw, str) else raw)]
    for name, equals, _ in pairs:
        if not equals:
            hint = f"write {name}=VALUE, or --pass-env {name} to pass your shell's value"
            raise UsageError(f"{label}: '{name}' has no value", hint=hint)
    return {name: value for name, _, value in pairs}


def _refuse_secrets(field: Field, value: Any, label: str) -> None:
    """Refuse secrets, since others can read the files of a run; arguments are only warned of."""
    names: list[str] = []
    if field.kind is Kind.MAPPING:
        names = [n for n, text in value.items() if is_secret(n, text)]
    elif field.name == "setup":
        names = [name for line in value for name, _ in named_secrets(line) if name]
    if names:
        raise UsageError(
            f"{label}: {names[0]} looks like a secret and would be written to the run directory",
            hint=f"set it in your shell and write pass_env: [{names[0]}]; it is passed by name",
        )
    texts = value if field.kind is Kind.TEXTS and field.name != "args" else ()
    if is_secret_value(value if field.kind is Kind.TEXT else "\n".join(texts)):
        raise UsageError(
            f"{label} contains what looks like a secret and would be written to the run directory",
            hint="export it in your shell and list the variable in pass_env",
        )


_READERS: Final[Mapping[Kind, Callable[[Field, Raw, str], Any]]] = {
    **dict.fromkeys((Kind.TEXT, Kind.PATH), _scalar(lambda _field, text, _label: text)),
    **dict.fromkeys((Kind.COUNT, Kind.NUMBER), _scalar(_integer)),
    Kind.REAL: _scalar(_real),
    Kind.FLAG: _scalar(_flag),
    Kind.ENUM: _scalar(_enum),
    Kind.TEXTS: _list,
    Kind.MAPPING: _mapping,
    Kind.MINUTES: _scalar(lambda _field, text, _label: parse_slurm_minutes(text)),
    Kind.SECONDS: _scalar(lambda _field, text, _label: parse_seconds(text)),
    Kind.DURATION: _scalar(lambda _field, text, _label: parse_seconds(text)),
    Kind.BYTES: _scalar(lambda _field, text, _label: parse_bytes(text)),
}
