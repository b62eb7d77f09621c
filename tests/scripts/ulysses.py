"""A tiny Llama under accelerate's sequence parallel (DeepSpeed's Ulysses)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from deepspeed.utils import groups
from torch.distributed.nn.functional import all_reduce
from transformers import LlamaConfig, LlamaForCausalLM

WORDS, LENGTH = 64, 16

torch.manual_seed(0)
accelerator = Accelerator()
config = LlamaConfig(
    vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa",
)  # fmt: skip
words = torch.randint(0, WORDS, (16, LENGTH), generator=torch.Generator().manual_seed(1))
samples = [
    {"input_ids": row, "labels": row.clone(), "position_ids": torch.arange(LENGTH)} for row in words
]
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(samples, batch_size=2)  # type: ignore[arg-type]
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
group = groups._get_sequence_parallel_group()
steps = 0
for batch in loader:
    labels = batch["shift_labels"].contiguous()
    logits = model(**batch).logits
    loss = model.module.loss_function(logits, None, WORDS, shift_labels=labels)
    tokens = (labels != -100).sum()
    shared = all_reduce(loss * tokens, group=group)
    dist.all_reduce(tokens, group=group)
    accelerator.backward(shared / tokens)
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
print(
    f"rank {accelerator.process_index} batch {model.train_batch_size()} steps {steps} "
    f"of {batch['input_ids'].shape[1]} tokens"
)
