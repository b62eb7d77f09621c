"""Load a JobSpec from the command line, the environment and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterrun.config.fields import Field, Kind
from clusterrun.config.files import FoundFiles, find_files
from clusterrun.config.resolve import (
    Layer,
    chosen_profile,
    merge,
    refuse_mistakes,
    refuse_several_clusters,
)
from clusterrun.config.resolved import Resolved
from clusterrun.config.settings import Anchor, ConfigFile
from clusterrun.config.spec import FIELDS, JobSpec
from clusterrun.config.spoken import (
    Given,
    environment_settings,
    flag_settings,
    override_settings,
    unknown_variables,
)

if TYPE_CHECKING:
    from clusterrun.config.document import Document


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
        typed_in=None if typed_in == cwd else typed_in,
    )


def load_run_dir(*, environ: Mapping[str, str], cwd: Path) -> str:
    """Return the directory of runs; mistakes in other settings hide no run. Raises UsageError."""
    others = {field.env for field in FIELDS if field.name != "run_dir"}
    kept = {name: text for name, text in environ.items() if name not in others}
    found = find_files(environ=environ, cwd=cwd)
    return resolve(found, {}, environ=kept, cwd=cwd, only="run_dir").spec.run_dir


def adopt_spec(spec: JobSpec, *, cwd: Path) -> Resolved:
    """Check a spec made in Python, by the same rules as any other.

    Raises UsageError for an invalid value, a secret, or several clusters.
    """
    given = {
        field.name: Given(value=value, speaker="Python")
        for field in FIELDS
        if (value := getattr(spec, field.name)) != _default(field)
    }
    return resolve(FoundFiles(files=(), project_dir=cwd), given, environ={}, cwd=cwd)


def _default(field: Field) -> Any:
    return {} if field.kind is Kind.MAPPING else field.default


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

    Paths on the command line are relative to `typed_in`, or to `cwd`. Of files, `only` that key is
    read.
    """
    documents = _documents(found.files, only)
    refuse_mistakes(documents)
    chosen = chosen_profile(profile, environ, documents)
    anchor = Anchor(home=environ.get("HOME") or None, directory=str(typed_in) if typed_in else None)
    merged = merge(
        (
            *_file_layers(documents, chosen),
            list(environment_settings(environ, anchor)),
            [*override_settings(overrides, anchor), *flag_settings(flags, anchor)],
        )
    )
    merged.take_timeout()
    merged.warn_of_secrets()
    refuse_several_clusters(merged)
    merged.complete(found.project_dir, cwd)
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


def _documents(files: Sequence[ConfigFile], only: str) -> list[Document]:
    if not files:
        return []
    from clusterrun.config.document import parse_document  # imports YAML

    return [parse_document(file, only=only) for file in files]


def _file_layers(documents: Sequence[Document], profile: str | None) -> list[Layer]:
    """Return all plain values below all values of the profile, each from the lowest file up."""
    lowest_first = list(reversed(documents))
    plain: list[Layer] = [document.settings for document in lowest_first]
    if profile is None:
        return plain
    return plain + [document.profiles.get(profile, []) for document in lowest_first]
