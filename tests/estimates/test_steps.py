"""How many steps an epoch has: the formulas, against loaders dealt out by hand and real ones."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clusterrun.estimates.steps import (
    accelerate_steps,
    batches_per_rank,
    effective_batch,
    full_steps,
    repeated_samples,
    schedule_steps,
    total_steps,
)
from tests.patience import patience

SAMPLES = st.integers(1, 400)
BATCH = st.integers(1, 17)
ACCUMULATION = st.integers(1, 9)
WORLD = st.integers(1, 9)


# The numbers of the guides.


def test_32_samples_3_passes_and_2_gpus_are_a_batch_of_192() -> None:
    assert effective_batch(32, 3, 2) == 192


def test_ten_million_samples_have_52083_full_steps_and_accelerate_runs_one_more() -> None:
    assert full_steps(10_000_000, 192) == 52_083
    assert batches_per_rank(10_000_000, 32, 2) == 156_250
    assert accelerate_steps(10_000_000, 32, 3, 2) == 52_084


@pytest.mark.parametrize(
    ("world", "full", "run"),
    [(1, 7375, 7375), (2, 3687, 3688), (4, 1843, 1844), (8, 921, 922)],
)
def test_steps_shrink_with_the_gpus_while_samples_stay(world: int, full: int, run: int) -> None:
    assert full_steps(29_500, effective_batch(4, 1, world)) == full
    assert accelerate_steps(29_500, 4, 1, world) == run


def test_2500_samples_have_40_steps_an_epoch_and_checkpoints_at_40_80_120() -> None:
    per_epoch = accelerate_steps(2_500, 8, 8, 1)
    assert per_epoch == 40
    assert [total_steps(per_epoch, epoch) for epoch in (1, 2, 3)] == [40, 80, 120]


def test_the_last_step_repeats_four_samples_on_eight_gpus() -> None:
    assert repeated_samples(29_500, 4, 8) == 4


def test_a_batch_larger_than_the_data_has_no_full_step_and_accelerate_runs_one() -> None:
    assert full_steps(200, 256) == 0
    assert accelerate_steps(200, 8, 4, 8) == 1
    assert repeated_samples(200, 8, 8) == 56


def test_a_schedule_is_stepped_by_every_process() -> None:
    assert (schedule_steps(100, 1), schedule_steps(100, 8)) == (100, 800)


# Against a loader that deals out batches one by one, as accelerate's documentation says.


def _dealt(samples: int, micro_batch: int, world: int) -> list[list[list[int]]]:
    """Deal batches out in turn; the last round is filled from the start of the data."""
    if world == 1:
        data = list(range(samples))
        return [[data[i : i + micro_batch] for i in range(0, samples, micro_batch)]]
    ranks: list[list[list[int]]] = [[] for _ in range(world)]
    stream = itertools.cycle(range(samples))
    dealt = 0
    while dealt < samples:
        for rank in ranks:
            rank.append(list(itertools.islice(stream, micro_batch)))
            dealt += micro_batch
    return ranks


def _optimizer_steps(batches: int, accumulation: int) -> int:
    """Count as a training loop does: each `accumulation` batches, and at the end of the loader."""
    found = 0
    for batch in range(1, batches + 1):
        found += batch % accumulation == 0 or batch == batches
    return found


@given(SAMPLES, BATCH, ACCUMULATION, WORLD)
def test_the_formulas_agree_with_batches_dealt_out_by_hand(
    samples: int, micro_batch: int, accumulation: int, world: int
) -> None:
    ranks = _dealt(samples, micro_batch, world)
    assert {len(batches) for batches in ranks} == {batches_per_rank(samples, micro_batch, world)}
    assert _optimizer_steps(len(ranks[0]), accumulation) == accelerate_steps(
        samples, micro_batch, accumulation, world
    )
    seen = sum(len(batch) for batches in ranks for batch in batches)
    assert repeated_samples(samples, micro_batch, world) == seen - samples


@given(SAMPLES, BATCH, ACCUMULATION, WORLD)
def test_repeated_samples_fit_into_the_last_batch_of_all_ranks(
    samples: int, micro_batch: int, accumulation: int, world: int
) -> None:
    assert 0 <= repeated_samples(samples, micro_batch, world) < micro_batch * world
    full = full_steps(samples, effective_batch(micro_batch, accumulation, world))
    assert 0 <= accelerate_steps(samples, micro_batch, accumulation, world) - full <= 1


# Against accelerate itself.


@pytest.fixture(scope="module")
def accelerate_state() -> Iterator[None]:
    """Leave no state of accelerate, one per process, to the tests of other modules."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def accelerator(accelerate_state: None) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def _run_by_accelerate(
    accelerator: Any, samples: int, micro_batch: int, world: int, rank: int
) -> tuple[list[int], int]:
    """Iterate one rank's real loader: the samples that it saw, and its optimizer steps."""
    import torch
    from accelerate.data_loader import prepare_data_loader

    model = torch.nn.Linear(1, 1)
    plain = torch.utils.data.DataLoader(range(samples), batch_size=micro_batch)
    loader = prepare_data_loader(
        plain, num_processes=world, process_index=rank, put_on_device=False, rng_types=[]
    )
    seen: list[int] = []
    found = 0
    for batch in loader:
        with accelerator.accumulate(model):
            seen += batch.tolist()
            found += accelerator.sync_gradients
    return seen, found


