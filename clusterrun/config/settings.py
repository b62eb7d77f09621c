"""One value of one field, its origin, and the file that it may come from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from clusterrun.config.fields import Field, Kind
from clusterrun.config.keys import BY_NAME
from clusterrun.config.values import Raw, anchored, interpret
from clusterrun.errors import ConfigError, UsageError
from clusterrun.shared.wording import count

_TYPED_GPUS: Final = r"([A-Za-z][A-Za-z0-9_.-]*):([0-9]+)\Z"


class Origin(NamedTuple):
    """The source of a value: `text` for people, `where` is `file:line:column` for errors.

    `is_of_user`: the user's own command line, environment or configuration, not a project's file;
    `is_of_site`: the site's configuration.
    """

    text: str
    where: str | None = None
    is_of_user: bool = False
    is_of_site: bool = False

    @property
    def is_typed(self) -> bool:
        """Return whether the value is from the command line."""
        return self.is_of_user and self.where is None

    def __str__(self) -> str:
        return self.text


BUILT_IN: Final = Origin(text="built-in")


class Anchor(NamedTuple):
    """The directories that paths of one source are relative to."""

    directory: str | None = None  # None: the working directory
    home: str | None = None


class ConfigFile(NamedTuple):
    """A file that was found; `shown` is its name in messages, `strict` refuses unknown keys.

    `is_of_user`: the user's own configuration; `is_of_site`: the site's.
    """

    shown: str
    text: str
    anchor: Anchor
    strict: bool
    is_of_user: bool = False
    is_of_site: bool = False

    @property
    def origin_name(self) -> str:
        """Return its name in origins: a leading `./` distinguishes a file from a word."""
        return f"./{self.shown}" if not self.shown.startswith(("/", "~", ".")) else self.shown


class Setting(NamedTuple):
    """One value of one field; of a mapping one `item`; `adds` extends a list.

    `note` tells how a text is read that is easily meant otherwise.
    """

    field: Field
    value: Any
    origin: Origin
    item: str | None = None
    adds: bool = False
    note: str = ""

    @property
    def key(self) -> str:
        """Return its name in origins and `config show`: `slurm.nodes`, `env.LOG_LEVEL`."""
        return self.field.key if self.item is None else f"{self.field.key}.{self.item}"


def settings_of(
    field: Field, raw: Raw, origin: Origin, anchor: Anchor, *, label: str, adds: bool = False
) -> Iterator[Setting]:
    """Read one value; Slurm's `a100:4` and a mapping yield several settings.

    Raises UsageError, or ConfigError if the origin is in a file.
    """
    if field.name == "gpus_per_node" and isinstance(raw, str):
        typed = re.match(_TYPED_GPUS, raw)
        if typed is not None:
            yield from settings_of(BY_NAME["gpu_type"], typed[1], origin, anchor, label=label)
            raw = typed[2]
    value = interpret_at(origin, field, raw, label=label)
    value = anchored(field, value, directory=anchor.directory, home=anchor.home)
    if field.kind is not Kind.MAPPING:
        note = _reading(field, raw, value, label) if isinstance(raw, str) else ""
        yield Setting(field=field, value=value, origin=origin, adds=adds, note=note)
        return
    for name, text in value.items():
        yield Setting(field=field, value=text, origin=origin, item=name)


def _reading(field: Field, raw: str, value: Any, label: str) -> str:
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
