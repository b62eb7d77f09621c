"""Fine-tuning with LoRA: what its README shows, what is learned and written, how it goes on."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusterrun.shared import checkpoint_files
from tests import readme
from tests.examples import worlds
from tests.examples.guides import script
from tests.examples.worlds import held_out, printed

HERE = worlds.EXAMPLES / "finetune_lora"
SCRIPT = HERE / "finetune.py"
README = (HERE / "README.md").read_text()
TINY = "--hidden 16 --layers 1 --heads 2 --samples 40 --held-out 8 --batch-size 2 --log-every 1"

pytestmark = pytest.mark.torch


@dataclass(frozen=True)
class Tour:
    """What the README's commands printed, and the output directories of the two runs."""

    printed: str
    whole: Path
    cut: Path

    @property
    def held_out(self) -> tuple[float, float]:
        return held_out(self.printed)


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory) -> Tour:
    path = tmp_path_factory.mktemp("tour")
    text = readme.run(script(HERE, "local"), path)
    return Tour(text, output_of(path, "finetune-lora"), output_of(path, "cut"))


def output_of(path: Path, name: str) -> Path:
    """Return the only output directory of the runs of a name."""
    (found,) = (path / "examples/finetune_lora/runs" / name).glob("*/checkpoints")
    return found


@pytest.fixture
def finetune(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the script; leave nothing of it to other tests."""
    from accelerate.state import AcceleratorState

    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    yield importlib.import_module("finetune")
    AcceleratorState._reset_state(reset_partial_state=True)


def by_hand(folder: Path, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the script with plain python."""
    return worlds.train(folder, "none", 1, *flags, example=SCRIPT, environ=environ)


def losses(text: str) -> dict[int, str]:
    found = re.findall(r"^step (\d+)/\d+ loss (\S+ lr \S+)$", text, re.MULTILINE)
    return {int(step): rest for step, rest in found}


def adapters(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors: dict[str, Any] = load_file(folder / "final_model/adapter_model.safetensors")
    return tensors


def same(one: Path, other: Path) -> bool:
    import torch

    first, second = adapters(one), adapters(other)
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def test_every_shell_block_is_one_that_a_test_runs() -> None:
    shells = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    assert "\n".join(shells) == "\n".join(text for _, _, text in readme.BLOCK.findall(README))
    kinds = {kind for kind, _, _ in readme.BLOCK.findall(README)}
    assert kinds == {"local", "zero", "steps", "memory"}


@pytest.mark.long
def test_the_tour_learns_and_leaves_the_whole_tree(tour: Tour) -> None:
    out = tour.whole
    assert sorted(path.name for path in out.iterdir()) == [
        *("checkpoint-16", "checkpoint-32", "checkpoint-48"),
        *("final_model", "logs", "run_config.json"),
    ]
    listed = checkpoint_files.listed(out)
    assert [step for step, path in listed if checkpoint_files.read(path)] == [48, 32, 16]
    assert [path.name[:18] for path in (out / "logs").iterdir()] == ["events.out.tfevent"]
    after, before = tour.held_out
    assert before - after > 1.0
    assert "world 2 ranks, ddp, precision no (the launcher's choice)" in tour.printed
    assert "= 16 samples a step, 16 steps an epoch" in tour.printed
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "logs")).Reload()
    first, *_, last = [event.value for event in events.Scalars("eval/loss")]
    assert first - last > 1.0
    assert [event.step for event in events.Scalars("train/loss")] == [10, 20, 30, 40]


@pytest.mark.long
def test_the_record_says_how_the_run_was_made(tour: Tour) -> None:
    record = json.loads((tour.whole / "run_config.json").read_text())
    assert record["flags"]["samples"] == 256
    assert record["adapters"]["rank"] == 8
    assert record["world"] == {"ranks": 2, "strategy": "ddp", "precision": "no"}
    assert record["batch"] == {
        "micro_batch": 8, "accumulation": 1, "ranks": 2, "effective_batch": 16,
        "steps_per_epoch": 16, "steps": 48,
    }  # fmt: skip
    assert {"python", "torch", "transformers", "peft", "clusterrun"} <= record["versions"].keys()
    assert record["run"]["attempt"] == 1


@pytest.mark.long
def test_a_run_that_was_cancelled_with_a_checkpoint_ends_in_the_same_adapters(tour: Tour) -> None:
    assert json.loads((tour.cut / "run_config.json").read_text())["run"]["attempt"] == 2
    assert same(tour.whole, tour.cut)


