"""A value, its origin and its file; and the resolved configuration with all origins."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from clusterrun.config.environments import with_absolute_path
from clusterrun.config.fields import Field, Kind, Raw, interpret, written
from clusterrun.config.spec import BY_NAME, FIELDS, JobSpec
from clusterrun.errors import ConfigError, UsageError
from clusterrun.shared.wording import count

_TYPED_GPUS: Final = r"([A-Za-z][A-Za-z0-9_.-]*):([0-9]+)\Z"


class Origin(NamedTuple):
    """The source of a value."""

    text: str  # for people
    where: str | None = None  # file:line:column, for errors
    is_of_user: bool = False  # the user typed, exported or configured it; no project's file did

    def __str__(self) -> str:
        return self.text


BUILT_IN: Final = Origin(text="built-in")


class Anchor(NamedTuple):
    """The directories that paths of one source are relative to."""

    directory: str | None = None  # None: the working directory
    home: str | None = None

    def absolute(self, path: str) -> str:
        """Join a path to the directory, if there is one, or to the home if it begins with `~`."""
        if self.home and (path == "~" or path.startswith("~/")):
            return self.home.rstrip("/") + path[1:]
        if self.directory is None:
            return path
        return os.path.normpath(os.path.join(self.directory, path))

    def with_absolute_paths(self, field: Field, value: Any) -> Any:
        """Make the paths in a value absolute."""
        if field.name == "setup":
            return tuple(with_absolute_path(line, self.absolute) for line in value)
        if field.name == "python" and "/" in value and not value.startswith("~/"):
            return self.absolute(value)  # a bare name is on PATH, and `~` is the node's home
        return self.absolute(value) if field.kind is Kind.PATH else value


class ConfigFile(NamedTuple):
    """A configuration file that was found."""

    shown: str  # its name in messages
    text: str
    anchor: Anchor
    strict: bool  # refuse unknown keys
    is_of_user: bool = False  # the user's own configuration


class Setting(NamedTuple):
    """One value of one field."""

    field: Field
    value: Any
    origin: Origin
    item: str | None = None  # of a mapping: a name in it
    adds: bool = False  # the value extends a list
    note: str = ""  # how an ambiguous text is read

    @property
    def key(self) -> str:
        """Return its name in origins and `config show`: `slurm.nodes`, `env.LOG_LEVEL`."""
        return self.field.key if self.item is None else f"{self.field.key}.{self.item}"


def settings_of(
    field: Field, raw: Raw, origin: Origin, anchor: Anchor, *, label: str, adds: bool = False
) -> Iterator[Setting]:
    """Read one value; Slurm's `a100:4` and a mapping yield several settings.

    Messages name it `label`; `adds`: it extends a list. Raises UsageError (ConfigError for a file).
    """
    if field.name == "gpus_per_node" and isinstance(raw, str):
        typed = re.match(_TYPED_GPUS, raw)
        if typed is not None:
            yield from settings_of(BY_NAME["gpu_type"], typed[1], origin, anchor, label=label)
            raw = typed[2]
    value = anchor.with_absolute_paths(field, interpret_at(origin, field, raw, label=label))
    if field.kind is not Kind.MAPPING:
        note = _unit_note(field, raw, value, label) if isinstance(raw, str) else ""
        yield Setting(field=field, value=value, origin=origin, adds=adds, note=note)
        return
    for name, text in value.items():
        yield Setting(field=field, value=text, origin=origin, item=name)


def _unit_note(field: Field, raw: str, value: Any, label: str) -> str:
    """Say in which unit a text is read if another one is likely meant; "" if not."""
    if field.kind is Kind.MINUTES and re.fullmatch(r"\d+:\d\d", raw):
        return f"{label} {raw} is minutes:seconds, {count(value, 'minute')}; for hours: {raw}:00"
    if field.name in ("mem", "mem_per_gpu", "mem_per_cpu") and re.fullmatch(r"0*[1-9]\d{0,2}", raw):
        return f"{label} {raw} is {raw} megabytes; for gigabytes: {raw}G"
    return ""


def interpret_at(origin: Origin, field: Field, raw: Raw, *, label: str) -> Any:
    """Read a value; an error names the origin."""
    try:
        return interpret(field, raw, label=label)
    except UsageError as error:
        raise located(error, origin.where) from error


def located(error: UsageError, where: str | None) -> UsageError:
    """Return the error with its position, unless it is on the command line."""
    if where is None:
        return error
    return ConfigError(error.message, hint=error.hints, cause=error.cause, where=where)


# The resolved configuration

_PLAIN: Final = r"[A-Za-z/][A-Za-z0-9_/.-]*\Z"
# Words that some YAML readers do not read as text.
_YAML_WORDS: Final = frozenset(
    {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}
)
_NUMBERS_AND_FLAGS: Final = (Kind.COUNT, Kind.NUMBER, Kind.REAL, Kind.FLAG)

Plain = str | float | bool | tuple[str, ...] | None  # a value for JSON


class Row(NamedTuple):
    """One value for people."""

    key: str
    value: Plain  # for JSON; None: not set
    text: str | None  # on one line; None: not set
    origin: str


class Resolved(NamedTuple):
    """A JobSpec with the origins of its values."""

    spec: JobSpec
    origins: Mapping[str, Origin]  # of every key of FIELDS, and of `env.NAME` in mappings
    project_dir: Path  # that of the project's clusterrun.yaml, or else `cwd`
    cwd: Path
    profile: str | None = None
    files: tuple[str, ...] = ()  # those that were read, the highest first
    notes: tuple[str, ...] = ()  # warnings for the user

    def rows(self) -> Iterator[Row]:
        """Yield every value in the order of FIELDS, each name of a mapping separately."""
        for field in FIELDS:
            value = getattr(self.spec, field.name)
            raw = None if value is None else written(field, value)
            if isinstance(raw, Mapping):
                for name, text in sorted(raw.items()):
                    yield self._row(f"{field.key}.{name}", text, text)
            else:
                is_whole = isinstance(value, float) and value.is_integer()
                plain = int(value) if is_whole else value  # 8.0 is written as 8
                yield self._row(field.key, plain if field.kind in _NUMBERS_AND_FLAGS else raw, raw)

    def _row(self, key: str, value: Plain, raw: str | tuple[str, ...] | None) -> Row:
        text = _flow_text(raw) if isinstance(raw, tuple) else raw
        if text is not None:
            text = _printable(text) or '""'
        return Row(key=key, value=value, text=text, origin=str(self.origins[key]))

    def to_yaml(self) -> str:
        """Return resolved.yaml: a configuration file of the same values, in one mapping.

        Values of one section and origin share a line, which ends with the origin. Equal specs and
        origins give equal bytes; unprintable characters are escaped.
        """
        rows: list[tuple[str, str]] = []  # the text of a line, and its origin
        open_section = ""
        for (section, origin), texts in self._by_origin().items():
            text = f"{', '.join(texts)},"
            if section != open_section:
                end_before = "}, " if open_section else ""
                text = f"{end_before}{section}: {{{text}"
                open_section = section
            if rows and rows[-1][1] == origin:  # it continues the line of this origin
                text = f"{rows.pop()[0]} {text}"
            rows.append((text, origin))
        what = "# The configuration, with origins. Relative paths are relative to"
        head = [f"{what} {_printable(str(self.cwd))}"]
        head += [f"# profile {_printable(self.profile)}"] if self.profile else []
        lines = "\n  ".join(f"{text}  # {_printable(origin)}" for text, origin in rows)
        return "\n".join([*head, "{" + lines, "}}"]) + "\n"  # closes the last section, then all

    def _by_origin(self) -> dict[tuple[str, str], list[str]]:
        """Group `key: value` by section ("": none, the first) and origin, without unset values."""
        groups: dict[tuple[str, str], list[str]] = {}
        for field in sorted(FIELDS, key=lambda field: field.key.rpartition(".")[0]):
            section, _, key = field.key.rpartition(".")
            if (value := getattr(self.spec, field.name)) is None:
                continue
            raw = written(field, value)
            # A mapping is one text here, with the origins of all its names.
            names = [f"{field.key}.{name}" for name in raw] if isinstance(raw, dict) else []
            origins = (str(self.origins[name]) for name in names or [field.key])
            origin = ", ".join(dict.fromkeys(origins))  # each once
            text = raw if field.kind in _NUMBERS_AND_FLAGS else _flow_text(raw)
            groups.setdefault((section, origin), []).append(f"{key}: {text}")
        return groups


def _flow_text(raw: Raw) -> str:
    """Return a value as YAML on one line."""
    if isinstance(raw, Mapping):
        pairs = (f"{yaml_text(key)}: {yaml_text(text)}" for key, text in sorted(raw.items()))
        return "{" + ", ".join(pairs) + "}"
    return yaml_text(raw) if isinstance(raw, str) else f"[{', '.join(map(yaml_text, raw))}]"


def yaml_text(text: str) -> str:
    r"""Return a text as a YAML scalar that every reader reads as text.

    >>> yaml_text("train.py"), yaml_text("no"), yaml_text("a: b\n")
    ('train.py', '"no"', '"a: b\\n"')
    """
    if re.match(_PLAIN, text) and text.lower() not in _YAML_WORDS:
        return text
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character == '"':
        return '\\"'
    is_plain = character.isprintable() and character != "\\"
    return character if is_plain else character.encode("unicode_escape").decode()  # as in YAML


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else _escaped(c) for c in text)
