"""Hugging Face's Trainer with the callback: asked to save, told to leave, and found again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusterrun.errors import ClusterrunError
from clusterrun.shared import checkpoint_files
from clusterrun.shared.control_page import ControlPage, SavePoint
from tests.rank import parent
from tests.rank.parent import TRAINER

pytestmark = pytest.mark.torch

TRAIN = """
import gc
import os
import sys
import torch
from transformers import Trainer, TrainingArguments
from clusterrun import runtime
from clusterrun.hf import CheckpointCallback, resume_path

DROPOUT = float(os.environ.get("DROPOUT", "0.2"))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, labels):
        out = torch.nn.functional.dropout(self.layer(x), DROPOUT, self.training).squeeze(1)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}

data = [{"x": torch.full((4,), n / 40), "labels": torch.tensor(n / 20)} for n in range(40)]
args = TrainingArguments(
    "out", max_steps=9, per_device_train_batch_size=int(os.environ.get("BATCH", "2")),
    save_strategy=sys.argv[1], save_steps=6,
    use_cpu=True, ddp_backend="gloo", report_to=[], logging_strategy="no", disable_tqdm=True,
)
trainer = Trainer(Model(), args, train_dataset=data, callbacks=[CheckpointCallback()])
trainer.train(resume_from_checkpoint=resume_path("out"))
print("step", trainer.state.global_step, "stopped", runtime.should_stop())
# A gloo process whose model outlives its group may abort at its very end (torch 2.13).
accelerator = trainer.accelerator
del trainer
accelerator.free_memory()
gc.collect()
accelerator.wait_for_everyone()
accelerator.end_training()
"""


def train(folder: Path, strategy: str, *, ranks: int = 2, **environ: str) -> tuple[list[str], str]:
    """Train in a directory of their own; return what ranks printed last, and 0's stderr."""
    told = parent.ranks(["-c", TRAIN, strategy], [folder] * ranks, modules=TRAINER, **environ)
    return [out.splitlines()[-1] for out, _ in told], told[0][1]


