"""One script, from one process to two nodes: the same samples, fewer steps, a rate that follows."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.config.choices import Optimizer
from clusterrun.config.load import load_spec
from clusterrun.estimates import steps
from tests.estimates.test_steps import counted
from tests.examples.guides import commands, load
from tests.examples.worlds import EXAMPLES, asked_to_leave, train
from tests.readme import run

pytestmark = pytest.mark.torch  # its parts import torch

HERE = EXAMPLES / "one_gpu_to_many"
scaling = load(HERE / "scaling.py")
world = load(HERE / "world.py")
EPOCH = re.compile(
    r"epoch 1/1 steps (\d+) loss (\S+) held-out (\S+); each of (\d+) samples seen, (\d+) repeated"
)


def test_the_guides_table_of_steps() -> None:
    for ranks, full, ran in ((1, 7375, 7375), (2, 3687, 3688), (4, 1843, 1844), (8, 921, 922)):
        stage = scaling.Stage(samples=29_500, batch=4, ranks=ranks)
        assert (stage.full_steps, stage.steps) == (full, ran)


@given(st.integers(1, 10_000), st.integers(1, 64), st.integers(1, 64), st.integers(1, 16))
def test_steps_and_repeats_are_those_of_the_plan(
    samples: int, batch: int, ranks: int, passes: int
) -> None:
    stage = scaling.Stage(samples=samples, batch=batch, ranks=ranks, accumulation=passes)
    assert stage.effective_batch == batch * passes * ranks
    assert stage.full_steps == samples // stage.effective_batch
    found = counted(samples, batch, passes, ranks)
    assert (stage.steps, stage.repeated) == (found.accelerate_per_epoch, found.repeated)


@given(st.integers(1, 400), st.integers(1, 8), st.integers(1, 8), st.integers(1, 4))
def test_a_step_has_the_same_samples_however_they_are_divided(
    samples: int, batch: int, ranks: int, passes: int
) -> None:
    stage = scaling.Stage(samples=samples, batch=batch, ranks=ranks, accumulation=passes)
    whole = scaling.Stage(samples=samples, batch=stage.effective_batch, ranks=1)
    assert stage.steps == whole.steps
    for step in range(stage.steps):
        batches = range(step * passes, (step + 1) * passes)
        new = [stage.new_in_batch(index, rank) for index in batches for rank in range(ranks)]
        assert sum(new) == whole.new_in_batch(step, 0) == stage.new_in_step(step) > 0


def test_rates_are_those_of_the_guide_and_of_the_plan() -> None:
    plan = steps.scaled(1.25e-6, 4, 16, optimizer=Optimizer.SGD)
    assert scaling.scaled_rate(1.25e-6, 4, 16, "linear") == plan.linear == pytest.approx(5.0e-6)
    assert scaling.scaled_rate(1.25e-6, 4, 16, "sqrt") == plan.sqrt == pytest.approx(2.5e-6)
    assert scaling.scaled_rate(1.25e-6, 4, 16, "none") == 1.25e-6
    seen = [scaling.rate_at(step, base=1.0, peak=5.0, warmup=4) for step in range(7)]
    assert seen == [1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0], "it rises to its peak and stays"
    for text in ("0", "-1", "nan", "inf"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text} is not a learning rate"):
            scaling.rate(text)


def test_ranks_that_disagree_are_told_apart() -> None:
    facts = [{"the data": "aa", "batch": 4}, {"the data": "aa", "batch": 4}]
    assert world.disagreement(facts) == ""
    other = [*facts, {"the data": "bb", "batch": 4}]
    assert world.disagreement(other) == "the data is aa on rank 0 and bb on rank 2"


def test_the_configuration_says_what_the_script_does() -> None:
    resolved = load_spec({}, environ={}, cwd=HERE)
    assert resolved.notes == ()
    assert (resolved.spec.samples, resolved.spec.micro_batch, resolved.spec.lr) == (29_500, 4, 1e-3)


@pytest.mark.long
def test_the_readme_takes_the_path_from_one_process_to_two_nodes(tmp_path: Path) -> None:
    stages, _, *tables = commands(HERE, "local")
    out = run("\n".join((stages, *tables)), tmp_path)
    epochs = EPOCH.findall(out)
    assert [int(count) for count, *_ in epochs] == [738, 369, 185, 93]
    assert [(int(samples), int(again)) for *_, samples, again in epochs] == [
        (2950, 0), (2950, 2), (2950, 10), (2950, 26),
    ]  # fmt: skip
    learned = [float(held_out) for _, _, held_out, _, _ in epochs]
    assert max(learned) < 1.15 * min(learned) < 0.15  # untrained: 1.6; the rates were scaled
    assert "world 8 ranks on 2 host(s), agreed on data and flags" in out
    assert "1.00e-03 at batch 4 -> 8.00e-03 at batch 32 (linear), 9 steps of warm-up" in out
    text = (HERE / "README.md").read_text()
    assert text.split("```\nranks")[1].split("```")[0] in out
    for line in text.split("```\nrank ")[1].split("```")[0].splitlines():
        assert line.partition(" loss ")[0] in out


def test_the_commands_for_a_cluster_ask_for_the_four_stages(tmp_path: Path) -> None:
    blocks = "".join(commands(HERE, "slurm"))
    rendered = run(
        "cd examples/one_gpu_to_many\n" + blocks.replace("submit", "render --cluster slurm"),
        tmp_path,
    )
    asked = re.findall(r"#SBATCH --nodes=(\d)\n(?:.*\n)*?#SBATCH --gpus-per-node=(\d)", rendered)
    assert asked == [("1", "1"), ("1", "2"), ("1", "4"), ("2", "4"), ("1", "2"), ("2", "4")]


@pytest.mark.long
def test_the_readme_takes_two_of_the_stages_by_an_accelerate_yaml(tmp_path: Path) -> None:
    _, with_yaml, *_ = commands(HERE, "local")
    out = run(f"cd examples/one_gpu_to_many\n{with_yaml}", tmp_path)
    assert [int(count) for count, *_ in EPOCH.findall(out)] == [369, 93]
    assert "world 2 ranks on 1 host(s), agreed on data and flags" in out
    assert "world 8 ranks on 2 host(s), agreed on data and flags" in out


@pytest.mark.long
def test_a_resume_that_keeps_the_batch_of_a_step_has_the_same_losses(tmp_path: Path) -> None:
    """590 samples in steps of 16: the last has 14, and two ranks repeat two of them or none."""
    same = ("--samples", "590", "--epochs", "2", "--output", "out")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    asked = asked_to_leave(cut, 20)
    words = (*same, "--batch", "8")
    left = train(cut, "ddp", 2, *words, example=HERE / "train.py", environ=asked)
    assert left.stdout.endswith("stopped in epoch 1 after 20 of its steps\n"), left.stderr
    again = (*same, "--batch", "4", "--accumulation", "4")
    resumed = train(cut, "none", 1, *again, example=HERE / "train.py")
    assert "resumed in epoch 1 after 20 of its steps" in resumed.stdout, resumed.stderr
    expected = train(whole, "ddp", 2, *words, example=HERE / "train.py")
    assert "batch 4 x 4 accumulation x 1 ranks = 16: 36 full steps" in resumed.stdout
    lines = [re.findall(r"epoch \d/2 steps.*seen", run.stdout) for run in (resumed, expected)]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 2
    other = train(cut, "none", 1, *same, "--batch", "4", example=HERE / "train.py")
    assert other.returncode == 1
    assert "effective_batch was 16 and is 4" in other.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "environ", "why"),
    [
        ("", {"WORLD_SIZE": "2"}, "the launcher started 2 ranks, but accelerate did not join"),
        ("--lr 1e9", {}, "the loss of epoch 1 is nan: it has diverged"),
    ],
)
def test_neither_a_world_apart_nor_a_loss_that_is_no_number_is_success(
    tmp_path: Path, flags: str, environ: dict[str, str], why: str
) -> None:
    words = ("--samples", "400", *flags.split())
    done = train(tmp_path, "none", 1, *words, example=HERE / "train.py", environ=environ)
    assert done.returncode == 1
    assert f"error: {why}" in done.stderr
