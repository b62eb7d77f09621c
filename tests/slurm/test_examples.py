"""The examples train on a real Slurm, each in a short form, as its README says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.road import project

# Directory of examples/: options of submit, the script with its arguments, what must be printed.
RUNS: dict[str, tuple[list[str], list[str], str]] = {}


@pytest.mark.slurm
@pytest.mark.torch
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_the_example_trains_on_two_nodes(name: str, tmp_path: Path, cluster: Any) -> None:
    options, words, expected = RUNS[name]
    examples = project(tmp_path / "examples", tmp_path / "state")
    here = replace(examples, path=examples.path / name)
    job_id = here.submit("-N2", "--gpus-per-node", "1", "--device", "cpu", *options, *words)
    assert cluster.wait_job(job_id, timeout_s=500) == "COMPLETED"
    assert expected in here.raw_logs(job_id).decode()