@pytest.mark.parametrize(
    ("strategy", "saved"),
    [("steps", [9, 6, 4]), pytest.param("epoch", [9, 4], marks=pytest.mark.long)],
)
def test_a_trainer_that_is_asked_leaves_and_its_next_attempt_ends_in_the_same_weights(
    tmp_path: Path, strategy: str, saved: list[int]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(whole, strategy)[0] == ["step 9 stopped False"] * 2
    cut.mkdir()
    page = ControlPage(cut / "control", 2)
    page.hold(1)
    page.decide(SavePoint(1, 4))
    assert train(cut, strategy, CLUSTERRUN_SPOOL=str(cut))[0] == ["step 4 stopped True"] * 2
    assert [page.has_stopped(rank) for rank in range(2)] == [True, True]
    told = [json.loads(line) for line in (cut / "rank_0.events").read_text().splitlines()]
    told = [(event["type"], event["step"]) for event in told if "step" in event]
    assert told == [("resumed", 0), ("checkpoint", 4)]
    # a later save that was cut short: nothing marks it
    (cut / "out" / "checkpoint-5").mkdir()
    found, notes = checkpoint_files.newest(cut / "out")
    assert found is not None
    assert (found.path.name, found.step, found.world_size) == ("checkpoint-4", 4, 2)
    assert found.settings == {"effective_batch": 4}
    assert [note.split(":")[0] for note in notes] == [
        "checkpoint checkpoint-5 is incomplete and was skipped"
    ]
    assert train(cut, strategy)[0] == ["step 9 stopped False"] * 2
    marked = [
        n for n, path in checkpoint_files.listed(cut / "out") if (path / ".complete").exists()
    ]
    assert marked == saved
    weights = [folder / "out" / "checkpoint-9" / "model.safetensors" for folder in (whole, cut)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.long
def test_a_trainer_with_the_same_effective_batch_goes_on_with_the_same_samples(
    tmp_path: Path,
) -> None:
    import torch
    from safetensors.torch import load_file

    train(tmp_path, "steps", ranks=1, BATCH="4", DROPOUT="0")
    last = tmp_path / "out/checkpoint-9"
    expected = load_file(last / "model.safetensors")
    shutil.rmtree(last)
    said, notes = train(tmp_path, "steps", ranks=2, DROPOUT="0", BATCH="2")
    assert said == ["step 9 stopped False"] * 2
    assert "clusterrun: " not in notes
    found = load_file(last / "model.safetensors")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_a_trainer_of_another_training_is_refused_unless_it_is_overridden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from clusterrun.hf import CheckpointCallback

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    state = SimpleNamespace(global_step=6, train_batch_size=2)
    (tmp_path / "checkpoint-6").mkdir()
    CheckpointCallback().on_save(arguments(tmp_path), state, SimpleNamespace())
    args = arguments(tmp_path, train_batch_size=1, gradient_accumulation_steps=2)
    loader = SimpleNamespace(batch_sampler=SimpleNamespace(batch_size=1))
    CheckpointCallback().on_train_begin(args, state, None, train_dataloader=loader)
    loader.batch_sampler.batch_size = 2  # as transformers 4 does
    with pytest.raises(ClusterrunError, match="the checkpoint's batch size, 2, not 1"):
        CheckpointCallback().on_train_begin(args, state, None, train_dataloader=loader)
    args.train_batch_size = 2
    with pytest.raises(ClusterrunError, match=r"effective_batch was 2 and is 4 .*override="):
        CheckpointCallback().on_train_begin(args, state, None)
    callback = CheckpointCallback(override=["effective_batch"])
    callback.on_train_begin(args, state, None)
    said = "clusterrun: resuming with effective_batch 4 instead of 2 (override)\n"
    assert capsys.readouterr().err == said
    (tmp_path / "checkpoint-7").mkdir()
    callback.on_save(args, SimpleNamespace(global_step=7), SimpleNamespace())
    found, _ = checkpoint_files.newest(tmp_path)
    assert found is not None
    assert found.overrides == ({"step": 6, "settings": {"effective_batch": [2, 4]}},)
    args.save_only_model = True
    with pytest.raises(ClusterrunError, match=r"saves no optimizer state, .*turn it off, or"):
        CheckpointCallback().on_train_begin(args, SimpleNamespace(global_step=0), None)


def test_a_limit_that_may_cost_the_last_complete_checkpoint_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from clusterrun.hf import CheckpointCallback

    told = {(None, "loss"): 0, (1, None): 1, (2, None): 0, (2, "loss"): 1, (3, "loss"): 0}
    for limit, best in told:
        args = arguments(tmp_path, save_total_limit=limit, metric_for_best_model=best)
        CheckpointCallback().on_train_begin(args, SimpleNamespace(global_step=0), None)
        said = f"clusterrun: save_total_limit={limit}: " in capsys.readouterr().err
        assert said is bool(told[limit, best])


def arguments(folder: Path, **changed: object) -> SimpleNamespace:
    values: dict[str, object] = {
        "output_dir": str(folder),
        "train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "auto_find_batch_size": False,
        "save_only_model": False,
        "save_total_limit": None,
        "metric_for_best_model": None,
    }
    return SimpleNamespace(**{**values, **changed})


def test_an_attempt_that_was_superseded_marks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clusterrun.hf import CheckpointCallback

    for name in ("WORLD_SIZE", "RANK", "CLUSTERRUN_SPOOL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLUSTERRUN_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("CLUSTERRUN_ATTEMPT", "1")
    args = arguments(tmp_path)
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / "attempts" / str(step)).mkdir(parents=True)
        CheckpointCallback().on_save(args, SimpleNamespace(global_step=step), SimpleNamespace())
    assert [path.parent.name for path in tmp_path.glob("*/.complete")] == ["checkpoint-1"]


@pytest.mark.parametrize(("given", "batch"), [(None, 64), ({"tp_size": 2, "cp_size": 2}, 16)])
def test_ranks_that_share_samples_count_once_in_the_effective_batch(
    given: dict[str, int] | None, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import ParallelismConfig
    from accelerate.state import AcceleratorState

    from clusterrun.rank.trainers import batch_settings

    sizes = ParallelismConfig(**given) if given else None
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", sizes)
    args = SimpleNamespace(train_batch_size=4, gradient_accumulation_steps=2)
    assert batch_settings(args, 8) == {"effective_batch": batch}
