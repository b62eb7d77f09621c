"""The part of model and sample that a GPU works on: batch, steps and memory by parallel sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.config.choices import Strategy
from clusterrun.estimates import memory
from clusterrun.estimates.estimate import wrong_sizes
from clusterrun.estimates.gpus import find
from clusterrun.estimates.inputs import Model, Setup
from clusterrun.estimates.models import BUILT_IN
from clusterrun.estimates.speed import Links, step_cost
from clusterrun.launch.plan import Parallel

LLAMA = BUILT_IN["llama-3.1-8b"]
OUTSIDE = LLAMA.params - LLAMA.layers * LLAMA.block


def setup(strategy: Strategy = Strategy.FSDP, **sizes: int) -> Setup:
    return Setup(
        model=LLAMA,
        nodes=2,
        procs_per_node=8,
        strategy=strategy,
        seq_len=8192,
        micro_batch=2,
        accumulation=4,
        parallel=Parallel(**sizes),
    )


def terms(given: Setup) -> dict[str, int]:
    return {term.name: term.bytes for term in memory.gpu_terms(given)}


def test_the_batch_counts_data_parallel_ranks_and_the_state_its_shards() -> None:
    cases: list[tuple[str, dict[str, int], int, int]] = [
        ("fsdp", {}, 128, 16),
        ("fsdp", {"tensor": 4}, 32, 4),
        ("fsdp", {"context": 4}, 32, 16),
        ("fsdp", {"tensor": 2, "context": 4}, 16, 8),
        ("fsdp", {"replicate": 4}, 128, 4),
        ("fsdp-hybrid", {}, 128, 8),
        ("fsdp-hybrid", {"tensor": 2}, 64, 4),
        ("zero3", {"sequence": 8}, 16, 16),
        ("ddp", {"tensor": 16}, 8, 1),
    ]
    for strategy, sizes, batch, shards in cases:
        asked = setup(Strategy(strategy), **sizes)
        assert (asked.effective_batch, asked.shards) == (batch, shards), (strategy, sizes)


def test_tensor_parallel_divides_the_matrices_of_the_blocks_alone() -> None:
    whole, divided = terms(setup()), terms(setup(tensor=4))
    part = OUTSIDE + LLAMA.layers * (LLAMA.block // 4)
    assert divided["weights"] == 4 * part // 4  # on a quarter of the ranks
    assert divided["gathered weights"] == 2 * (OUTSIDE + 2 * (LLAMA.block // 4))
    assert divided["logits"] == whole["logits"]


# Korthikanti et al. (arXiv 2205.05198), equation 2: of 34 bytes, 10 are not divided.
PAPER_WHOLE, PAPER_KEPT = 34, 10


def test_what_a_block_saves_under_tensor_parallel_is_as_megatrons_paper_divides_it() -> None:
    gpt = Model(name="", params=1, hidden=4096, layers=1, heads=32, ffn=4 * 4096, gated=False)
    llama = replace(gpt, gated=True)
    for model in (gpt, llama):
        asked = replace(setup(), model=model)
        split = replace(setup(tensor=4), model=model)
        before, after = (memory.saved_bytes(x.of_gpu) for x in (asked, split))
        blocks = memory.GATED if model.gated else memory.UNGATED
        kept = blocks.fixed[memory.Arithmetic.HALF]
        assert after == pytest.approx(kept + (before - kept) / 4)
    assert kept / before < PAPER_WHOLE / PAPER_KEPT  # a norm saves more than fused ones did


@pytest.mark.parametrize(
    ("strategy", "sizes"), [(Strategy.FSDP, {"context": 4}), (Strategy.ZERO3, {"sequence": 4})]
)
def test_a_part_of_a_sample_takes_that_part_of_activations_and_logits(
    strategy: Strategy, sizes: dict[str, int]
) -> None:
    whole, divided = terms(setup(strategy)), terms(setup(strategy, **sizes))
    for name in ("activations", "logits"):
        assert divided[name] == pytest.approx(whole[name] / 4)
    assert divided["weights"] == whole["weights"]


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_a_larger_size_never_takes_more_of_a_gpu_at_the_same_batch(tensor: int, more: int) -> None:
    def needed(size: int) -> int:
        sizes = Parallel(context=size)
        return sum(terms(replace(setup(), parallel=sizes)).values())

    assert needed(min(8, tensor * more)) <= needed(tensor)


def test_a_model_that_cannot_be_divided_so_is_refused() -> None:
    zero3 = {"parallel": Parallel(sequence=4), "strategy": Strategy.ZERO3}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"parallel": Parallel(tensor=16), "nodes": 4}, "divide the 8 key-value heads"),
        ({"parallel": Parallel(context=2), "seq_len": 8190}, "not divisible by 4"),
        ({**zero3, "seq_len": 8190}, "not divisible by 4"),
        ({"parallel": Parallel(tensor=3)}, "does not divide 16 ranks"),
    ]
    for changes, words in wrong:
        assert words in wrong_sizes(replace(setup(), **changes))
    assert wrong_sizes(setup()) == ""
    # Ulysses copies heads of keys that are too few.
    assert wrong_sizes(replace(setup(), **zero3, model=replace(LLAMA, kv_heads=2))) == ""


LINKS = Links(within_node=400e9, between_nodes=50e9, to_host=30e9)


def sent(strategy: Strategy, **sizes: int) -> float:
    return step_cost(setup(strategy, **sizes), find("h100-80g"), LINKS).network_s


def test_copies_keep_gathers_within_a_node_if_the_shards_fit_there() -> None:
    assert sent(Strategy.FSDP, replicate=2) == sent(Strategy.FSDP_HYBRID)
    assert sent(Strategy.FSDP, replicate=2) < sent(Strategy.FSDP)
    spanning = replace(setup(replicate=2), nodes=4)  # 16 ranks share a copy, over two nodes
    within = replace(setup(replicate=4), nodes=4)
    card = find("h100-80g")
    assert step_cost(within, card, LINKS).network_s < step_cost(spanning, card, LINKS).network_s


def test_with_tensor_parallel_each_process_loads_its_part_and_offload_keeps_its_states() -> None:
    loading = {term.name: term.bytes for term in memory.host_terms(setup(tensor=4))}
    assert loading["model while loading"] == 8 * 4 * setup(tensor=4).of_gpu.model.params
    one, two = (
        sum(term.bytes for term in memory.host_terms(setup(Strategy.FSDP_OFFLOAD, **sizes)))
        for sizes in ({}, {"replicate": 2})
    )
    assert two - one == 16 * LLAMA.params // 2  # a copy on each node, not half of one
