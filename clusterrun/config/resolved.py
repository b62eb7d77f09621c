"""The resolved configuration: the JobSpec, and the origin of each value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from clusterrun.config.fields import Field, Kind
from clusterrun.config.settings import Origin
from clusterrun.config.spec import FIELDS, JobSpec
from clusterrun.config.values import written

_PLAIN: Final = re.compile(r"[A-Za-z/][A-Za-z0-9_/.-]*\Z")
# Words that some YAML readers do not read as text.
_YAML_WORDS: Final = frozenset(
    {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}
)
_BARE: Final = (Kind.COUNT, Kind.NUMBER, Kind.REAL, Kind.FLAG)
_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


Plain = str | float | bool | list[str] | None  # a value for JSON


@dataclass(frozen=True, kw_only=True)
class Row:
    """One value for people: its key, its text on one line, its origin.

    `value` is the one for JSON; it and `text` are None if the value is not set.
    """

    key: str
    value: Plain
    text: str | None
    origin: str


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A JobSpec with the origins of its values.

    `origins` contains every key of FIELDS, and `env.NAME` for each name of a mapping. `project_dir`
    is the directory of the project's clusterrun.yaml, or else `cwd`. `files`: those that were
    read, highest first. `notes` are warnings for the user.
    """

    spec: JobSpec
    origins: Mapping[str, Origin]
    project_dir: Path
    cwd: Path
    profile: str | None = None
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def rows(self) -> Iterator[Row]:
        """Return every value in the order of FIELDS, each name of a mapping separately."""
        for field in FIELDS:
            value = getattr(self.spec, field.name)
            if field.kind is Kind.MAPPING:
                for name, text in sorted(value.items()):
                    yield self._row(f"{field.key}.{name}", text)
            else:
                yield self._row(field.key, _plain_value(field, value))

    def _row(self, key: str, value: Any) -> Row:
        text = None if value is None else _one_line(value)
        return Row(key=key, value=value, text=text, origin=str(self.origins[key]))

    def to_yaml(self) -> str:
        """Return resolved.yaml: a configuration file of the same values, with their origins.

        Equal specs and origins give equal bytes; unprintable characters are escaped.
        """
        lines = ["# The resolved configuration, with the origin of each value."]
        lines += [f"# Relative paths are relative to {_comment(str(self.cwd))}"]
        lines += [f"# profile {_comment(self.profile)}"] if self.profile else []
        for section, fields in _by_section().items():
            body = [line for field in fields for line in self._lines(field, bool(section))]
            lines += [f"{section}:", *body] if section and body else body
        return "\n".join(lines) + "\n"

    def _lines(self, field: Field, nested: bool) -> Iterator[str]:
        value = getattr(self.spec, field.name)
        if value is None:
            return
        indent = "  " if nested else ""
        key = field.key.rpartition(".")[2]
        origin = _comment(str(self.origins[field.key]))
        if field.kind is Kind.MAPPING and value:
            yield f"{indent}{key}:"
            for name, text in sorted(value.items()):
                origin = _comment(str(self.origins[f"{field.key}.{name}"]))
                yield f"{indent}  {yaml_text(name)}: {yaml_text(text)}  # {origin}"
        elif field.kind is Kind.TEXTS and value:
            yield f"{indent}{key}:  # {origin}"
            yield from (f"{indent}  - {yaml_text(text)}" for text in value)
        else:
            yield f"{indent}{key}: {_flow_text(field, value)}  # {origin}"


def _by_section() -> Mapping[str, Sequence[Field]]:
    sections: dict[str, list[Field]] = {"": []}
    for field in FIELDS:
        sections.setdefault(field.key.rpartition(".")[0], []).append(field)
    return sections


def _plain_value(field: Field, value: Any) -> Plain:
    """Return a value for JSON: times as text, lists and numbers unchanged."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or field.kind in _BARE:
        return cast(Plain, value)
    raw = written(field, value)
    return raw if isinstance(raw, str) else list(raw)


def _one_line(value: str | float | bool | list[str]) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(yaml_text(text) for text in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _comment(str(value)) or '""'


def _flow_text(field: Field, value: Any) -> str:
    """Return a value as YAML on one line."""
    raw = written(field, value)
    if isinstance(raw, Mapping):
        return "{" + ", ".join(f"{k}: {yaml_text(v)}" for k, v in sorted(raw.items())) + "}"
    if isinstance(raw, tuple):
        return "[" + ", ".join(yaml_text(text) for text in raw) + "]"
    return raw if field.kind in _BARE else yaml_text(raw)


def yaml_text(text: str) -> str:
    r"""Return a text as a YAML scalar that every reader reads as text.

    >>> yaml_text("train.py"), yaml_text("no"), yaml_text("a: b\n")
    ('train.py', '"no"', '"a: b\\n"')
    """
    if _PLAIN.match(text) and text.lower() not in _YAML_WORDS:
        return text
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _comment(text: str) -> str:
    return "".join(c if c.isprintable() else _escaped(c) for c in text)
