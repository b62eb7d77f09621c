"""A Trainer continues from what its run has saved, and nothing else; transformers is a stub."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from clusterrun.rank import trainers
from clusterrun.shared import checkpoint_files

Train = Callable[..., list[Any]]
NAME = "transformers.trainer"
FILES = ("model.safetensors", "rng_state.pth", "trainer_state.json")
ARGS = {"save_only_model": False, "train_batch_size": 2, "gradient_accumulation_steps": 1}


class Trainer:
    """Saves as transformers' does, and returns what it resumed from: a step or an argument."""

    callback_handler: Any
    args: Any

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, saves: Any = ()) -> Any:
        (callback,), step = self.callback_handler.callbacks, str(resume_from_checkpoint)[-1:]
        began = int(step) if step.isdigit() else 0
        state = SimpleNamespace(global_step=began, max_steps=9, is_hyper_param_search=bool(trial))
        callback.on_train_begin(self.args, state, None)
        for state.global_step in saves:
            path = Path(self.args.output_dir, f"checkpoint-{state.global_step}")
            path.mkdir(parents=True, exist_ok=True)
            for name in FILES:
                (path / name).write_text(f"{name} {state.global_step}")
            callback.on_save(self.args, state, None)
        return began or resume_from_checkpoint


@pytest.fixture(name="train")
def _train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setenv("CLUSTERRUN_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("CLUSTERRUN_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def train(attempt: int, *calls: dict[str, Any], switch: str = "1", **args: Any) -> list[Any]:
        monkeypatch.setenv("CLUSTERRUN_ATTEMPT", str(attempt))
        monkeypatch.setenv("CLUSTERRUN_TRAINER_RESUME", switch)
        monkeypatch.setattr(trainers, "_settings_by_folder", {})
        module: Any = ModuleType(NAME)
        module.Trainer = type("Trainer", (Trainer,), {"train": Trainer.train})
        module.TrainerCallback, module.DEFAULT_CALLBACKS = object, []
        monkeypatch.setitem(sys.modules, NAME, module)
        trainers.PATCHES[NAME](module)
        trainer = module.Trainer()
        trainer.callback_handler = SimpleNamespace(callbacks=module.DEFAULT_CALLBACKS)
        args = {"output_dir": tmp_path / "out", "max_steps": -1, **ARGS, **args}
        trainer.args = SimpleNamespace(**args)
        return [trainer.train(**call) for call in calls or ({},)]

    return train


def test_the_next_attempt_continues_from_the_newest_checkpoint_of_its_run(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "checkpoint-8"
    shutil.copytree(tmp_path, path.with_name("checkpoint-9"))  # not this run's
    assert train(1, {"saves": (4, 8)}) == [None]
    train(2, {"saves": (9,)}, save_only_model=True)  # no run can continue from it
    assert train(3, output_dir="other") == [None]
    assert train(3) == [8]
    said = f"clusterrun: the Trainer continues from {path} (to start over: "
    said += "--set launch.trainer_resume=false)\n"
    elsewhere = f"it saves to {Path('other').absolute()}, but this run saved {path}"
    anew = f"clusterrun: the Trainer starts over: {elsewhere}\n"
    assert capsys.readouterr().err == said + anew + said
    found, notes = checkpoint_files.newest(tmp_path / "checkpoints")
    assert found is not None
    assert (found.path, found.settings, notes) == (path, {"effective_batch": 2}, [])
    assert sorted(each.name for each in path.iterdir()) == list(FILES)  # nothing of ours


def test_an_argument_of_the_script_a_search_and_the_switch_win(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(1, {"saves": (4,)}, switch="0")
    train(1, {}, {"saves": (4,), "trial": {"lr": 1}})
    assert not (tmp_path / "checkpoints").exists()
    train(2, {"saves": (4,)})
    assert [train(3, {"trial": {"lr": 1}}), train(3, switch="0"), train(3)] == [[None], [None], [4]]
    for given, began in (("out/checkpoint-5", 5), (True, True), (False, False)):
        capsys.readouterr()
        assert train(4, {"resume_from_checkpoint": given}) == [began]
        assert f"Trainer begins: resume_from_checkpoint={given}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (FILES[0], "model.safetensors has 4 bytes instead of 19"),
        (FILES[2], "trainer_state.json is damaged: its checksum differs"),
        ("", "model.safetensors is missing"),  # save_total_limit
    ],
)
def test_a_checkpoint_that_has_changed_or_is_gone_is_skipped(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, problem: str
) -> None:
    train(1, {"saves": (4, 8)})
    for step, began in ((8, 4), (4, None)):
        path, text = tmp_path / f"out/checkpoint-{step}", "mode" if name == FILES[0] else "x" * 20
        (path / name).write_text(text) if name else shutil.rmtree(path)
        assert train(2) == [began]
        said = f"checkpoint checkpoint-{step} is incomplete and was skipped: {problem}"
        assert said in capsys.readouterr().err


def test_a_checkpoint_that_another_rank_did_not_finish_is_not_used(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(1, {"saves": (4,)})
    monkeypatch.setenv("LOCAL_RANK", "1")
    found: Any = SimpleNamespace(world_size=2)
    (tmp_path / "out/checkpoint-4/rng_state_1.pth").write_bytes(b"PK")
    problem = trainers._problem(tmp_path / "out/checkpoint-4", 1, found, {})
    assert problem == "rng_state_1.pth is missing or incomplete"
    monkeypatch.setattr(trainers, "gathered", lambda own: [own, problem])
    assert train(2) == [None]


def test_nodes_that_share_no_directory_each_have_their_own_state(
    train: Train, tmp_path: Path
) -> None:
    train(1, {"saves": (4,)})
    path = tmp_path / "out/checkpoint-4"
    found, files = checkpoint_files.read_marker(next((tmp_path / "checkpoints").iterdir()))
    (path / "trainer_state.json").write_text('{"is_world_process_zero": false}')
    assert trainers._problem(path, 0, found, files)
    assert trainers._problem(path, 1, found, files) == ""
    (path / "model.safetensors").write_text("")
    assert "model.safetensors has 0 bytes" in trainers._problem(path, 1, found, files)


def test_a_training_is_not_continued_as_another(train: Train, tmp_path: Path) -> None:
    train(1, {"saves": (4, 8)}, {"saves": (4,)})  # such as two folds
    assert train(2, {}, {}) == [None, None]
    train(2, {"saves": (4, 8)})
    with pytest.raises(SystemExit, match="effective_batch was 2 and is 4"):
        train(3, gradient_accumulation_steps=2)
    assert train(3, train_batch_size=1, gradient_accumulation_steps=2, max_steps=9) == [8]
    assert train(3, max_steps=8) == [4]  # transformers would take one step more
    assert train(4) == [4]  # step 8 is of an earlier timeline
    (tmp_path / "attempts" / "6").mkdir(parents=True)
    train(5, {"saves": (8,)})  # too late
    assert train(6) == [4]
