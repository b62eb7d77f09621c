"""DeepSpeed's estimators, row by row and against the installed ones."""

from __future__ import annotations

from typing import Any

import pytest

from clusterrun.config.choices import Strategy
from clusterrun.estimates import memory
from clusterrun.estimates.inputs import GIB, Model, Setup, total
from clusterrun.estimates.models import BUILT_IN
from tests.estimates.golden import TABLES

MIB = 1 << 20
ZERO2, ZERO3 = TABLES["deepspeed_zero2"], TABLES["deepspeed_zero3"]


def states(setup: Setup) -> int:
    """Return the bytes of the model's states on a GPU."""
    names = ("weights", "gradients", "optimizer")
    return total(term for term in memory.gpu_terms(setup) if term.name in names)


def on_host(setup: Setup) -> int:
    """Return the bytes on a node's host, but for the processes themselves."""
    return total(memory.host_terms(setup)[1:])


def zero(stage: int, model: Model, nodes: int, procs: int, *, offload: bool) -> Setup:
    strategy = Strategy(f"zero{stage}{'-offload' * offload}")
    return Setup(model=model, nodes=nodes, procs_per_node=procs, strategy=strategy)


def test_zero2_gives_the_rows_that_deepspeed_prints() -> None:
    assert len(ZERO2) == 56
    for name, nodes, procs, offload, host, gpu in ZERO2:
        setup = zero(2, BUILT_IN[name], nodes, procs, offload=offload)
        assert round(states(setup) / GIB, 2) == gpu, (name, nodes, procs)
        if offload and nodes > 1:  # DeepSpeed counts the models that all nodes load, on each
            assert round(on_host(setup) / GIB, 2) <= host
        else:
            assert round(on_host(setup) / GIB, 2) == host, (name, nodes, procs)


def test_zero3_gives_the_rows_that_deepspeed_prints() -> None:
    assert len(ZERO3) == 168
    seen = 0
    for name, nodes, procs, optimizer, params, zero_init, host, gpu in ZERO3:
        if optimizer is not params or not zero_init:
            continue  # no strategy of ours; weights are loaded in shards
        model, seen = BUILT_IN[name], seen + 1
        setup = zero(3, model, nodes, procs, offload=optimizer)
        # Beside the states, DeepSpeed counts the largest layer.
        assert round((states(setup) + 4 * model.largest_layer) / GIB, 2) == gpu, (name, nodes)
        assert round(on_host(setup) / GIB, 2) == host, (name, nodes, procs)
    assert seen == 56


@pytest.mark.torch
def test_the_installed_deepspeed_estimates_the_same_bytes() -> None:
    stage_2 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    stage_3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    zero2, zero3 = (
        stage_2.estimate_zero2_model_states_mem_needs,
        stage_3.estimate_zero3_model_states_mem_needs,
    )
    for params in (124_439_808, 8_030_261_248):
        layer = params // 11 + 1
        model = Model(name="", params=params, largest_layer=layer)
        for nodes, procs, offload in ((n, p, o) for n in (1, 3) for p in (1, 8) for o in (0, 1)):
            setup = zero(2, model, nodes, procs, offload=bool(offload))
            host, gpu = zero2(params, procs, nodes, bool(offload))
            assert states(setup) == pytest.approx(gpu, abs=3)
            assert nodes > 1 or on_host(setup) == pytest.approx(host, abs=3)
            setup = zero(3, model, nodes, procs, offload=bool(offload))
            host, gpu, _ = zero3(params, layer, procs, nodes, bool(offload), bool(offload), True)
            assert states(setup) + 4 * layer == pytest.approx(gpu, abs=3)
            assert on_host(setup) == pytest.approx(host, abs=3)


# Published estimates that are wrong today, and what ours says.


def test_zero2_offload_counts_the_host_memory_of_one_node_not_of_all() -> None:
    (shipped,) = (host for *row, host, _ in ZERO2 if row == ["t5-3b", 4, 8, True])
    ours = on_host(zero(2, BUILT_IN["t5-3b"], 4, 8, offload=True))
    assert (shipped, round(ours / GIB, 2)) == (509.91, 127.48)


@pytest.mark.torch
def test_accelerates_estimate_takes_the_largest_part_of_half_precision_not_the_sum() -> None:
    estimate = pytest.importorskip("accelerate.commands.estimate")
    params = BUILT_IN["llama-3.1-8b"].params
    theirs = max(estimate.estimate_training_usage(4 * params, "float16").values())
    setup = Setup(model=BUILT_IN["llama-3.1-8b"], precision="fp16")
    cast = (term for term in memory.gpu_terms(setup) if term.name == "cast weights")
    assert (theirs, states(setup) + total(cast)) == (8 * params, 18 * params)


def test_published_figures_of_zero3_are_of_the_largest_layer_and_the_states() -> None:
    model, published = BUILT_IN["t5-large"], TABLES["published"]["t5-large zero3"]
    layer = 4 * model.largest_layer
    assert int(layer / MIB) == published["largest_layer"]
    for offload, name in ((False, "none"), (True, "all")):
        on_gpu: Any = (states(zero(3, model, 1, 4, offload=offload)) + layer) / MIB
        assert on_gpu == pytest.approx(published[name], abs=1)