@pytest.mark.long
def test_the_base_stays_as_it_was_and_the_adapters_make_the_difference(
    tour: Tour, finetune: Any, tmp_path: Path
) -> None:
    """The loss that was told is that of a base made anew, with what was saved beside it."""
    from peft import PeftModel
    from safetensors.torch import load_file

    names = list(load_file(tour.whole / "final_model/adapter_model.safetensors"))
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    args = finetune.parse_arguments(["--samples", "256", "--output", str(tmp_path)])
    trainer, _ = finetune.prepare(args, finetune.trainer_arguments(args, "no"), "no")
    untrained = trainer.evaluate()["eval_loss"]
    base = trainer.model.unload()
    trainer.model_wrapped = trainer.model = PeftModel.from_pretrained(
        base, str(tour.whole / "final_model")
    )
    after, before = tour.held_out
    assert untrained == pytest.approx(before, abs=0.01)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(after, abs=0.01)


@pytest.mark.long
def test_2500_samples_at_64_a_step_are_40_steps_an_epoch(tmp_path: Path) -> None:
    out = readme.run(script(HERE, "steps"), tmp_path)
    assert "batch 8 x 8 accumulation x 1 ranks = 64 samples a step, 40 steps an epoch" in out
    listed = checkpoint_files.listed(tmp_path / "examples/finetune_lora/steps")
    assert [checkpoint_files.read(path).step for _, path in listed] == [120, 80, 40]


