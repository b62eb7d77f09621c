"""Jobs that the batch script refuses before anything is made."""

from __future__ import annotations

from pathlib import Path

from tests.rendering.job import make_site, rendered


def test_a_heterogeneous_job_is_refused_not_trained_in_part(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    done = site.run(rendered(site.plan()), SLURM_HET_SIZE="2")
    assert done.returncode == 2
    assert "heterogeneous" in done.stderr
    assert not list(site.runs.glob("*/*/attempts/*"))
