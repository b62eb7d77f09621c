"""The tours of Slurm in README and docs run as they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.readme import run, tour
from tests.test_docs import pages_with


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.parametrize("page", ["README.md", *pages_with("slurm")])
def test_the_tour_on_slurm(page: str, tmp_path: Path, cluster: Any) -> None:
    # The commands as they stand; the training that the first of them starts is a shorter one.
    shorter = """sed -i 's/"--max-steps", "200"/"--max-steps", "40"/' examples/clusterrun.yaml"""
    out = run(f"{shorter}\n{tour('slurm', page)}", tmp_path)
    assert "step 40/40" in out
    assert "held-out loss" in out
    assert "COMPLETED" in out
