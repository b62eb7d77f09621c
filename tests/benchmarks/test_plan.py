"""The benchmark of estimates, run once: it must still run, whatever it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.running import sections_of


@pytest.mark.long
@pytest.mark.torch  # DeepSpeed's estimator imports it
def test_each_command_is_measured_beside_the_floor(tmp_path: Path) -> None:
    (section,) = sections_of("plan", tmp_path, "--runs", "1")
    rows = {row["command"]: row["over the floor"] for row in section["rows"]}
    assert rows.pop("python, nothing") == 1
    assert set(rows) > {"plan", "plan --json", "plan --what-if strategy", "plan --recommend"}
    assert rows.pop("DeepSpeed's ZeRO-3 estimator") > 24  # it imports torch
    assert all(1 < ratio < 24 for ratio in rows.values()), rows
