"""Run a benchmark at a scale at which it says nothing, but still must run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.checkout import ROOT
from tests.patience import patience


def sections_of(module: str, directory: Path, *argv: object) -> list[dict[str, Any]]:
    """Run `benchmarks.MODULE`, and return the sections of its results."""
    results = directory / "results"
    command = [sys.executable, "-m", f"benchmarks.{module}", *argv, "--results", results]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True, timeout=300 * patience())
    assert "| --- |" in results.with_suffix(".md").read_text()
    found: list[dict[str, Any]] = json.loads(results.with_suffix(".json").read_text())["sections"]
    return found
