"""The bytes that a checkpoint was said to take are those that really are on disk."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from clusterrun.config.choices import Strategy
from clusterrun.estimates.inputs import Model, Setup, total
from clusterrun.estimates.memory import checkpoint_terms
from tests.examples.worlds import SCRIPT, command
from tests.patience import finished

pytestmark = [
    pytest.mark.long,
    pytest.mark.torch,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed"),
]

# FSDP's writer adds some 2 kB for each tensor and rank, which a smaller model would show.
RUN = "--max-steps 1 --batch-size 2 --held-out 9 --width 256 --output out"
PRECISION = {"no": "fp32", "bf16": "bf16"}
# A Llama-like model of random weights with adapters on all projections.
LORA = Setup(
    model=Model(name="llama", params=3_000_000, hidden=256, layers=4, heads=4, kv_heads=4, ffn=512),
    precision="fp32",
    lora=16,
)
ADAPTED = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=512, vocab_size=512,
    )
)
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(4)]
"""
BY_TRAINER = """
from transformers import Trainer, TrainingArguments

args = TrainingArguments("out", max_steps=1, save_steps=1, use_cpu=True, report_to=[])
Trainer(model, args, train_dataset=data).train()
"""
# As the Trainer does it under DeepSpeed, which can't be brought onto a CPU through its arguments.
BY_DEEPSPEED = """
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator()
weights = [weight for weight in model.parameters() if weight.requires_grad]
model, optimizer, batches = accelerator.prepare(
    model, torch.optim.AdamW(weights), DataLoader(data, batch_size=2)
)
for batch in batches:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
model.save_checkpoint("out/checkpoint-1", exclude_frozen_parameters=True)
if model.zero_optimization_stage() == 3:
    state = model._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
else:
    state = model.module.state_dict()
if accelerator.is_main_process:
    model.module.save_pretrained("out/checkpoint-1", state_dict=state)
accelerator.save_state("random")
accelerator.wait_for_everyone()
"""


def train(folder: Path, strategy: str, *, precision: str = "no", script: Path | None = None) -> str:
    """Run the example, or another script, on two ranks (`none`: one); return what it printed."""
    words = () if script else RUN.split()
    argv, env = command(folder, strategy, 1 if strategy == "none" else 2, *words)
    argv = [str(script) if script and word == str(SCRIPT) else word for word in argv]
    for config in folder.glob("*.yaml"):
        said = yaml.safe_load(config.read_text()) | {"mixed_precision": precision}
        if strategy == "zero3":
            said["deepspeed_config"]["zero3_save_16bit_model"] = True
        config.write_text(yaml.safe_dump(said))
    done = finished(
        argv, timeout_s=300, env={**env, "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def bytes_in(*folders: Path) -> int:
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [*(("ddp", "bf16"), ("fsdp", "no")), *(("zero1", "bf16"), ("zero2", "no"), ("zero3", "bf16"))],
)
def test_the_checkpoint_of_two_ranks_takes_what_was_said(
    tmp_path: Path, strategy: str, precision: str
) -> None:
    text = train(tmp_path, strategy, precision=precision)
    params = re.search(r"^model (\d+) parameters", text, re.MULTILINE)
    assert params
    setup = Setup(
        model=Model(name="example", params=int(params[1])),
        procs_per_node=2,
        strategy=Strategy(strategy),
        precision=PRECISION[precision],
    )
    written = bytes_in(tmp_path / "out/step-00000001")
    assert total(checkpoint_terms(setup)) == pytest.approx(written, rel=0.05)


@pytest.mark.parametrize(("strategy", "saving"), [("none", BY_TRAINER), ("zero2", BY_DEEPSPEED)])
def test_with_lora_the_adapters_alone_are_saved(tmp_path: Path, strategy: str, saving: str) -> None:
    pytest.importorskip("peft", reason="LoRA needs the extra 'examples'")
    script = tmp_path / "lora.py"
    script.write_text(ADAPTED + saving)
    train(tmp_path, strategy, script=script)
    ranks = 1 if strategy == "none" else 2
    setup = replace(LORA, strategy=Strategy(strategy), procs_per_node=ranks)
    random = list((tmp_path / "random").glob("random_states_*.pkl"))
    written = bytes_in(tmp_path / "out") + sum(file.stat().st_size for file in random)
    assert total(checkpoint_terms(setup)) == pytest.approx(written, rel=0.05)
