"""Find the files that come with the package: templates, accelerate configurations and tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from clusterrun.errors import ClusterrunError

# Beside the package in a checkout or an editable install, inside it in a wheel.
_PACKAGE = Path(__file__).resolve().parents[1]
_DIRECTORIES = {"templates": "job.sbatch.j2", "accelerate_configs": "ddp.yaml.j2"}


def template_directories() -> tuple[Path, ...]:
    """Return the directories of our templates. Raises ClusterrunError if one is missing."""
    return tuple(map(_find, _DIRECTORIES))


def read_json(name: str) -> Any:
    """Return the contents of a JSON file of the package."""
    return json.loads((_PACKAGE / name).read_text(encoding="utf-8"))


def read_strategies() -> dict[str, dict[str, str]]:
    """Return the `key: value` at the head of each strategy's template. Raises ClusterrunError."""
    directory = _find("accelerate_configs")
    texts = {x.name.removesuffix(".yaml.j2"): x.read_text("utf-8") for x in directory.iterdir()}
    heads = {name: text.partition("#}")[0] for name, text in sorted(texts.items())}
    return {
        name: dict(re.findall(r"(?m)^(\w+): (.*)$", head))
        for name, head in heads.items()
        if head.startswith("{# strategy\n")
    }


def _find(name: str) -> Path:
    for parent in (_PACKAGE, _PACKAGE.parent):
        if (parent / name / _DIRECTORIES[name]).is_file():
            return parent / name
    hint = "reinstall it: pip install --force-reinstall clusterrun"
    raise ClusterrunError(f"this installation of clusterrun has no {name}", hint=hint)