@pytest.mark.torch
@settings(max_examples=150, deadline=None)
@given(samples=SAMPLES, micro_batch=BATCH, accumulation=ACCUMULATION, world=WORLD)
@example(samples=1, micro_batch=4, accumulation=3, world=8)
@example(samples=33, micro_batch=4, accumulation=2, world=8)
@example(samples=32, micro_batch=4, accumulation=1, world=8)
def test_accelerates_own_loaders_run_as_many_steps_on_every_rank(
    accelerator: Any, samples: int, micro_batch: int, accumulation: int, world: int
) -> None:
    accelerator.gradient_accumulation_steps = accumulation
    ranks = [
        _run_by_accelerate(accelerator, samples, micro_batch, world, rank) for rank in range(world)
    ]
    expected = accelerate_steps(samples, micro_batch, accumulation, world)
    assert {found for _, found in ranks} == {expected}
    seen = [sample for part, _ in ranks for sample in part]
    assert set(seen) == set(range(samples))
    assert len(seen) - samples == repeated_samples(samples, micro_batch, world)


TRAINING = """
import json, sys
import torch
from accelerate import Accelerator

samples, micro_batch, accumulation, epochs, out = *map(int, sys.argv[1:5]), sys.argv[5]
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
data = torch.utils.data.TensorDataset(torch.arange(samples, dtype=torch.float32).unsqueeze(1))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
loader = torch.utils.data.DataLoader(data, batch_size=micro_batch, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
steps, seen = [], 0
for _ in range(epochs):
    found = 0
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            found += accelerator.sync_gradients
            seen += len(batch)
    steps.append(found)
seen = int(accelerator.reduce(torch.tensor(seen), "sum"))
if accelerator.is_main_process:
    facts = {"steps": steps, "seen": seen, "world": accelerator.num_processes,
             "scheduled": schedule.scheduler.last_epoch}
    open(out, "w").write(json.dumps(facts))
# A gloo process that leaves its group alone may abort at its very end (torch 2.13).
del model, optimizer, loader, schedule
accelerator.free_memory()
accelerator.wait_for_everyone()
accelerator.end_training()
"""


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize(
    ("samples", "micro_batch", "accumulation", "world"),
    [(101, 4, 3, 2), (59, 3, 2, 4)],
)
def test_processes_that_train_together_run_as_many_steps(
    tmp_path: Path, samples: int, micro_batch: int, accumulation: int, world: int
) -> None:
    script, out, epochs = tmp_path / "train.py", tmp_path / "facts.json", 2
    script.write_text(TRAINING)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    argv += [f"--nproc-per-node={world}", str(script)]
    argv += [*map(str, (samples, micro_batch, accumulation, epochs)), str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300 * patience())
    assert done.returncode == 0, done.stderr[-3000:]
    per_epoch = accelerate_steps(samples, micro_batch, accumulation, world)
    repeated = repeated_samples(samples, micro_batch, world)
    assert json.loads(out.read_text()) == {
        "steps": [per_epoch] * epochs,
        "seen": epochs * (samples + repeated),
        "world": world,
        "scheduled": schedule_steps(epochs * per_epoch, world),
    }


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.usefixtures("accelerate_state")
@pytest.mark.parametrize(
    ("samples", "micro_batch", "accumulation", "epochs"),
    [(25, 2, 4, 3), (64, 4, 4, 2), (41, 8, 8, 1.5), (3, 4, 2, 2)],
)
def test_the_trainer_of_transformers_runs_as_many_steps(
    tmp_path: Path, samples: int, micro_batch: int, accumulation: int, epochs: float
) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    class Squares(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            return {"loss": ((self.layer(x) - labels) ** 2).mean()}

    asked = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=epochs,
        learning_rate=1e-6,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"x": torch.tensor([float(i)]), "labels": torch.zeros(1)} for i in range(samples)]
    trainer = Trainer(model=Squares(), args=asked, train_dataset=rows)
    trainer.train()
    per_epoch = accelerate_steps(samples, micro_batch, accumulation, 1)
    assert trainer.state.global_step == total_steps(per_epoch, epochs)
