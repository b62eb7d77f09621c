"""Declare a setting once: its YAML key, its options, its kind, and its valid values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from clusterrun.config.checks import MOST, SLURM_MOST, check_text, list_of
from clusterrun.config.environments import read_step
from clusterrun.errors import UsageError


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
