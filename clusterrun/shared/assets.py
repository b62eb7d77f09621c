"""Find the files that come with the package: templates, accelerate configurations and tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from clusterrun.errors import ClusterrunError

_PACKAGE = Path(__file__).resolve().parents[1]
_FILE_IN = {"templates": "job.sbatch.j2", "accelerate_configs": "ddp.yaml.j2"}  # by directory


def template_directories() -> tuple[Path, ...]:
    """Return the directories of our templates. Raises ClusterrunError if one is missing."""
    return tuple(map(_find_directory, _FILE_IN))


def read_json(name: str) -> Any:
    """Return the contents of a JSON file of the package."""
    return json.loads((_PACKAGE / name).read_text(encoding="utf-8"))


def read_strategies() -> dict[str, dict[str, str]]:
    """Return the `key: value` lines that begin each strategy's template. Raises ClusterrunError."""
    files = _find_directory("accelerate_configs").iterdir()
    texts = {path.name.removesuffix(".yaml.j2"): path.read_text("utf-8") for path in files}
    strategies = {}
    for name, text in sorted(texts.items()):
        comment = text.partition("#}")[0]
        if comment.startswith("{# strategy\n"):  # other templates are no strategies
            strategies[name] = dict(re.findall(r"(?m)^(\w+): (.*)$", comment))
    return strategies


def _find_directory(name: str) -> Path:
    """Find a directory of ours: in a wheel inside the package, in a checkout beside it."""
    for parent in (_PACKAGE, _PACKAGE.parent):
        if (parent / name / _FILE_IN[name]).is_file():  # it is ours
            return parent / name
    hint = "reinstall it from a clone of clusterrun: pip install --force-reinstall ."
    raise ClusterrunError(f"this installation of clusterrun has no {name}", hint=hint)
