"""A Transformer that fits itself to its device, goes on exactly, and leaves curves."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType

import pytest

from clusterrun.config.load import load_spec
from clusterrun.estimates.steps import advice
from tests.examples.guides import load, script
from tests.examples.worlds import EXAMPLES, IN_A_RUN, asked_to_leave, train
from tests.patience import patience
from tests.readme import run
from tests.road import Project, project

pytestmark = pytest.mark.torch  # its parts import torch

HERE = EXAMPLES / "small_transformer"
presets = load(HERE / "presets.py")
sorting = load(HERE / "sorting.py")
STEP = re.compile(r"^step (\d+)/\d+ loss (\S+) lr (\S+) samples/s \d+$", re.MULTILINE)
ALONE = ("--preset", "cpu", "--max-steps", "12", "--log-every", "1", "--warmup", "3")
BF16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}


def test_a_preset_has_the_precision_of_its_device_and_the_loader_of_plan() -> None:
    for name, ours in presets.PRESETS.items():
        assert ours.precision == ("no" if name == "cpu" else "auto")
        loader = advice(8, 64 << 30, is_cpu=name == "cpu")
        assert (ours.num_workers, ours.pin_memory) == (loader.num_workers, loader.pin_memory)


def test_the_presets_of_gpus_are_those_of_the_guide_and_have_32_rows_a_step() -> None:
    sizes = {name: (p.micro_batch, p.width, p.layers) for name, p in presets.PRESETS.items()}
    assert sizes.pop("cpu")
    assert sizes == {"small-gpu": (8, 128, 2), "gpu": (16, 256, 3), "large-gpu": (32, 512, 6)}
    assert {each.micro_batch * each.accumulation for each in presets.PRESETS.values()} == {32}


def test_a_device_gets_the_preset_of_its_memory() -> None:
    names = {0: "cpu", 6: "small-gpu", 8: "small-gpu", 10: "gpu", 20: "gpu", 24: "large-gpu"}
    assert {gib: presets.preset_for(gib << 30) for gib in names} == names


def test_the_configuration_says_what_the_preset_is() -> None:
    resolved = load_spec({}, environ={}, cwd=HERE)
    preset, spec = presets.PRESETS["gpu"], resolved.spec
    model = sorting.Sorter(
        length=10, width=preset.width, layers=preset.layers, heads=preset.heads, grad_ckpt=True
    )
    assert resolved.notes == ()
    assert spec.params == sum(parameter.numel() for parameter in model.parameters())
    assert (spec.hidden, spec.layers, spec.heads) == (preset.width, preset.layers, preset.heads)
    assert (spec.micro_batch, spec.accumulation) == (preset.micro_batch, preset.accumulation)
    assert spec.grad_ckpt == preset.grad_ckpt


def test_the_readme_says_what_the_presets_are() -> None:
    text = (HERE / "README.md").read_text()
    ours = presets.PRESETS.values()
    for name, cells in {
        "model": [f"{each.layers} layers of {each.width}" for each in ours],
        "rows of a pass × passes to a step": [f"{e.micro_batch} × {e.accumulation}" for e in ours],
    }.items():
        (row,) = re.findall(rf"^\| {name} \|(.*)\|$", text, re.MULTILINE)
        assert [cell.strip() for cell in row.split("|")] == cells


@pytest.fixture(name="here")
def _here(tmp_path: Path) -> Project:
    copied = project(tmp_path / "examples", tmp_path / "state")
    return replace(copied, path=copied.path / HERE.name)


def alone(
    here: Project, *argv: str, environ: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Run the script in one process, without clusterrun's command."""
    environ = {"HOME": str(here.path), **environ}
    return train(here.path, "none", 1, *argv, example=here.path / "train.py", environ=environ)


@dataclass(frozen=True)
class Whole:
    """A training of one process that nobody cut, and what it left."""

    here: Project
    printed: str

    def copy(self, here: Project) -> None:
        shutil.copytree(self.here.path / "saved", here.path / "saved")


