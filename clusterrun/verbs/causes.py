"""The causes that diagnose knows: ours, and those of the project, the user and the site."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from clusterrun.backends.environment import working_directory
from clusterrun.config.files import find_project, user_and_site
from clusterrun.diagnosis.table import Table, built_in, extended, parse
from clusterrun.errors import UsageError

FILE: Final = "causes.yaml"  # beside the configuration files


def known_causes() -> Table:
    """Return the causes by id. Raises UsageError for a file that cannot be read."""
    own = [cause for file in _files() for cause in _read(file).values()]
    return extended(own) if own else built_in()


def _files() -> Iterator[Path]:
    project, _ = find_project(working_directory(os.environ))
    for place in [path for path, _ in user_and_site(os.environ)] + ([project] if project else []):
        if (file := place.with_name(FILE)).is_file():
            yield file


def _read(file: Path) -> Table:
    try:
        return parse([file.read_text(encoding="utf-8")])
    except UsageError as error:
        raise UsageError(f"{file}: {error.message}", cause=error.cause) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}", cause=str(error)) from error
