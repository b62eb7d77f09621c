"""Load a JobSpec from the command line, the environment and files, merged with its origins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from clusterrun.config.fields import Field, Kind, Raw
from clusterrun.config.files import FoundFiles, find_files
from clusterrun.config.secrets import secret_arguments
from clusterrun.config.settings import (
    BUILT_IN,
    Anchor,
    ConfigFile,
    Origin,
    Resolved,
    Setting,
    interpret_at,
    located,
    settings_of,
)
from clusterrun.config.spec import (
    BY_ENV,
    BY_KEY,
    BY_NAME,
    FIELDS,
    SECTIONS,
    JobSpec,
    hint_for_key,
    keys_by_word,
)
from clusterrun.errors import UsageError
from clusterrun.shared.amounts import format_seconds
from clusterrun.shared.wording import nearest

if TYPE_CHECKING:
    from clusterrun.config.document import Document

Layer = Sequence[Setting]

_NUMBERS = ("params", "active_params", "hidden", "layers", "heads", "kv_heads", "ffn", "vocab")
_OF_A_MODEL: Final = ("lora", "load_in_4bit", "step_time_s")  # true of that model only
# What a setting replaces in lower layers: other forms of the same fact, and dependent facts. One
# layer may set both.
_REPLACES: Final[Mapping[str, tuple[str, ...]]] = {
    **{"script": ("module", "args"), "module": ("script", "args")},
    **{"model": (*_NUMBERS, *_OF_A_MODEL)},
    **dict.fromkeys(_NUMBERS, ("model", *_OF_A_MODEL)),
    **{"epochs": ("max_steps",), "max_steps": ("epochs",)},
    **{"samples": ("tokens",), "tokens": ("samples",)},
    **{"effective_batch": ("accumulation",), "accumulation": ("effective_batch",)},
    **{"hosts": ("hostfile",), "hostfile": ("hosts",)},
    **{"cpus_per_task": ("cpus_per_gpu",), "cpus_per_gpu": ("cpus_per_task",)},
    "gpu": ("gpu_mem_bytes",),
}
# Neither NCCL nor torch reads them; users mean the process-group timeout.
TIMEOUT_NAMES: Final = ("NCCL_TIMEOUT", "NCCL_SOCKET_TIMEOUT", "TORCH_NCCL_TIMEOUT")


def load_spec(
    flags: Mapping[str, Any],
    *,
    environ: Mapping[str, str],
    cwd: Path,
    config_file: str | None = None,
    profile: str | None = None,
    overrides: Sequence[str] = (),
) -> Resolved:
    """Resolve the command line, the environment and the configuration files.

    `flags` maps field names of JobSpec to values (texts, or `Given` with the option's
    spelling); `overrides` are texts like `slurm.nodes=2`. The order, highest first: options,
    overrides, CLUSTERRUN_* variables, the chosen profile, plain values; the last two
    from `config_file`, the project's, the user's and the site's file in that order.

    Raises UsageError (ConfigError for a file) with the position of the mistake.
    """
    found = find_files(environ=environ, cwd=cwd, config_file=config_file)
    return resolve(found, flags, environ=environ, cwd=cwd, profile=profile, overrides=overrides)


def load_again(
    text: str,
    flags: Mapping[str, Any],
    *,
    shown: str,
    environ: Mapping[str, str],
    cwd: Path,
    typed_in: Path,
    overrides: Sequence[str] = (),
) -> Resolved:
    """Resolve `text`, the resolved configuration of a run in `cwd`, with changes.

    Other files and CLUSTERRUN_* variables are ignored. `shown` names the text in origins;
    relative paths of `flags` and `overrides` are relative to `typed_in`.
    Raises UsageError with the position of the mistake.
    """
    file = ConfigFile(shown=shown, text=text, anchor=Anchor(), strict=False)
    return resolve(
        FoundFiles(files=(file,), project_dir=find_files(environ={}, cwd=cwd).project_dir),
        flags,
        environ={"HOME": environ.get("HOME", "")},
        cwd=cwd,
        overrides=overrides,
        typed_in=None if typed_in == cwd else typed_in,  # None: paths stay as typed
    )


def load_run_dir(*, environ: Mapping[str, str], cwd: Path) -> str:
    """Read run_dir alone: a mistake in another setting must not hide runs. Raises UsageError."""
    others = {field.env for field in FIELDS if field.name != "run_dir"}
    kept = {name: text for name, text in environ.items() if name not in others}
    found = find_files(environ=environ, cwd=cwd)
    return resolve(found, {}, environ=kept, cwd=cwd, only="run_dir").spec.run_dir


def adopt_spec(spec: JobSpec, *, cwd: Path) -> Resolved:
    """Check a spec made in Python, by the same rules as any other.

    Raises UsageError for an invalid value or a secret.
    """
    given = {
        field.name: Given(value=value, speaker="Python")
        for field in FIELDS
        if (value := getattr(spec, field.name)) != field.default
    }
    return resolve(FoundFiles(files=(), project_dir=cwd), given, environ={}, cwd=cwd)


def resolve(
    found: FoundFiles,
    flags: Mapping[str, Any],
    *,
    environ: Mapping[str, str],
    cwd: Path,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    typed_in: Path | None = None,
    only: str = "",
) -> Resolved:
    """Resolve texts that were already read, without touching the disk.

    Paths on the command line are relative to `typed_in`, or to `cwd`. `only`: the one key that is
    read in files, "" for all.
    """
    documents: list[Document] = []
    if found.files:
        from clusterrun.config.document import parse_document  # imports YAML

        documents = [parse_document(file, only=only) for file in found.files]
    refuse_mistakes(documents)
    chosen = chosen_profile(profile, environ, documents)
    anchor = Anchor(home=environ.get("HOME") or None, directory=str(typed_in) if typed_in else None)
    lowest_first = documents[::-1]
    layers: list[Layer] = [
        *(document.settings for document in lowest_first),
        *(document.profiles.get(chosen, []) for document in lowest_first if chosen),
        list(environment_settings(environ, anchor)),
        [*override_settings(overrides, anchor), *flag_settings(flags, anchor)],
    ]
    merged = Merged(layers)
    merged.take_timeout_variables()  # such as NCCL_TIMEOUT: they become launch.timeout
    for argument in secret_arguments(merged.values.get("args", ())):
        merged.notes.append(
            f"argument {argument} looks like a secret: others can read it in ps and in the "
            "run directory; let the script read it from a variable listed in pass_env"
        )
    merged.add_defaults(found.project_dir, cwd)  # run_dir, and the origins of all defaults
    warnings = [text for document in documents for text in document.warnings]
    return Resolved(
        spec=JobSpec(**merged.values),
        origins=merged.origins,
        project_dir=found.project_dir,
        cwd=cwd,
        profile=chosen,
        files=tuple(file.shown for file in found.files),
        notes=(*found.notes, *warnings, *unknown_variables(environ), *merged.notes),
    )


# The command line and the environment


class Given(NamedTuple):
    """A value from the command line, and its option as typed ("": an argument)."""

    value: Any
    flag: str = ""
    speaker: str = "command line"


def environment_settings(environ: Mapping[str, str], anchor: Anchor) -> Iterator[Setting]:
    """Read the `CLUSTERRUN_<SECTION>_<KEY>` variables that are not empty."""
    for field in FIELDS:
        text = environ.get(field.env)
        # In a job, CLUSTERRUN_RUN_DIR is the directory of the run, not of all runs.
        is_of_one_run = field.name == "run_dir" and "CLUSTERRUN_ATTEMPT" in environ
        if text and not is_of_one_run:
            origin = Origin(text=f"env {field.env}", where=f"env {field.env}", is_of_user=True)
            raw = _read_flow(field, text, field.env)
            yield from settings_of(field, raw, origin, anchor, label=field.env)


def unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable that looks like a setting of a section, or names a key.

    In a job, only for those of a section: clusterrun itself sets others there.
    """
    sections = tuple(f"CLUSTERRUN_{section.upper()}_" for section in SECTIONS)
    is_in_job = "CLUSTERRUN_ATTEMPT" in environ
    for name in sorted(environ.keys() - BY_ENV.keys()):
        key = None
        if name.startswith("CLUSTERRUN_") and not is_in_job:
            key = keys_by_word().get(name.removeprefix("CLUSTERRUN_").lower())
        if key or name.startswith(sections):
            near = BY_KEY[key].env if key else nearest(name, BY_ENV)
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
        raw: Raw = {item: value} if item else _read_flow(field, value, key)
        yield from settings_of(field, raw, origin, anchor, label=key)