@pytest.fixture(scope="module", name="whole")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    copied = project(folder / "examples", folder / "state")
    here = replace(copied, path=copied.path / HERE.name)
    done = alone(here, *ALONE, "--output", "saved", "--save-every", "5", "--tensorboard", "curves")
    assert done.returncode == 0, done.stderr
    return Whole(here, done.stdout)


def steps(text: str) -> dict[int, tuple[str, str]]:
    return {int(step): (loss, rate) for step, loss, rate in STEP.findall(text)}


@pytest.mark.long
def test_the_readme_sorts_stops_goes_on_and_tracks(tmp_path: Path) -> None:
    out = run(script(HERE, "local"), tmp_path)
    example = tmp_path / "examples" / "small_transformer"
    assert "preset cpu: 102026 parameters, 64 rows a step on 2 rank(s), precision no, cpu" in out
    sorted_share = re.search(r"step 250/250 [^\0]*?held-out rows sorted (\S+)", out)
    assert sorted_share
    assert float(sorted_share[1]) > 0.9
    assert list(example.glob("curves/small-transformer/events.out.tfevents.*"))
    assert re.search(r"saved \S+/checkpoints/step-00000250", out)
    assert re.search(r"^metrics    loss \S+, lr \S+, samples_per_s \S+$", out, re.MULTILINE)
    assert list(example.glob("wandb/offline-run-*/run-*.wandb"))


@pytest.mark.long
def test_a_training_goes_on_to_the_same_losses_however_its_batch_is_divided(
    here: Project, whole: Whole
) -> None:
    whole.copy(here)
    (here.path / "saved/step-00000012/.complete").unlink()
    shutil.copytree(here.path / "saved", here.path / "ranks")
    resumed = alone(here, *ALONE, "--output", "saved", "--resume", "--log-every", "4")
    assert "step-00000010 at step 10" in resumed.stdout, resumed.stderr
    assert "no supported trackers" not in resumed.stderr  # none was asked for
    assert list(steps(resumed.stdout)) == [12]  # it was cut between two lines
    assert steps(resumed.stdout).items() <= steps(whole.printed).items()
    (here.path / "saved/step-00000012/.complete").unlink()
    newest = ("--resume", "saved/step-00000010")
    # 32 passes to a step do not divide the 80 that accelerate had counted
    small = alone(here, *ALONE, *newest, "--batch-size", "1", "--gradient-checkpointing")
    assert "32 rows a step" in small.stdout, small.stderr
    assert list(steps(small.stdout)) == [11, 12]
    assert steps(small.stdout).items() <= steps(whole.printed).items()
    ranks = (*ALONE, "--batch-size", "4", "--accumulation", "4", "--output", "ranks", "--resume")
    two = train(here.path, "ddp", 2, *ranks, example=HERE / "train.py")
    assert "32 rows a step on 2 rank(s)" in two.stdout, two.stderr
    assert steps(two.stdout) == steps(small.stdout)


