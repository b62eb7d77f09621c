"""Checkpoint bytes by strategy, precision and optimizer; the real files are in test_disk_real."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterrun.config.choices import Optimizer
from clusterrun.config.spec import Strategy
from clusterrun.estimates.inputs import Model, Setup, total
from clusterrun.estimates.memory import best_terms, checkpoint_terms, run_bytes, trainable_params

MODEL = Model(
    name="toy", params=1_000_000_000, hidden=2048, layers=16, heads=16, kv_heads=16, ffn=8192
)
SETUP = Setup(model=MODEL, nodes=2, procs_per_node=4)
WHOLE = [Strategy.NONE, Strategy.DDP, Strategy.FSDP, Strategy.FSDP_HYBRID, Strategy.FSDP_OFFLOAD]
TWICE = [Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO2_OFFLOAD]
ONCE = [Strategy.ZERO3, Strategy.ZERO3_OFFLOAD]


def of_each_param(setup: Setup) -> dict[str, float]:
    """Return bytes of each parameter, by group of files, but for what each rank adds."""
    terms = [term for term in checkpoint_terms(setup) if "ranks" not in term.formula]
    return {term.name: term.bytes / trainable_params(setup) for term in terms}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", WHOLE)
def test_fp32_weights_and_states_are_saved_whatever_the_precision(
    strategy: Strategy, precision: str
) -> None:
    setup = replace(SETUP, strategy=strategy, precision=precision)
    assert of_each_param(setup) == {"weights": 4, "optimizer": 8}


@pytest.mark.parametrize(("precision", "weights"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
@pytest.mark.parametrize("strategy", TWICE)
def test_zero_1_and_2_save_the_weights_beside_the_optimizer_s_fp32_copy(
    strategy: Strategy, precision: str, weights: int
) -> None:
    setup = replace(SETUP, strategy=strategy, precision=precision)
    assert of_each_param(setup) == {"weights": weights, "optimizer": 12}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", ONCE)
def test_zero_3_saves_its_weights_with_the_optimizer_alone(
    strategy: Strategy, precision: str
) -> None:
    assert of_each_param(replace(SETUP, strategy=strategy, precision=precision)) == {
        "optimizer": 12
    }


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [(Optimizer.ADAMW, 8), (Optimizer.ADAM8BIT, 2), (Optimizer.LION, 4), (Optimizer.SGD, 4)],
)
def test_the_optimizer_decides_what_is_kept_of_each_parameter(
    optimizer: Optimizer, states: int
) -> None:
    assert of_each_param(replace(SETUP, optimizer=optimizer))["optimizer"] == states
    sharded = replace(SETUP, optimizer=optimizer, strategy=Strategy.ZERO2)
    assert of_each_param(sharded)["optimizer"] == 4 + states


@pytest.mark.parametrize(
    ("strategy", "groups"),
    [
        (Strategy.DDP, {"weights": 4, "optimizer": 8}),
        (Strategy.ZERO2, {"weights": 4, "optimizer": 12}),  # peft's file and DeepSpeed's own
        (Strategy.ZERO3, {"weights": 2, "optimizer": 12}),
    ],
)
def test_lora_saves_the_adapters_alone(strategy: Strategy, groups: dict[str, float]) -> None:
    assert of_each_param(replace(SETUP, strategy=strategy, lora=16)) == groups


def test_random_numbers_grow_with_the_ranks_and_not_with_the_model() -> None:
    def others(setup: Setup) -> int:
        return checkpoint_terms(setup)[-1].bytes

    assert others(replace(SETUP, nodes=20)) == 10 * others(SETUP)
    assert others(replace(SETUP, model=replace(MODEL, params=1))) == others(SETUP)


def test_a_published_checkpoint_is_met_within_five_percent() -> None:
    """BLOOM's model card: 2.3 TB with optimizer states, 329 GB of bf16 weights.

    176,247,271,424 parameters of two bytes are 328 GiB: the card counts in powers of 1024.
    """
    bloom = replace(
        SETUP,
        model=replace(MODEL, params=176_247_271_424),
        strategy=Strategy.ZERO1,
        nodes=48,
        procs_per_node=8,
    )
    assert total(checkpoint_terms(bloom)) == pytest.approx(2.3 * 2**40, rel=0.05)


def test_a_run_needs_room_for_what_it_keeps_and_one_in_flight() -> None:
    assert run_bytes(112, keep=3) == 448


def test_of_the_best_only_weights_are_counted_and_none_is_in_flight() -> None:
    (weights,) = best_terms(SETUP, 5)
    assert weights.bytes == 5 * 4 * SETUP.model.params
    (adapters,) = best_terms(replace(SETUP, lora=16), 5)
    assert adapters.bytes < weights.bytes / 20
    assert best_terms(SETUP, 0) == ()