@pytest.mark.long
def test_deepspeed_by_name_and_by_json_with_an_optimizer_of_its_own_train(tmp_path: Path) -> None:
    out = readme.run(script(HERE, "zero"), tmp_path)
    assert out.count("world 2 ranks, deepspeed zero-2, precision no") == 2
    zero, own = output_of(tmp_path, "zero"), output_of(tmp_path, "json")
    for after, before in re.findall(r"held-out loss (\S+) \(untrained (\S+)\)", out):
        assert float(after) < float(before) - 0.1
    record = json.loads((zero / "run_config.json").read_text())
    assert record["deepspeed"]["gradient_clipping"] == 1.0
    record = json.loads((own / "run_config.json").read_text())
    filled = record["deepspeed"]["optimizer"]["params"]
    assert filled == {"lr": 0.005, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    assert record["deepspeed"]["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


@pytest.mark.long
def test_half_the_batch_and_twice_the_accumulation_go_on_and_more_epochs_are_recorded(
    tmp_path: Path,
) -> None:
    out = readme.run(script(HERE, "memory"), tmp_path)
    assert "batch 8 x 8 accumulation x 1 ranks = 64 samples a step, 4 steps an epoch" in out
    assert "resuming with epochs 5 instead of 2 (override)" in out
    assert "batch 4 x 16 accumulation x 1 ranks = 64 samples a step, 4 steps an epoch" in out
    output = tmp_path / "examples/finetune_lora/output/paper_r64"
    record = json.loads((output / "run_config.json").read_text())
    assert record["overrides"] == [{"checkpoint": "checkpoint-8", "settings": {"epochs": [2, 5]}}]
    assert record["flags"]["gradient_checkpointing"] is True
    assert (output / "checkpoint-20").is_dir()


EPOCH = (*TINY.split(), "--epochs", "1")


@pytest.fixture(scope="module", name="plain")
def _plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Train for an epoch in one process; give the output directory and what was printed."""
    folder = tmp_path_factory.mktemp("plain")
    return folder / "out", printed(by_hand(folder, *EPOCH, "--output", "out"))


@pytest.mark.long
def test_gradient_checkpointing_and_a_launchers_bf16_change_memory_and_rounding(
    tmp_path: Path, plain: tuple[Path, str]
) -> None:
    directory, text = plain
    assert "world 1 ranks, one process, precision no (no GPU)" in text
    spared = by_hand(tmp_path, *EPOCH, "--output", "spared", "--gradient-checkpointing")
    assert losses(printed(spared)) == losses(text)
    assert same(directory, tmp_path / "spared")
    bf16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    rounded = printed(by_hand(tmp_path, *EPOCH, "--output", "bf16", **bf16))
    assert "precision bf16 (the launcher's choice)" in rounded
    assert losses(rounded) != losses(text)
    assert held_out(rounded)[0] == pytest.approx(held_out(text)[0], abs=0.05)


def test_other_spellings_are_the_same_flags_and_large_presets_compute_activations_again(
    finetune: Any, tmp_path: Path
) -> None:
    out = ["--output", str(tmp_path)]
    theirs = "--config paper_r64 --gradient-accumulation 4 --learning-rate 3e-5"
    ours = "--preset paper_r64 --accumulation 4 --lr 3e-5"
    parse = finetune.parse_arguments
    assert parse([*theirs.split(), *out]) == parse([*ours.split(), *out])
    assert parse([*theirs.split(), *out]).gradient_checkpointing
    assert not parse([*ours.split(), "--no-gradient-checkpointing", *out]).gradient_checkpointing
    assert not parse(out).gradient_checkpointing
    assert parse(["--resume-from-checkpoint", str(tmp_path / "checkpoint-80")]).output == tmp_path


def test_what_can_not_be_asked_for_is_refused(
    finetune: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for flags, problem in {
        "--override seed": "can't change seed, only epochs, lr, warmup",
        "--override lr": "--override needs --resume",
        "--dropout 1": "--dropout 1.0 is not a probability below 1",
    }.items():
        with pytest.raises(SystemExit):
            finetune.parse_arguments([*flags.split(), "--output", str(tmp_path)])
        assert problem in capsys.readouterr().err


def record(**changes: Any) -> dict[str, Any]:
    """Return the record of a run, with other flags, batch or world."""
    world = {"ranks": 1, "strategy": "one process", "precision": "no"}
    effective = changes.pop("effective_batch", 64)
    return {
        "world": world | changes.pop("world", {}),
        "flags": {"batch_size": 8, "accumulation": 8, "lr": 1e-4} | changes,
        "adapters": {"rank": 64},
        "data": {"sha256": "x"},
        "batch": {"effective_batch": effective},
    }


def test_the_same_effective_batch_and_whole_checkpoints_are_the_same_training(
    finetune: Any,
) -> None:
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"batch_size": 4, "accumulation": 16}, []),
        ({"gradient_checkpointing": True}, []),
        ({"batch_size": 4, "effective_batch": 32}, ["effective_batch"]),
        ({"lr": 3e-5}, ["lr"]),
        ({"world": {"ranks": 4, "strategy": "ddp"}}, []),
        ({"world": {"precision": "bf16"}}, ["precision"]),
        ({"world": {"ranks": 2, "strategy": "fsdp"}}, ["checkpoints"]),
    ]
    for now, differing in cases:
        assert list(finetune.run_config.differences(record(), record(**now))) == differing


def test_a_record_without_overrides_can_be_resumed(finetune: Any, tmp_path: Path) -> None:
    now = record(world={"ranks": 4, "strategy": "ddp"}) | {"overrides": []}
    (tmp_path / "run_config.json").write_text(json.dumps(record()))
    args = finetune.parse_arguments(["--output", str(tmp_path), "--resume"])
    assert finetune.allowed_changes(args, now, "checkpoint-8") == {}
    assert now["overrides"] == []


def test_loader_processes_are_for_gpus_and_share_the_cpus(
    finetune: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert finetune.loader_workers() == 0
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)))
    assert finetune.loader_workers() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert finetune.loader_workers() == 3


def test_a_deepspeed_config_that_wants_bf16_on_a_cpu_is_refused_with_the_change(
    finetune: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    args = finetune.parse_arguments(["--output", str(tmp_path)])
    with pytest.raises(SystemExit, match=r'hint: without a GPU, write "bf16": {"enabled": "auto"}'):
        finetune.trainer_arguments(args, "bf16")


def test_the_presets_are_those_of_the_readme_whose_batches_make_64(finetune: Any) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| ([\d.]+) \|", README, re.MULTILINE)
    told = [(name, int(rank), int(alpha), float(dropout)) for name, rank, alpha, dropout in rows]
    assert told == [(n, p.rank, p.alpha, p.dropout) for n, p in finetune.PRESETS.items()]
    rows = re.findall(r"^\| .* GB .*\| (\d+) to (\d+) \| (\d+) to (\d+) \|$", README, re.MULTILINE)
    assert len(rows) == 3
    batches = {int(row[n]) * int(row[n + 2]) for row in rows for n in (0, 1)}
    assert batches == {64}


def test_without_a_launcher_the_architecture_decides_the_precision(
    finetune: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    for (major, minor), expected in {(7, 0): "fp16", (8, 0): "bf16", (9, 0): "bf16"}.items():
        capability = (major, minor)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda c=capability: c)
        said = (expected, f"a GPU, compute capability {major}.{minor}")
        assert finetune.chosen_precision() == said


def test_what_the_configuration_tells_of_the_training_is_what_is_trained(finetune: Any) -> None:
    from transformers import ByT5Tokenizer

    config = yaml.safe_load((HERE / "clusterrun.yaml").read_text())
    args = finetune.parse_arguments(config["args"])
    tokenizer = ByT5Tokenizer(extra_ids=0)
    model = finetune.base_model(
        tokenizer, hidden=args.hidden, layers=args.layers, heads=args.heads, seed=args.seed
    )
    assert config["training"] == {
        "params": model.num_parameters(), "hidden": args.hidden, "layers": args.layers,
        "heads": args.heads, "kv_heads": model.config.num_key_value_heads,
        "ffn": model.config.intermediate_size, "vocab": model.config.vocab_size,
        "samples": args.samples, "seq_len": args.max_length, "micro_batch": args.batch_size,
        "accumulation": args.accumulation, "epochs": args.epochs, "optimizer": "adamw",
        "lora": finetune.PRESETS[args.preset].rank, "lr": args.lr,
        "save_every": -(-args.samples // args.batch_size), "keep": args.keep,
    }  # fmt: skip
