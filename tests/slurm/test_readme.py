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
    # The commands as they stand, with fewer steps: of the configuration, or of the script itself.
    shorter = "sed -i '/max-steps/s/200/40/' examples/clusterrun.yaml examples/train_lm.py"
    out = run(f"{shorter}\n{tour('slurm', page)}", tmp_path)
    assert "step 40/40" in out
    assert "held-out loss" in out
    assert "COMPLETED" in out
