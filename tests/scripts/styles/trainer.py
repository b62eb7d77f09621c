"""The Trainer of transformers, without a callback; it saves and evaluates on its own."""

import time

import torch
from proof import STEPS, prove
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        """Return the loss."""
        time.sleep(0.02)
        out = self.layer(x).squeeze(1)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}


data = [{"x": torch.full((4,), n / 40), "labels": torch.tensor(n / 20)} for n in range(2 * STEPS)]
args = TrainingArguments(
    "out",
    per_device_train_batch_size=2,
    logging_steps=10,
    eval_strategy="steps",
    eval_steps=50,
    save_steps=20,
    report_to=[],
)
trainer = Trainer(Model(), args, train_dataset=data, eval_dataset=data[:100])
trainer.train()
prove(args.process_index, args.world_size, trainer.model_wrapped)