def _field_of(key: str) -> tuple[Field, str]:
    """Return a setting, and for a mapping the name in it: `env.LOG_LEVEL`. Raises UsageError."""
    if key in BY_KEY:
        return BY_KEY[key], ""
    home, _, item = key.rpartition(".")
    if home in BY_KEY and BY_KEY[home].kind is Kind.MAPPING:
        return BY_KEY[home], item
    section = key.partition(".")[0]
    near = nearest(key, BY_KEY)
    hint = f"use '{near}'" if near else hint_for_key(key, section if section in SECTIONS else "")
    raise UsageError(f"unknown key '{key}'", hint=hint)


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
        source = f"{given.speaker} ({given.flag})" if given.flag else given.speaker
        origin, label = Origin(text=source, is_of_user=True), given.flag or field.key
        # Arguments belong to one script, and hosts to one job: both replace those of a file.
        adds = field.kind is Kind.TEXTS and field.name not in ("args", "hosts")
        yield from settings_of(field, _raw(given.value), origin, anchor, label=label, adds=adds)


def _raw(value: Any) -> Raw:
    """Return a value as texts; Python code may pass a number or a member of an Enum."""
    if isinstance(value, Mapping):
        return {str(name): str(text) for name, text in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(str, value))
    return str(value.value) if isinstance(value, Enum) else str(value)


