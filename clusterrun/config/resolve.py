"""Merge the settings of all sources into one JobSpec, with the origin of each value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from clusterrun.config.fields import Kind
from clusterrun.config.keys import BY_NAME
from clusterrun.config.secrets import secret_arguments
from clusterrun.config.settings import BUILT_IN, Origin, Setting, interpret_at, located
from clusterrun.config.spec import FIELDS
from clusterrun.errors import ConfigError, UsageError
from clusterrun.shared.durations import format_seconds
from clusterrun.shared.wording import nearest

if TYPE_CHECKING:
    from clusterrun.config.document import Document

Layer = Sequence[Setting]

_NUMBERS: Final = (
    "params",
    "active_params",
    "hidden",
    "layers",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
)
_OF_A_MODEL: Final = ("lora", "load_in_4bit", "step_time_s")  # true of that model only
# What a setting replaces in lower layers: other forms of the same fact, and dependent facts. One
# layer may set both.
_DISPLACES: Final[Mapping[str, tuple[str, ...]]] = {
    **{"script": ("module", "args"), "module": ("script", "args")},
    **{"model": (*_NUMBERS, *_OF_A_MODEL)},
    **dict.fromkeys(_NUMBERS, ("model", *_OF_A_MODEL)),
    **{"epochs": ("max_steps",), "max_steps": ("epochs",)},
    **{"samples": ("tokens",), "tokens": ("samples",)},
    **{"effective_batch": ("accumulation",), "accumulation": ("effective_batch",)},
    **{"hosts": ("hostfile",), "hostfile": ("hosts",)},
    "gpu": ("gpu_mem_bytes",),
}
# Neither NCCL nor torch reads them; users mean the process-group timeout.
TIMEOUT_NAMES: Final = ("NCCL_TIMEOUT", "NCCL_SOCKET_TIMEOUT", "TORCH_NCCL_TIMEOUT")


class Merged:
    """The values by field name and their origins by key, built layer by layer."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}
        self.notes: list[str] = []
        self.readings: dict[str, str] = {}

    def lay(self, setting: Setting) -> None:
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
            origin = Origin(
                text=f"{before} + {origin}",
                where=origin.where,
                is_of_user=before.is_of_user and origin.is_of_user,
            )
        else:
            self.values[name] = setting.value
        self.origins[setting.key] = origin
        self.readings[setting.key] = setting.note

    def take_timeout(self) -> None:
        """Read NCCL_TIMEOUT as the process group's timeout."""
        for name in ("network_env", "env"):
            for item in TIMEOUT_NAMES:
                if item in self.values.get(name, {}):
                    self._take_timeout(name, item)

    def _take_timeout(self, name: str, item: str) -> None:
        text, origin = self.values[name].pop(item), self.origins.pop(f"{BY_NAME[name].key}.{item}")
        ignored = f"neither NCCL nor torch reads {item} ({origin})"
        if "timeout_s" in self.values:
            self.notes.append(f"{ignored}; launch.timeout is used")
            return
        seconds = interpret_at(origin, BY_NAME["timeout_s"], text, label=item)
        self.values["timeout_s"] = seconds
        self.origins["launch.timeout"] = Origin(text=f"{origin} ({item})", where=origin.where)
        self.notes.append(f"{ignored}; it is used as launch.timeout: {format_seconds(seconds)}")

    def warn_of_secrets(self) -> None:
        """Warn of an argument that looks like a secret: `ps` and the run directory show it."""
        for argument in secret_arguments(self.values.get("args", ())):
            self.notes.append(
                f"argument {argument} looks like a secret: others can read it in ps and in the "
                "run directory; let the script read it from a variable listed in pass_env"
            )

    def complete(self, project_dir: Path, cwd: Path) -> None:
        """Fill in the origins of defaults, and the directory of the project's runs."""
        if "run_dir" not in self.values and project_dir != cwd:
            self.values["run_dir"] = str(project_dir / BY_NAME["run_dir"].default)
        for field in FIELDS:
            if field.kind is Kind.MAPPING:
                items = [f"{field.key}.{item}" for item in self.values.get(field.name, {})]
                texts = dict.fromkeys(self.origins[item].text for item in items)
                self.origins[field.key] = Origin(text=" + ".join(texts) or BUILT_IN.text)
            self.origins.setdefault(field.key, BUILT_IN)


