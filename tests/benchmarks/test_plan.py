"""The benchmark of estimates, run once: it must still run, whatever it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.torch  # DeepSpeed's estimator imports it
def test_each_command_is_measured_beside_the_floor(tmp_path: Path) -> None:
    results = tmp_path / "results"
    argv = [sys.executable, "-m", "benchmarks.plan", "--runs", "1", "--results", results]
    subprocess.run(argv, cwd=ROOT, check=True, timeout=240 * patience())
    (section,) = json.loads(results.with_suffix(".json").read_text())["sections"]
    rows = {row["command"]: row["over the floor"] for row in section["rows"]}
    assert rows.pop("python, nothing") == 1
    assert set(rows) > {"plan", "plan --json", "plan --what-if strategy", "plan --recommend"}
    assert rows.pop("DeepSpeed's ZeRO-3 estimator") > 24  # it imports torch
    assert all(1 < ratio < 24 for ratio in rows.values()), rows
