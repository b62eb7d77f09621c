"""How many steps an epoch has: the formulas, against loaders dealt out by hand and real ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clusterrun.config.choices import Optimizer
from clusterrun.estimates.estimate import Question, Steps, count_steps
from clusterrun.estimates.inputs import Setup
from clusterrun.estimates.models import BUILT_IN
from clusterrun.estimates.steps import scaled

SAMPLES = st.integers(1, 400)
BATCH = st.integers(1, 17)
ACCUMULATION = st.integers(1, 9)
WORLD = st.integers(1, 9)
GPT2 = Setup(model=BUILT_IN["gpt2"])


def counted(samples: int, micro_batch: int, accumulation: int, world: int) -> Steps:
    setup = replace(GPT2, micro_batch=micro_batch, accumulation=accumulation, procs_per_node=world)
    return count_steps(Question(setup=setup, samples=samples))


# The numbers of the guides.


def test_32_samples_3_passes_and_2_gpus_are_a_batch_of_192() -> None:
    assert replace(GPT2, micro_batch=32, accumulation=3, procs_per_node=2).effective_batch == 192


def test_ten_million_samples_have_52083_full_steps_and_accelerate_runs_one_more() -> None:
    found = counted(10_000_000, 32, 3, 2)
    assert (found.full_per_epoch, found.accelerate_per_epoch, found.repeated) == (52_083, 52_084, 0)


def test_steps_shrink_with_the_gpus_while_samples_stay() -> None:
    ran = [counted(29_500, 4, 1, world).accelerate_per_epoch for world in (1, 2, 4, 8)]
    assert ran == [7375, 3688, 1844, 922]
    assert counted(2_500, 8, 8, 1).accelerate_per_epoch == 40
    found = counted(200, 8, 4, 8)
    assert (found.accelerate_per_epoch, found.repeated) == (1, 56)


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
    ran = {_optimizer_steps(len(batches), accumulation) for batches in ranks}
    seen = sum(len(batch) for batches in ranks for batch in batches)
    found = counted(samples, micro_batch, accumulation, world)
    assert (ran, seen - samples) == ({found.accelerate_per_epoch}, found.repeated)


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
    expected = counted(samples, micro_batch, accumulation, world)
    assert {found for _, found in ranks} == {expected.accelerate_per_epoch}
    seen = [sample for part, _ in ranks for sample in part]
    assert set(seen) == set(range(samples))
    assert len(seen) - samples == expected.repeated


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
    per_epoch = counted(samples, micro_batch, accumulation, 1).accelerate_per_epoch
    assert per_epoch is not None
    assert trainer.state.global_step == math.ceil(per_epoch * epochs)


def test_a_rate_is_scaled_by_two_rules() -> None:
    rates = scaled(1.25e-6, 4, 16)
    assert (rates.linear, rates.sqrt, rates.ratio) == (5.0e-6, 2.5e-6, 4.0)
    assert [note.partition(" ")[0] for note in rates.notes] == ["batches", "for"]
    assert scaled(1e-4, 16, 16).notes == ()


def test_warm_up_is_advised_above_eight_times_the_batch() -> None:
    for batch, warns in ((2048, False), (2049, True)):
        notes = scaled(1e-4, 256, batch, optimizer=Optimizer.SGD).notes
        assert any("warm the rate up" in note for note in notes) is warns


def test_batches_under_256_may_need_no_scaling() -> None:
    for batch, small in ((255, True), (256, False)):
        notes = scaled(1e-4, 32, batch, optimizer=Optimizer.SGD).notes
        assert any("may need no scaling" in note for note in notes) is small


def test_the_square_root_is_named_for_the_adam_family_alone() -> None:
    for optimizer in Optimizer:
        notes = " ".join(scaled(1e-4, 512, 1024, optimizer=optimizer).notes)
        assert ("square root" in notes) is (optimizer.value in {"adamw", "adam8bit"})
