"""What a user gets wrong ends a guide in one line, before it trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.worlds import EXAMPLES, command, train
from tests.patience import patience

pytestmark = pytest.mark.torch
# Each needs its own least flags.
GUIDES = {
    "one_gpu_to_many/train.py": "",
    "finetune_lora/finetune.py": "",
    "deepspeed_offload/train_captions.py": "",
    "pretrain_parquet/pretrain.py": "--data data --output out",
    "small_transformer/train.py": "",
}


def refused(folder: Path, script: str, flags: str = "", **environ: str) -> tuple[int, str]:
    """Run a guide with plain python; return its status and the first line of its refusal."""
    words = [*GUIDES.get(script, "").split(), *flags.split()]
    done = train(folder, "none", 1, *words, example=EXAMPLES / script, environ=environ)
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
    return done.returncode, line.split("error: ", 1)[1]


@pytest.mark.long
@pytest.mark.parametrize("script", GUIDES)
def test_an_output_that_can_be_no_directory_is_refused(tmp_path: Path, script: str) -> None:
    (tmp_path / "file").touch()
    assert refused(tmp_path, script, "--output file") == (2, "argument --output: file: File exists")


@pytest.mark.long
@pytest.mark.parametrize("script", list(GUIDES)[1:])  # the first has a test of its own
def test_a_rate_that_is_none_is_refused(tmp_path: Path, script: str) -> None:
    assert refused(tmp_path, script, "--lr nan") == (2, "--lr nan is not a learning rate")


@pytest.mark.parametrize(
    "script",
    ["train_lm.py", pytest.param("small_transformer/train.py", marks=pytest.mark.long)],
)
def test_an_override_of_nothing_is_refused(tmp_path: Path, script: str) -> None:
    assert refused(tmp_path, script, "--override lrr") == (2, "--override needs --resume")


@pytest.mark.parametrize(
    "script",
    ["train_lm.py", *(pytest.param(guide, marks=pytest.mark.long) for guide in GUIDES)],
)
def test_fp16_on_a_cpu_is_refused(tmp_path: Path, script: str) -> None:
    said = refused(tmp_path, script, ACCELERATE_MIXED_PRECISION="fp16")
    assert said == (1, "fp16 needs a GPU: accelerate would silently train in fp32")


@pytest.mark.long
@pytest.mark.parametrize("script", ["train_lm.py", *list(GUIDES)[2:]])
def test_ranks_that_accelerate_did_not_join_are_refused(tmp_path: Path, script: str) -> None:
    """On a CPU, torchrun's ranks would train side by side, each the first of one."""
    said = refused(tmp_path, script, WORLD_SIZE="2")
    assert said == (1, "the launcher started 2 ranks, but accelerate did not join them")


@pytest.mark.long
def test_ranks_that_the_trainer_did_not_join_are_refused(tmp_path: Path) -> None:
    (_, *script), environ = command(
        tmp_path, "none", 1, example=EXAMPLES / "finetune_lora/finetune.py"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, *script], cwd=tmp_path, env=environ,
        capture_output=True, text=True, timeout=110 * patience(), check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: the launcher started 2 ranks, but the Trainer did not join" in done.stderr
