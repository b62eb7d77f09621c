"""Exit with status 0, without having trained, or after a training that only looks idle."""

import os
import sys

import torch

from clusterrun import runtime


class Samples(torch.utils.data.Dataset):
    """As many samples as are asked for; transformers checks the length when it starts."""

    def __init__(self, number):
        self.number = number

    def __len__(self):
        return max(1, self.number)

    def __getitem__(self, index):
        return {"x": torch.ones(4), "labels": torch.ones(1)}


class NoSampler(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(())

    def __len__(self):
        return 8


def trainer(number):
    import transformers

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x, labels):
            return {"loss": (self.layer(x) - labels).square().mean()}

    class Trainer(transformers.Trainer):
        def _get_train_sampler(self, *args):
            return super()._get_train_sampler(*args) if number else NoSampler()

    args = transformers.TrainingArguments(
        output_dir="out", num_train_epochs=1, save_strategy="no", report_to=[], use_cpu=True
    )
    Trainer(model=Model(), args=args, train_dataset=Samples(number)).train()


def empty():
    runtime.Checkpoints().newest()
    for step, _ in enumerate(torch.utils.data.DataLoader([]), 1):
        runtime.step(step, 10)


def unsaved():
    runtime.Checkpoints().newest()
    for step in range(1, 10):
        runtime.step(step, 9, loss=1 / step)


def complete():
    found = runtime.Checkpoints().newest()
    for step in range(found.step if found else 0, 9):
        runtime.step(step + 1, 9, loss=1 / (step + 1))
    if not found:
        runtime.Checkpoints().save(9, lambda path: (path / "model").write_text("weights"))
        os.kill(os.getpid(), 9)


def printed(value):
    for step in range(30):
        print(f"step {step} loss {value(step)}", flush=True)


def reported(value):
    for step in range(30):
        runtime.step(step, 29, loss=torch.tensor(value).item())


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    {
        "no-samples": lambda: trainer(0),
        "samples": lambda: trainer(8),
        "empty": empty,
        "unsaved": unsaved,
        "complete": complete,
        "nan": lambda: printed(lambda step: "nan" if step > 20 else 2.5 / (step + 1)),
        "flat": lambda: printed(lambda step: "2.3026"),
        "coarse": lambda: printed(lambda step: "2.30"),
        "reported-nan": lambda: reported(float("nan")),
        "reported-flat": lambda: reported(2.3026),
        "silent": lambda: None,
    }[sys.argv[1]]()
