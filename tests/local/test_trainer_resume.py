"""A plain Trainer is killed, trains on in the same job and after `resume`, as if undisturbed."""

from __future__ import annotations

import json

import pytest

from tests.road import Project

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

TWO = ("--cluster", "local", "--nproc-per-node", "2", "--device", "cpu", "--wait")
SCRIPT = """
import os, sys, torch
from transformers import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Linear):
    def forward(self, x, labels):
        out = torch.nn.functional.dropout(super().forward(x), 0.3, self.training).squeeze(1)
        return {"loss": ((out - labels) ** 2).mean()}

class Fault(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        step = str(state.global_step)
        if step in sys.argv[2:] and args.process_index and not os.path.exists(step):
            open(step, "w")
            os.kill(os.getpid(), 9)

torch.manual_seed(0)
data = [{"x": torch.full((4,), n / 40), "labels": torch.tensor(n / 20)} for n in range(60)]
args = TrainingArguments(
    sys.argv[1], num_train_epochs=1, per_device_train_batch_size=2, save_steps=4,
    save_total_limit=1, logging_steps=1, use_cpu=True, report_to=[],
)
Trainer(Model(4, 1), args, train_dataset=data, callbacks=[Fault()]).train()
"""


def test_a_plain_trainer_trains_on_from_its_own_checkpoints(here: Project) -> None:
    (here.path / "plain.py").write_text(SCRIPT)
    here.ok("submit", *TWO, "plain.py", "whole")
    done = here.cli("submit", *TWO, "--max-restarts", "1", "plain.py", "cut", "5", "9")
    assert done.returncode == 137, done.stderr
    saved = here.path / "cut" / "checkpoint-8"
    assert f"the Trainer saved {saved}\n" in here.ok("status", "L2")
    done = here.cli("resume", "L2", "--wait")
    assert done.returncode == 0, done.stderr
    assert f"  from       {saved}\n" in done.stderr
    began = [event["step"] for event in here.events_of("L2", "resumed")]
    assert began == [0, 4, 8]
    states = [here.path / out / "checkpoint-15/trainer_state.json" for out in ("whole", "cut")]
    whole, cut = (json.loads(state.read_text())["log_history"] for state in states)
    assert len(whole) == 15
    assert cut == whole  # every loss, in full
