"""DeepSpeed's estimators, row by row and against the installed ones, and the ZeRO paper's table."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest

from clusterrun.config.spec import Strategy
from clusterrun.estimates import memory
from clusterrun.estimates.inputs import GIB, Setup, total
from clusterrun.estimates.memory import BUFFER_FACTOR
from clusterrun.estimates.models import BUILT_IN
from tests.estimates.golden import TABLES

MIB = 1 << 20


def _gib(size: float) -> float:
    return round(size / GIB, 2)


@pytest.mark.parametrize("row", TABLES["deepspeed_zero2"], ids=str)
def test_zero2_gives_the_row_that_deepspeed_prints(row: list[Any]) -> None:
    model, nodes, procs, offload, host, gpu = row
    needs = zero2(BUILT_IN[model].params, procs_per_node=procs, nodes=nodes, offload=offload)
    assert (_gib(needs.host), _gib(needs.gpu)) == (host, gpu)


@pytest.mark.parametrize("row", TABLES["deepspeed_zero3"], ids=str)
def test_zero3_gives_the_row_that_deepspeed_prints(row: list[Any]) -> None:
    name, nodes, procs, optimizer, params, zero_init, host, gpu = row
    model = BUILT_IN[name]
    needs = zero3(
        model.params,
        model.largest_layer,
        procs_per_node=procs,
        nodes=nodes,
        offload_optimizer=optimizer,
        offload_params=params,
        zero_init=zero_init,
    )
    assert (_gib(needs.host), _gib(needs.gpu)) == (host, gpu)


def test_all_rows_of_the_golden_tables_are_there() -> None:
    assert (len(TABLES["deepspeed_zero2"]), len(TABLES["deepspeed_zero3"])) == (56, 168)


def test_zero3_gives_the_example_worked_out_in_deepspeeds_documents() -> None:
    model, published = BUILT_IN["t5-large"], TABLES["published"]["t5-large zero3"]

    def gpu_mib(optimizer: bool, params: bool) -> float:
        needs = zero3(
            model.params,
            model.largest_layer,
            procs_per_node=4,
            nodes=1,
            offload_optimizer=optimizer,
            offload_params=params,
        )
        return needs.gpu / MIB

    assert int(4 * model.largest_layer / MIB) == published["largest_layer"]
    assert gpu_mib(False, False) == pytest.approx(published["none"], abs=1)
    assert gpu_mib(True, True) == pytest.approx(published["all"], abs=1)
    assert gpu_mib(True, False) == pytest.approx(published["optimizer"], abs=1)


@pytest.mark.parametrize("row", TABLES["zero_paper"], ids=str)
def test_the_papers_formulas_give_the_papers_table(row: list[float]) -> None:
    params, gpus, *stages = row
    ours = [zero_paper(params, gpus=int(gpus), stage=stage) / 1e9 for stage in range(4)]
    assert ours == pytest.approx(stages, abs=0.0051)


GRID = list(itertools.product((1, 124_439_808, 8_030_261_248), (1, 2, 3, 8), (1, 3, 7)))


@pytest.mark.torch
def test_the_installed_deepspeed_estimates_the_same_bytes() -> None:
    stage_2 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    stage_3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    for (params, procs, nodes), offload in itertools.product(GRID, (True, False)):
        theirs = stage_2.estimate_zero2_model_states_mem_needs(params, procs, nodes, offload)
        assert zero2(params, procs_per_node=procs, nodes=nodes, offload=offload) == theirs
    for (params, procs, nodes), switches in itertools.product(
        GRID, itertools.product((True, False), repeat=3)
    ):
        optimizer, weights, zero_init = switches
        if weights and not optimizer:
            continue
        layer = params // 11 + 1
        theirs = stage_3.estimate_zero3_model_states_mem_needs(
            params, layer, procs, nodes, optimizer, weights, zero_init
        )
        ours = zero3(
            params,
            layer,
            procs_per_node=procs,
            nodes=nodes,
            offload_optimizer=optimizer,
            offload_params=weights,
            zero_init=zero_init,
        )
        assert ours == theirs[:2]


# Published estimates that are wrong today, and what ours says.


def test_deepspeeds_documents_show_an_older_form_for_zero2_than_its_code() -> None:
    model = BUILT_IN["t5-3b"]
    old = 4 * model.params + 16 * model.params / 8
    ours = zero2(model.params, procs_per_node=8, nodes=1, offload=False).gpu
    assert _gib(old) == TABLES["published"]["t5-3b zero2 old form"]
    assert _gib(ours) == 11.29


def test_zero2_offload_counts_the_host_memory_of_one_node_not_of_all() -> None:
    model = BUILT_IN["t5-3b"]
    shipped = zero2(model.params, procs_per_node=8, nodes=4, offload=True).host
    setup = Setup(
        model=model, nodes=4, procs_per_node=8, strategy=Strategy.ZERO2_OFFLOAD, seq_len=512
    )
    (ours,) = (term for term in memory.host_terms(setup) if term.name == "offloaded states")
    assert _gib(shipped) == 509.91
    assert _gib(ours.bytes) == 127.48
    assert ours.bytes == zero2_offload_host(model.params, procs_per_node=8)


@pytest.mark.torch
def test_accelerates_estimate_takes_the_largest_part_of_half_precision_not_the_sum() -> None:
    estimate = pytest.importorskip("accelerate.commands.estimate")
    params = BUILT_IN["llama-3.1-8b"].params
    theirs = max(estimate.estimate_training_usage(4 * params, "float16").values())
    setup = Setup(model=BUILT_IN["llama-3.1-8b"], precision="fp16")
    ours = total(
        term
        for term in memory.gpu_terms(setup)
        if term.name in ("weights", "gradients", "optimizer", "cast weights")
    )
    assert theirs == 8 * params
    assert ours == 18 * params


def test_accelerates_published_figures_are_of_the_largest_part() -> None:
    params, published = BUILT_IN["bert-base-cased"].params, TABLES["published"]["bert-base-cased"]
    assert 4 * params / MIB == pytest.approx(published["float32_mb"], rel=1e-4)  # they add buffers
    assert 16 * params / GIB == pytest.approx(published["adam_float32_gb"], abs=0.01)
    assert 8 * params / MIB == pytest.approx(published["adam_float16_mb"], rel=1e-4)


class Needs(NamedTuple):
    """Bytes of each node's host memory, and of each GPU."""

    host: int
    gpu: int


