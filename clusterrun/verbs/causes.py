"""The causes that diagnose knows: ours, and those of the project, the user and the site."""

from __future__ import annotations

import os
from typing import Final

from clusterrun.backends.environment import working_directory
from clusterrun.config.files import find_project, user_and_site
from clusterrun.diagnosis.table import KnownCause, Table, built_in, extended, parse
from clusterrun.errors import UsageError

FILE: Final = "causes.yaml"  # beside the configuration files


def known_causes() -> Table:
    """Return the causes by id. Raises UsageError for a file that cannot be read."""
    project, _ = find_project(working_directory(os.environ))
    own: list[KnownCause] = []
    for place in [path for path, _ in user_and_site(os.environ)] + ([project] if project else []):
        file = place.with_name(FILE)
        try:
            own += parse([file.read_text(encoding="utf-8")]).values() if file.is_file() else ()
        except UsageError as error:
            raise UsageError(f"{file}: {error.message}", cause=error.cause) from error
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {file}", cause=str(error)) from error
    return extended(own) if own else built_in()
