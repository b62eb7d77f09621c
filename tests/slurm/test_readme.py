"""The README's tour of Slurm runs as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.test_readme import blocks, run


@pytest.mark.slurm
def test_the_tour_on_slurm(tmp_path: Path, cluster: Any) -> None:
    out = run(
        "\n".join(["cd examples", *blocks("slurm")]).replace("cd examples\ncd", "cd"), tmp_path
    )
    assert "held-out loss" in out
    assert "COMPLETED" in out
