"""The examples train on a real Slurm, each in a short form, as its README says."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.readme import run, tour
from tests.road import project
from tests.test_docs import pages_with

CAPTIONS = ["train_captions.py", "--max-steps", "10", "--save-every", "5"]
# Directory of examples/: options of submit, the script with its arguments, what must be printed.
RUNS: dict[str, tuple[list[str], list[str], str]] = {
    "finetune_lora": ([], ["finetune.py", "--samples", "64"], "adapters in "),
    "one_gpu_to_many": ([], ["train.py", "--samples", "2950"], "each of 2950 samples seen, 2 rep"),
    "deepspeed_offload": ([], CAPTIONS, "held-out 128 images: "),  # its yaml says zero2-offload
    "deepspeed_offload, not offloaded": (
        *(["--strategy", "zero2"], CAPTIONS, "held-out 128 images: "),
    ),
    "small_transformer": ([], ["train.py", "--max-steps", "20"], "held-out rows sorted"),
    "pretrain_parquet": (
        ["--mem", "4G", "--setup", f"{sys.executable} make_data.py data --rows 640"],
        ["pretrain.py", "--data", "data"],
        "kept best/step-00000020-loss-",
    ),
}

# The others differ in what they train, or take minutes.
SHORT = {"one_gpu_to_many"}


@pytest.mark.slurm
@pytest.mark.torch
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in RUNS]
)
def test_the_example_trains_on_two_nodes(name: str, tmp_path: Path, cluster: Any) -> None:
    options, words, expected = RUNS[name]
    examples = project(tmp_path / "examples", tmp_path / "state")
    here = replace(examples, path=examples.path / name.split(",")[0])
    job_id = here.submit("-N2", "--gpus-per-node", "1", "--device", "cpu", *options, *words)
    assert cluster.wait_job(job_id, timeout_s=500) == "COMPLETED"
    assert expected in here.raw_logs(job_id).decode()


# The tours


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