def test_ctrl_c_saves_says_how_to_go_on_and_ends_with_130(here: Project) -> None:
    words = ("--preset", "cpu", "--max-steps", "100000", "--log-every", "1")
    with subprocess.Popen(
        [sys.executable, "train.py", *words], cwd=here.path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as training:  # fmt: skip
        assert training.stdout
        assert any(line.startswith("step 1/") for line in training.stdout)
        training.send_signal(signal.SIGINT)
        out, err = training.communicate(timeout=60 * patience())
    assert training.returncode == 130, err
    stopped = re.search(r"^stopped at step (\d+)$", out, re.MULTILINE)
    assert stopped
    assert "interrupted: continue from there with the same command and --resume\n" in err
    assert "Traceback" not in err
    assert (here.path / f"out/step-{int(stopped[1]):08d}/.complete").exists()


@pytest.mark.long
def test_the_ladder_out_of_memory_trains_on_each_rung(tmp_path: Path) -> None:
    out = run(script(HERE, "ladder"), tmp_path)
    assert re.findall(r"^preset (\S+): (\d+) parameters, 32 rows", out, re.MULTILINE) == [
        ("gpu", "2377482"), ("gpu", "2377482"), ("gpu", "598922"), ("gpu", "400650"),
        ("cpu", "102026"),
    ]  # fmt: skip
    assert "step-00000032 at step 32\n" in out
    assert len(re.findall(r"^step 32/32 ", out, re.MULTILINE)) == 4
    assert "step 64/64 " in out


@pytest.fixture(name="script")
def _script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.chdir(tmp_path)
    return load(HERE / "train.py")


def test_flags_go_before_the_preset_and_a_step_keeps_its_rows(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(words: str) -> tuple[int, int, int, int, bool]:
        found = script.chosen(script.parse_arguments(["--preset", "gpu", *words.split()]))
        batch = (found.micro_batch, found.accumulation, found.grad_ckpt)
        return (found.width, found.layers, *batch)

    expected = {
        "": (256, 3, 16, 2, False),
        "--batch-size 8": (256, 3, 8, 4, False),
        "--batch-size 16 --hidden-dim 256 --n-layers 3": (256, 3, 16, 2, False),
        "--batch-size 8 --hidden-dim 128 --n-layers 2": (128, 2, 8, 4, False),
        "--batch-size 64": (256, 3, 64, 1, False),
        "--batch-size 8 --gradient-accumulation 1": (256, 3, 8, 1, False),
        "--gradient-checkpointing": (256, 3, 16, 2, True),
    }
    assert {words: chosen(words) for words in expected} == expected
    for name, value in {"MICRO_BATCH": "4", "ACCUMULATION": "2", "GRAD_CKPT": "1"}.items():
        monkeypatch.setenv(f"CLUSTERRUN_{name}", value)  # as `submit --plan` does
    planned_batch = chosen("--batch-size 2 --no-gradient-checkpointing")
    assert planned_batch == (256, 3, 2, 4, False)


@pytest.mark.long
def test_two_ranks_stop_when_asked_and_go_on_to_the_same_losses(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    asked = asked_to_leave(cut, 7)  # of 12
    options = (*ALONE, "--output", "saved")
    curves = (*options, "--tensorboard", "curves")
    left = train(cut, "ddp", 2, *curves, example=HERE / "train.py", environ=asked)
    assert left.stdout.endswith("stopped at step 7\n"), left.stderr
    run_id = Path(IN_A_RUN["CLUSTERRUN_RUN_DIR"]).name
    assert list((cut / "curves" / run_id / "small-transformer").glob("events.out.tfevents.*"))
    resumed = train(cut, "ddp", 2, *options, "--resume", example=HERE / "train.py")
    expected = train(whole, "ddp", 2, *options, example=HERE / "train.py")
    assert steps(left.stdout) | steps(resumed.stdout) == steps(expected.stdout)
    assert sorted(steps(resumed.stdout)) == [8, 9, 10, 11, 12]  # each once: rank 0 alone speaks


@pytest.mark.long
@pytest.mark.parametrize("preset", ["small-gpu", "gpu", "large-gpu"])
def test_a_gpus_preset_trains_on_a_cpu_in_the_launchers_precision(
    here: Project, preset: str
) -> None:
    words = ("--preset", preset, "--max-steps", "1")
    done = alone(here, *words, environ=BF16)
    assert re.search(rf"preset {preset}: \d+ parameters.* precision bf16, cpu", done.stdout)
    assert list(steps(done.stdout)) == [1]


@pytest.mark.long
def test_mixed_precision_can_be_switched_off(here: Project) -> None:
    done = alone(here, "--max-steps", "1", "--no-mixed-precision", environ=BF16)
    assert "precision no, cpu" in done.stdout


@pytest.mark.long
def test_wandb_without_a_key_says_how_to_hand_it_on(here: Project) -> None:
    done = alone(here, *ALONE, "--wandb")
    assert done.returncode == 1
    assert "error: W&B did not start: " in done.stderr
    assert "--pass-env WANDB_API_KEY" in done.stderr
    assert "Traceback" not in done.stderr
