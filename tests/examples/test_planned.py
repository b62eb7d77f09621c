"""What `submit --plan` hands to the ranks is what the guides train with, or they say that not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.worlds import EXAMPLES, train

pytestmark = pytest.mark.torch
PLANNED = {
    "CLUSTERRUN_MICRO_BATCH": "4",
    "CLUSTERRUN_ACCUMULATION": "2",
    "CLUSTERRUN_GRAD_CKPT": "1",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
}


@pytest.mark.parametrize(
    ("script", "flags", "line"),
    [
        pytest.param(
            "finetune_lora/finetune.py",
            "--samples 40 --hidden 16 --layers 1 --heads 2 --epochs 1",
            "batch 4 x 2 accumulation x 1 ranks = 8 samples a step, 5 steps an epoch\n",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "pretrain_parquet/pretrain.py",
            "--data data --output out --layers 1 --width 16 --log-every 10",
            "world 1 ranks, 8 rows a step, 12 steps in all\nstep 10/12 loss",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "deepspeed_offload/train_captions.py",
            "--width 8 --layers 1 --max-steps 1 --held-out 4",
            "batch 4 x 2 accumulation x 1 ranks = 8 pairs a step\n",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "one_gpu_to_many/train.py",
            "--samples 100",
            "batch 4 x 2 accumulation x 1 ranks = 8: 12 full steps (12 on one rank), 13 run, 0",
            marks=pytest.mark.long,
        ),
        ("small_transformer/train.py", "--preset cpu --max-steps 1", ", 8 rows a step on 1 rank"),
    ],
)
def test_a_planned_batch_is_taken(tmp_path: Path, script: str, flags: str, line: str) -> None:
    if "--data" in flags:
        make = [sys.executable, str(EXAMPLES / "pretrain_parquet/make_data.py"), "data"]
        subprocess.run([*make, "--rows", "100"], cwd=tmp_path, check=True)
    done = train(tmp_path, "none", 1, *flags.split(), example=EXAMPLES / script, environ=PLANNED)
    assert done.returncode == 0, done.stderr
    assert line in done.stdout
