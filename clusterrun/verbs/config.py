"""Resolve a configuration: files, environment and flags, as the command line does."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from clusterrun.backends.environment import working_directory
from clusterrun.config.load import load_spec as load
from clusterrun.config.settings import Resolved


def load_spec(
    flags: Mapping[str, Any] | None = None,
    *,
    config_file: str | None = None,
    profile: str | None = None,
    overrides: Sequence[str] = (),
) -> Resolved:
    """Resolve clusterrun.yaml, the environment and `flags` ({"nodes": 2}).

    Raises UsageError that names the place of the mistake.
    """
    return load(
        flags or {},
        environ=os.environ,
        cwd=working_directory(os.environ),
        config_file=config_file,
        profile=profile,
        overrides=overrides,
    )