def merge(layers: Iterable[Layer]) -> Merged:
    """Merge the layers, lowest first. Raises UsageError if one names a script and a module."""
    merged = Merged()
    kept, displaced = displace(list(layers))
    for layer in kept:
        for setting in layer:
            merged.lay(setting)
    merged.notes += [*filter(None, merged.readings.values()), *_replaced(displaced)]
    return merged


def displace(layers: list[Layer]) -> tuple[list[Layer], list[tuple[Setting, Setting]]]:
    """Drop what a higher layer replaces; also return what was dropped, with its replacement.

    The arguments of a lower layer belong to its script, and are dropped with it.
    """
    kept: list[Layer] = []
    dropped: list[tuple[Setting, Setting]] = []
    rivals: dict[str, Setting] = {}
    for layer in reversed(layers):
        names = rivals.keys() - {setting.field.name for higher in kept for setting in higher}
        dropped += [(s, rivals[s.field.name]) for s in layer if s.field.name in names]
        own = [setting for setting in layer if setting.field.name not in rivals]
        named = [s for s in own if s.field.name in ("script", "module")]
        if len({setting.field.name for setting in named}) == 2:
            error = UsageError("script and module cannot be combined", hint="keep one of them")
            raise located(error, named[-1].origin.where)
        for setting in own:
            for name in _DISPLACES.get(setting.field.name, ()):
                rivals.setdefault(name, setting)
        kept.insert(0, own)
    return kept, dropped


def _replaced(dropped: Iterable[tuple[Setting, Setting]]) -> list[str]:
    """Name the facts of the training that are replaced, but not a script's arguments."""
    losers: dict[str, list[Setting]] = {}
    for lost, won in dropped:
        if lost.field.name not in ("script", "module", "args"):
            losers.setdefault(f"{won.key}, {won.origin},", []).append(lost)
    return [
        f"{winner} replaces {', '.join(dict.fromkeys(s.key for s in lost))} ({lost[0].origin})"
        for winner, lost in losers.items()
    ]


def refuse_mistakes(documents: Sequence[Document]) -> None:
    """Raise the first mistake in the files, with the number of the rest."""
    errors = [error for document in documents for error in document.errors]
    if not errors:
        return
    first = errors[0]
    more = (f"to list {len(errors) - 1} more: clusterrun config validate",) if errors[1:] else ()
    raise ConfigError(
        first.message, hint=(*first.hints, *more), cause=first.cause, where=first.where
    ) from first


def chosen_profile(
    profile: str | None, environ: Mapping[str, str], documents: Sequence[Document]
) -> str | None:
    """Return the profile of the option, the environment or the highest file, in this order.

    An empty option means none. Raises UsageError for a name that no file defines.
    """
    if profile is not None:
        return _known(profile, documents, None) if profile else None
    named = environ.get("CLUSTERRUN_PROFILE")
    if named:
        return _known(named, documents, "env CLUSTERRUN_PROFILE")
    for document in documents:
        if document.profile is not None:
            name, origin = document.profile
            return _known(name, documents, origin.where)
    return None


def _known(name: str, documents: Sequence[Document], where: str | None) -> str:
    names = sorted({known for document in documents for known in document.profiles})
    if name in names:
        return name
    near = nearest(name, names)
    if near is not None:
        hint = f"use '{near}'"
    elif names:
        hint = f"use one of: {', '.join(names)}"
    else:
        hint = "define it under 'profiles:' in clusterrun.yaml; no file defines a profile"
    raise located(UsageError(f"unknown profile '{name}'", hint=hint), where)


def refuse_several_clusters(merged: Merged) -> None:
    """Refuse sbatch's list of clusters: a job id is valid on one cluster only."""
    names = [name for name in (merged.values.get("clusters") or "").split(",") if name]
    if len(names) > 1:
        error = UsageError(
            f"slurm.clusters lists {len(names)} clusters: {', '.join(names)}",
            hint=f"choose one, e.g. --set slurm.clusters={names[0]}",
        )
        raise located(error, merged.origins["slurm.clusters"].where)
