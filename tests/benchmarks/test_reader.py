"""The benchmark of the parquet reader, at a scale at which it says nothing but still must run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.running import sections_of

pytest.importorskip("pyarrow", reason="the example needs the extra 'examples'")


@pytest.mark.long
def test_every_way_of_reading_is_measured_and_written_down(tmp_path: Path) -> None:
    options = ["--rows", "20", "--factors", "1", "--runs", "1"]
    sections = sections_of("reader", tmp_path, "--dir", tmp_path, *options)
    assert "| read_table |" in (tmp_path / "results.md").read_text()
    assert [section["title"] for section in sections] == [
        "Row groups of 1,000 rows",
        "One row group",
    ]
    for section in sections:
        ways = [row["way"] for row in section["rows"]]
        assert ways == ["nothing", "stream", "iter_batches", "read_table"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results.md"]
