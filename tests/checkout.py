"""This checkout as git lists it: what runs, builds and editors left here is no part of it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


def listed(directory: Path = ROOT) -> list[Path]:
    """Return the files below a directory that git knows, or would take."""
    asked = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    git = ["git", "-c", "safe.directory=*", "-C", str(directory), *asked]
    names = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\0")
    return [path for name in names if name and (path := directory / name).is_file()]


def copy_listed(directory: Path, target: Path) -> Path:
    """Copy these files, and nothing that a run left beside them with a mode of its own."""
    for path in listed(directory):
        copy = target / path.relative_to(directory)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    return target