def _read_flow(field: Field, text: str, label: str) -> Raw:
    """Read one text; that of a list or a mapping is in YAML's flow form, or a single item."""
    if field.kind not in (Kind.TEXTS, Kind.MAPPING):
        return text
    opening = "{" if field.kind is Kind.MAPPING else "["
    has_environments = field.name == "setup" and text.lstrip().startswith("{")
    if has_environments or text.lstrip().startswith(opening):
        from clusterrun.config.document import parse_flow  # imports YAML

        return parse_flow(field, text, label=label)
    return (text,)


# The merge


class Merged:
    """The values by field name and their origins by key, of layers, the lowest first.

    Raises UsageError if a layer names a script and a module.
    """

    def __init__(self, layers: list[Layer]) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}
        settings, replaced = drop_replaced(layers)
        for setting in settings:
            self.put(setting)
        notes = {setting.key: setting.note for setting in settings}  # of the highest value
        self.notes = [note for note in notes.values() if note]
        self.notes += [
            f"{new.key}, {new.origin}, replaces {old.key} ({old.origin})"
            for old, new in replaced
            if old.field.name not in ("script", "module", "args")  # a new script is no surprise
        ]

    def put(self, setting: Setting) -> None:
        """Put a value over those of lower layers.

        Mappings and the names in `pass_env` are united. Other lists are replaced; only repeatable
        options of the command line extend them.
        """
        name = setting.field.name
        old = self.values.get(name)
        origin = setting.origin
        if setting.item is not None:
            self.values[name] = {**(old or {}), setting.item: setting.value}
        elif old and (setting.adds or name == "pass_env"):
            both = (*old, *setting.value)
            self.values[name] = tuple(dict.fromkeys(both)) if name == "pass_env" else both
            before = self.origins[setting.key]
            is_of_user = before.is_of_user and origin.is_of_user
            origin = origin._replace(text=f"{before} + {origin}", is_of_user=is_of_user)
        else:
            self.values[name] = setting.value
        self.origins[setting.key] = origin

    def take_timeout_variables(self) -> None:
        """Read the variables of TIMEOUT_NAMES as the process group's timeout, and drop them."""
        for name, item in itertools.product(("network_env", "env"), TIMEOUT_NAMES):
            if (text := self.values.get(name, {}).pop(item, None)) is None:
                continue
            origin = self.origins.pop(f"{BY_NAME[name].key}.{item}")
            note = f"neither NCCL nor torch reads {item} ({origin}); "
            if "timeout_s" not in self.values:
                seconds = interpret_at(origin, BY_NAME["timeout_s"], text, label=item)
                self.values["timeout_s"] = seconds
                read = Origin(text=f"{origin} ({item})", where=origin.where)
                self.origins["launch.timeout"] = read
                note += f"it is used as launch.timeout: {format_seconds(seconds)}"
            else:
                note += "launch.timeout is used"
            self.notes.append(note)

    def add_defaults(self, project_dir: Path, cwd: Path) -> None:
        """Fill in the origins of defaults, and the directory of the project's runs."""
        if "run_dir" not in self.values and project_dir != cwd:
            self.values["run_dir"] = str(project_dir / BY_NAME["run_dir"].default)
        for field in FIELDS:
            if field.kind is Kind.MAPPING:  # it has the origins of all its names
                items = [f"{field.key}.{item}" for item in self.values.get(field.name, {})]
                texts = dict.fromkeys(self.origins[item].text for item in items)
                self.origins[field.key] = Origin(text=" + ".join(texts) or BUILT_IN.text)
            self.origins.setdefault(field.key, BUILT_IN)


