"""All examples in one table: what each takes from a plan, and what a user gets wrong in it.

A mistake ends an example in one line, before it trains.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.examples.worlds import EXAMPLES, command, train
from tests.patience import finished

pytestmark = pytest.mark.torch
LM = "train_lm.py"
PLANNED = {
    "CLUSTERRUN_MICRO_BATCH": "4",
    "CLUSTERRUN_ACCUMULATION": "2",
    "CLUSTERRUN_GRAD_CKPT": "1",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
}


class Guide(NamedTuple):
    """The least flags of an example, those of a short training, and the line of its batch."""

    least: str
    short: str
    planned: str


GUIDES = {
    "one_gpu_to_many/train.py": Guide(
        "",
        "--samples 100",
        "batch 4 x 2 accumulation x 1 ranks = 8: 12 full steps (12 on one rank), 13 run, 0",
    ),
    "finetune_lora/finetune.py": Guide(
        "",
        "--samples 40 --hidden 16 --layers 1 --heads 2 --epochs 1",
        "batch 4 x 2 accumulation x 1 ranks = 8 samples a step, 5 steps an epoch\n",
    ),
    "deepspeed_offload/train_captions.py": Guide(
        "",
        "--width 8 --layers 1 --max-steps 1 --held-out 4",
        "batch 4 x 2 accumulation x 1 ranks = 8 pairs a step\n",
    ),
    "pretrain_parquet/pretrain.py": Guide(
        "--data data --output out",
        "--layers 1 --width 16 --log-every 10",
        "world 1 ranks, 8 rows a step, 12 steps in all\nstep 10/12 loss",
    ),
    "small_transformer/train.py": Guide(
        "", "--preset cpu --max-steps 1", ", 8 rows a step on 1 rank"
    ),
}
ONE_GPU, LORA, CAPTIONS, PARQUET, SMALL = GUIDES
# What is wrong, in which examples, the status, and the first line.
MISTAKES = {
    "--output file": (tuple(GUIDES), 2, "argument --output: file: File exists"),
    "--lr nan": ((LORA, CAPTIONS, PARQUET, SMALL), 2, "--lr nan is not a learning rate"),
    "--override lrr": ((LM, SMALL), 2, "--override needs --resume"),
    "ACCELERATE_MIXED_PRECISION=fp16": (
        (LM, *GUIDES), 1, "fp16 needs a GPU: accelerate would silently train in fp32",
    ),
    # On a CPU, torchrun's ranks would train side by side, each the first of one.
    "WORLD_SIZE=2": (
        (ONE_GPU, CAPTIONS, PARQUET, SMALL), 1, "the launcher started 2 ranks, but accelerate",
    ),
    "--deepspeed ds.json": ((CAPTIONS,), 1, "the launcher ignored ds.json, and would train"),
    "--is_keep_training=False": (
        (PARQUET,), 2, "argument --resume/--is_keep_training: invalid choice: False",
    ),
    "--use_large_config=yes": (
        (PARQUET,), 2, "argument --large/--use_large_config: yes is neither True nor False",
    ),
    "--override lr": ((LORA,), 2, "--override needs --resume"),
    "--resume typo/checkpoint-20": ((LORA,), 1, "there is no complete checkpoint in typo"),
}  # fmt: skip


def refused(folder: Path, script: str, asked: str) -> tuple[int, str]:
    """Run an example with plain python; return its status and the first line of its refusal."""
    is_variable = asked[0].isupper()
    environ = dict([asked.split("=")]) if is_variable else {}
    words = [*(GUIDES[script].least.split() if script in GUIDES else ()), *asked.split()]
    words = words[: -len(asked.split())] if is_variable else words
    done = train(folder, "none", 1, *words, example=EXAMPLES / script, environ=environ)
    assert "Traceback" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
    return done.returncode, line.split("error: ", 1)[1]


def wrongly_refused(folder: Path, script: str) -> list[tuple[str, int, str]]:
    (folder / "file").touch()
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    found = []
    for asked, (scripts, status, line) in MISTAKES.items():
        said = refused(folder, script, asked) if script in scripts else (status, line)
        found += [] if (said[0], said[1].startswith(line)) == (status, True) else [(asked, *said)]
    return found


@pytest.mark.long
@pytest.mark.parametrize("script", GUIDES)
def test_an_output_that_can_be_no_directory_is_refused(tmp_path: Path, script: str) -> None:
    """And so is every other mistake of the table."""
    assert wrongly_refused(tmp_path, script) == []


def test_mistakes_of_the_plain_example_are_refused(tmp_path: Path) -> None:
    assert wrongly_refused(tmp_path, LM) == []


@pytest.mark.long
def test_ranks_that_the_trainer_did_not_join_are_refused(tmp_path: Path) -> None:
    (_, *script), environ = command(tmp_path, "none", 1, example=EXAMPLES / LORA)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = finished([*torchrun, *script], timeout_s=110, cwd=tmp_path, env=environ)
    assert done.returncode == 1
    assert "error: the launcher started 2 ranks, but the Trainer did not join" in done.stderr


@pytest.mark.parametrize("package", ["peft", "pyarrow"])
def test_a_package_that_is_missing_is_named(tmp_path: Path, package: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    data = ("pretrain_parquet/make_data.py", "data")
    script, *words = data if package == "pyarrow" else (LORA, "--output", "out")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = finished([sys.executable, EXAMPLES / script, *words], cwd=tmp_path, env=environ)
    assert done.returncode == 1
    said = f"error: the package {package} is missing", f"error: parquet files need {package}"
    assert done.stderr.startswith(said)
    assert "pip install" in done.stderr


@pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=[pytest.mark.long] * (script != SMALL)) for script in GUIDES],
)
def test_a_planned_batch_is_taken(tmp_path: Path, script: str) -> None:
    if script == PARQUET:
        make = [sys.executable, str(EXAMPLES / "pretrain_parquet/make_data.py"), "data"]
        subprocess.run([*make, "--rows", "100"], cwd=tmp_path, check=True)
    guide = GUIDES[script]
    words = f"{guide.least} {guide.short}".split()
    done = train(tmp_path, "none", 1, *words, example=EXAMPLES / script, environ=PLANNED)
    assert done.returncode == 0, done.stderr
    assert guide.planned in done.stdout
