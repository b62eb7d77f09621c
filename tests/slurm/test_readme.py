"""The README's tour of Slurm runs as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.readme import blocks, run


@pytest.mark.long
@pytest.mark.slurm
def test_the_tour_on_slurm(tmp_path: Path, cluster: Any) -> None:
    # The commands as they stand; the training that the first of them starts is a shorter one.
    shorter = """sed -i 's/"--max-steps", "200"/"--max-steps", "40"/' examples/clusterrun.yaml"""
    tour = "\n".join(["cd examples", *blocks("slurm")]).replace("cd examples\ncd", "cd")
    out = run(f"{shorter}\n{tour}", tmp_path)
    assert "step 40/40" in out
    assert "held-out loss" in out
    assert "COMPLETED" in out