def zero2(params: int, *, procs_per_node: int, nodes: int, offload: bool) -> Needs:
    """Estimate ZeRO-2 in half precision with Adam, the optimizer's states offloaded or not.

    With offload the host's part counts the GPUs of all nodes, though each node loads the models of
    its own alone: of more than one node it says too much (`zero2_offload_host` does not).
    """
    world = procs_per_node * nodes
    if offload:
        return Needs(host=zero2_offload_host(params, procs_per_node=world), gpu=2 * params)
    host = params * 4 * procs_per_node * BUFFER_FACTOR
    return Needs(host=int(host), gpu=2 * params + int(18 * params / world))


def zero2_offload_host(params: int, *, procs_per_node: int) -> int:
    """Estimate a node's host memory for ZeRO-2 with offload, as DeepSpeed's documents have it."""
    return int(params * max(4 * procs_per_node, 16) * BUFFER_FACTOR)


def zero3(
    params: int,
    largest_layer: int,
    *,
    procs_per_node: int,
    nodes: int,
    offload_optimizer: bool,
    offload_params: bool,
    zero_init: bool = True,
) -> Needs:
    """Estimate ZeRO-3 in half precision with Adam; `zero_init` says that weights load in shards."""
    gpu = 4 * largest_layer
    loading = 4 * procs_per_node  # a whole model in each process
    if offload_optimizer:
        kept, share = 18 if offload_params else 16, 1 / nodes
        host = (params * kept * share if zero_init else params * max(loading, kept * share)) * (
            BUFFER_FACTOR
        )
        gpu += 0 if offload_params else int(2 * params / (procs_per_node * nodes))
    else:
        host = (largest_layer if zero_init else params) * loading * BUFFER_FACTOR
        gpu += int(18 * params / (procs_per_node * nodes))
    return Needs(host=int(host), gpu=gpu)


def zero_paper(params: float, *, gpus: int, stage: int) -> float:
    """Return a GPU's bytes by the formulas of the ZeRO paper (arXiv:1910.02054); stage 0 is DDP.

    With 2 bytes a parameter for the weight, 2 for its gradient, and 12 for the master weight and
    Adam's states.
    """
    weights = 2 / (gpus if stage >= 3 else 1)
    gradients = 2 / (gpus if stage >= 2 else 1)
    optimizer = 12 / (gpus if stage >= 1 else 1)
    return params * (weights + gradients + optimizer)
