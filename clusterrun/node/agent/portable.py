"""Send the variables that `accelerate launch` sets on the first node to the others.

Placeholders stand for what other nodes may have otherwise, or what is secret: paths, what a node
has in PYTHONPATH, and the variables that accelerate sets again in capital letters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from clusterrun.node.forge.launcher_variables import Variables

_RUN_DIR, _WORKDIR, _PATH, _COPY = "<run dir>", "<working directory>", "<PYTHONPATH>", "<copy of> "


def portable(
    variables: Mapping[str, str], env: Mapping[str, str], root: Path, workdir: str
) -> Variables:
    """Put the placeholders into variables that were added to `env`."""
    copied = {name.upper(): name for name in env if name != name.upper()}
    found = {}
    for name, value in variables.items():
        source = copied.get(name, "")
        if source and env[source] == value:
            found[name] = _COPY + source
            continue
        parts, own = value.split(":"), _own_path(env) if name == "PYTHONPATH" else []
        if own and parts[: len(own)] == own:
            parts[: len(own)] = [_PATH]
        parts = [_WORKDIR if part == workdir else part for part in parts]
        found[name] = ":".join(parts).replace(str(root), _RUN_DIR)
    return found


def restored(
    variables: Mapping[str, str], env: Mapping[str, str], root: Path, workdir: str
) -> Variables:
    """Return the variables with a node's own values; leave out copies of what it does not have."""
    found = {}
    for name, value in variables.items():
        if value.startswith(_COPY):
            if (source := value.removeprefix(_COPY)) in env:
                found[name] = env[source]
            continue
        parts = value.split(":")
        if name == "PYTHONPATH" and parts[0] == _PATH:
            parts[:1] = _own_path(env)
        text = ":".join(workdir if part == _WORKDIR else part for part in parts)
        found[name] = text.replace(_RUN_DIR, str(root))
    return found


def _own_path(env: Mapping[str, str]) -> list[str]:
    return [part for part in env.get("PYTHONPATH", "").split(":") if part]
