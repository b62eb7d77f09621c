"""Settings from the environment and from the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

from clusterrun.config.fields import Field, Kind
from clusterrun.config.keys import (
    BY_ENV,
    BY_KEY,
    BY_NAME,
    SECTIONS,
    hint_for_key,
    key_of_word,
)
from clusterrun.config.settings import Anchor, Origin, Setting, settings_of
from clusterrun.config.spec import FIELDS
from clusterrun.config.values import Raw
from clusterrun.errors import UsageError
from clusterrun.shared.wording import nearest

_OF_A_JOB: Final = (
    *("CLUSTERRUN_ATTEMPT", "CLUSTERRUN_GIVEN", "CLUSTERRUN_HOSTS_JOB_ID"),
    *("CLUSTERRUN_LOCAL_JOB_ID", "CLUSTERRUN_FORWARDED", "CLUSTERRUN_BATCH_PID"),
)
# Variables that are no settings, and those of clusterrun's own tests.
_OTHERS: Final = (
    *("CLUSTERRUN_SITE_CONFIG", "CLUSTERRUN_PROFILE", "CLUSTERRUN_LAST_JOB_ID"),
    "CLUSTERRUN_BENCHMARKS_",
    *("CLUSTERRUN_TEST_", "CLUSTERRUN_REQUIRE_", "CLUSTERRUN_CLUSTER_", "CLUSTERRUN_HOSTS_"),
)


class Given(NamedTuple):
    """A value from the command line, and its option as typed ("": an argument)."""

    value: Any
    flag: str = ""
    speaker: str = "command line"

    @property
    def origin(self) -> Origin:
        """Return the source and its option."""
        text = f"{self.speaker} ({self.flag})" if self.flag else self.speaker
        return Origin(text=text, is_of_user=True)


def environment_settings(environ: Mapping[str, str], anchor: Anchor) -> Iterator[Setting]:
    """Read the `CLUSTERRUN_<SECTION>_<KEY>` variables that are not empty."""
    for field in FIELDS:
        text = environ.get(field.env)
        if not text or _belongs_to_a_run(field, environ):
            continue
        origin = Origin(text=f"env {field.env}", where=f"env {field.env}", is_of_user=True)
        raw = _flow(field, text, field.env)
        yield from settings_of(field, raw, origin, anchor, label=field.env)


def _belongs_to_a_run(field: Field, environ: Mapping[str, str]) -> bool:
    # Inside a job, CLUSTERRUN_RUN_DIR is the run of the rank itself.
    return field.name == "run_dir" and "CLUSTERRUN_ATTEMPT" in environ


def unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable that looks like a setting but is not.

    In a job, only those of a section: the job has variables of its own.
    """
    sections = tuple(f"CLUSTERRUN_{section.upper()}_" for section in SECTIONS)
    looks = ("CLUSTERRUN_",) if environ.keys().isdisjoint(_OF_A_JOB) else sections
    for name in sorted(environ):
        if name.startswith(looks) and name not in BY_ENV and not name.startswith(_OTHERS):
            key = key_of_word(name.removeprefix("CLUSTERRUN_").lower())
            near = BY_KEY[key].env if key else None
            near = nearest(name, BY_ENV) if name.startswith(sections) else near
            hint = f"; use {near}" if near else ""
            yield f"{name} is set in your shell but is not a setting, so it is ignored{hint}"


def override_settings(overrides: Sequence[str], anchor: Anchor) -> Iterator[Setting]:
    """Read `--set key=value`. Raises UsageError for an unknown key."""
    origin = Origin(text="command line (--set)", is_of_user=True)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set '{text}' has no value", hint="write --set slurm.nodes=2")
        field, item = _field_of(key.strip())
        raw: Raw = {item: value} if item else _flow(field, value, key)
        yield from settings_of(field, raw, origin, anchor, label=key)


def _field_of(key: str) -> tuple[Field, str]:
    """Return a setting, and for a mapping the name in it: `env.LOG_LEVEL`."""
    if key in BY_KEY:
        return BY_KEY[key], ""
    home, _, item = key.rpartition(".")
    if home in BY_KEY and BY_KEY[home].kind is Kind.MAPPING:
        return BY_KEY[home], item
    raise unknown_key(key)


def unknown_key(key: str) -> UsageError:
    """Return the error for a dotted key that is not a setting."""
    if key.partition(".")[0] in ("profile", "profiles"):
        return UsageError(f"unknown key '{key}'", hint="use --profile NAME")
    near = nearest(key, BY_KEY)
    if near is not None:
        return UsageError(f"unknown key '{key}'", hint=f"use '{near}'")
    section = key.partition(".")[0] if key.partition(".")[0] in SECTIONS else ""
    return UsageError(f"unknown key '{key}'", hint=hint_for_key(key, section))


def flag_settings(flags: Mapping[str, Any], anchor: Anchor) -> Iterator[Setting]:
    """Read the options of the command line; a repeatable one adds to a list.

    Raises UsageError for a name that is not a field of JobSpec.
    """
    for name, value in flags.items():
        given = value if isinstance(value, Given) else Given(value=value)
        if given.value is None:
            continue
        field = BY_NAME.get(name)
        if field is None:
            raise UsageError(f"unknown setting '{name}'", hint=hint_for_key(name, ""))
        yield from settings_of(
            field,
            _raw(given.value),
            given.origin,
            anchor,
            label=given.flag or field.key,
            adds=field.kind is Kind.TEXTS and field.name not in ("args", "hosts"),
        )


def _raw(value: Any) -> Raw:
    if isinstance(value, Mapping):
        return {str(name): _raw_text(text) for name, text in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_raw_text(item) for item in value)
    return _raw_text(value)


def _raw_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value.value) if isinstance(value, Enum) else str(value)


def _flow(field: Field, text: str, label: str) -> Raw:
    """Read a list or a mapping from one text: YAML's flow form, or a single item."""
    opening = {Kind.TEXTS: "[", Kind.MAPPING: "{"}.get(field.kind)
    if opening is None:
        return text
    names_environments = field.name == "setup" and text.lstrip().startswith("{")
    if text.lstrip().startswith(opening) or names_environments:
        from clusterrun.config.document import parse_flow  # imports YAML

        return parse_flow(field, text, label=label)
    return (text,)
