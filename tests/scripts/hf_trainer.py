"""A Trainer as people write it: its own arguments choose DeepSpeed or FSDP, or `--hidden` does."""

from __future__ import annotations

import os
import sys

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

argv = sys.argv[1:]
hidden = argv.pop(argv.index("--hidden") + 1) if "--hidden" in argv else ""
argv = [word for word in argv if word != "--hidden"]
usual = ["--output_dir=out", "--max_steps=2", "--per_device_train_batch_size=2"]
usual += ["--report_to=none", "--save_strategy=no", "--logging_steps=1", "--disable_tqdm=true"]
parser = HfArgumentParser(TrainingArguments)
if hidden:
    parser.set_defaults(deepspeed=hidden)
(args,) = parser.parse_args_into_dataclasses([*usual, *argv])
shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2))
data = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n} for n in range(16)]
trainer = Trainer(model, args, train_dataset=data)
trainer.train(get_last_checkpoint("out") if os.path.isdir("out") else None)
engine, optimizer = type(trainer.model_wrapped), type(trainer.optimizer.optimizer)
rank = os.environ["RANK"]
print(f"rank {rank} trained {trainer.state.global_step} steps with {engine.__name__}")
print(f"rank {rank} of {args.world_size} stepped {optimizer.__name__} on {args.device}")
