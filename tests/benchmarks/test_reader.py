"""The benchmark of the parquet reader, at a scale at which it says nothing but still must run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience

pytest.importorskip("pyarrow", reason="the example needs the extra 'examples'")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_every_way_of_reading_is_measured_and_written_down(tmp_path: Path) -> None:
    options = ["--rows", "20", "--factors", "1", "--runs", "1"]
    results = tmp_path / "results"
    argv = [sys.executable, "-m", "benchmarks.reader", "--dir", tmp_path, "--results", results]
    subprocess.run([*argv, *options], cwd=ROOT, check=True, timeout=120 * patience())
    assert "| read_table |" in results.with_suffix(".md").read_text()
    sections = json.loads(results.with_suffix(".json").read_text())["sections"]
    assert [section["title"] for section in sections] == [
        "Row groups of 1,000 rows",
        "One row group",
    ]
    for section in sections:
        ways = [row["way"] for row in section["rows"]]
        assert ways == ["nothing", "stream", "iter_batches", "read_table"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results.md"]