def drop_replaced(layers: list[Layer]) -> tuple[list[Setting], list[tuple[Setting, Setting]]]:
    """Return the settings that no higher layer replaces, lowest first, and (old, new) pairs.

    A setting replaces those of other fields, as `model` does `params` (`_REPLACES`). The pairs are
    the dropped settings with their replacement, without those that a higher layer sets anyway. The
    arguments of a lower layer belong to its script, and are dropped with it.
    """
    kept: list[Setting] = []
    replaced: list[tuple[Setting, Setting]] = []
    replacing: dict[str, Setting] = {}  # by the name of the field that is replaced
    for layer in reversed(layers):  # the highest first
        # Replaced fields that no higher layer sets: their values are lost, and reported.
        lost = replacing.keys() - {setting.field.name for setting in kept}
        replaced += [(s, replacing[s.field.name]) for s in layer if s.field.name in lost]
        left = [setting for setting in layer if setting.field.name not in replacing]
        entries = [s for s in left if s.field.name in ("script", "module")]
        if len({setting.field.name for setting in entries}) == 2:
            error = UsageError("script and module cannot be combined", hint="keep one of them")
            raise located(error, entries[-1].origin.where)
        for setting in left:
            for name in _REPLACES.get(setting.field.name, ()):
                replacing.setdefault(name, setting)
        kept = left + kept
    return kept, replaced


def refuse_mistakes(documents: Sequence[Document]) -> None:
    """Raise the first mistake in the files, with the number of the rest."""
    errors = [error for document in documents for error in document.errors]
    if len(errors) > 1:
        errors[0].hints += (f"to list {len(errors) - 1} more: clusterrun config validate",)
    if errors:
        raise errors[0]


def chosen_profile(
    profile: str | None, environ: Mapping[str, str], documents: Sequence[Document]
) -> str | None:
    """Return the profile of the option, the environment or the highest file, in this order.

    An empty option means none. Raises UsageError for a name that no file defines.
    """
    choices: list[tuple[str, str | None]] = [(profile or "", None)]  # each with its place
    if profile is None:
        choices = [(environ.get("CLUSTERRUN_PROFILE", ""), "env CLUSTERRUN_PROFILE")]
        choices += [(each.profile[0], each.profile[1].where) for each in documents if each.profile]
    name, where = next((choice for choice in choices if choice[0]), ("", None))
    names = sorted({known for document in documents for known in document.profiles})
    if not name or name in names:
        return name or None
    hint = f"use one of: {', '.join(names)}"
    if not names:
        hint = "define it under 'profiles:' in clusterrun.yaml; no file defines a profile"
    raise located(UsageError(f"unknown profile '{name}'", hint=hint), where)
