"""What is recommended fits by its own verdict, and no way that fits is faster by the model."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from clusterrun.config.choices import Strategy
from clusterrun.estimates import gpus
from clusterrun.estimates.estimate import Need, Question, estimate, gpu_need, step_duration
from clusterrun.estimates.inputs import GIB, Fit, Model, Setup, term
from clusterrun.estimates.models import BUILT_IN, from_numbers
from clusterrun.estimates.recommend import (
    AS_FAST,
    WHAT_IF,
    best_per_strategy,
    neighbours,
    recommend,
)

H100 = gpus.find("h100-80g")
LLAMA = BUILT_IN["llama-3.1-8b"]


def question(**changes: Any) -> Question:
    """Ask about Llama-3.1-8B on 4 nodes of 8 H100s, unless told otherwise."""
    named = {name: changes.pop(name) for name in ("gpu", "host_bytes") if name in changes}
    facts = {"model": LLAMA, "nodes": 4, "procs_per_node": 8, "seq_len": 4096, **changes}
    gpu = named.get("gpu", H100)
    return Question(
        setup=Setup(**facts),
        gpu=gpu,
        gpu_bytes=gpu.memory_bytes if gpu else None,
        host_bytes=named.get("host_bytes", 2000 * GIB),
    )


asked = st.builds(
    lambda name, gpu, nodes, procs, times, seq_len, lora, host_gib: (
        question(
            model=BUILT_IN[name],
            gpu=gpu,
            nodes=nodes,
            procs_per_node=procs,
            seq_len=seq_len,
            lora=lora,
            host_bytes=host_gib * GIB,
        ),
        nodes * procs * times,
    ),
    st.sampled_from(["gpt2", "gpt2-xl", "llama-3.1-8b", "llama-2-13b"]),
    st.sampled_from([gpu for gpu in gpus.ALL if "bf16" in gpu.tflops]),
    st.integers(1, 16),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 64),
    st.sampled_from([512, 1024, 4096]),
    st.sampled_from([0, 16]),
    st.integers(16, 2000),
)


@given(asked)
@example((question(), 256))
@settings(deadline=None, max_examples=40)
def test_what_is_recommended_fits_and_the_fastest_comes_first(case: tuple[Question, int]) -> None:
    found, effective = case
    choices = recommend(replace(found, wanted_batch=effective))
    assume(choices)
    for choice in choices:
        verdict = estimate(replace(found, setup=choice.setup)).verdict
        assert verdict is choice.verdict
        assert verdict in (Fit.FITS, Fit.TIGHT)
        assert choice.setup.effective_batch == effective
    fitting = [c for c in choices if c.verdict is Fit.FITS] or choices
    assert choices[0].step_s <= AS_FAST * min(choice.step_s for choice in fitting)


@pytest.mark.parametrize("nodes", [1, 16])
def test_whole_nodes_with_nvlink_offload_only_what_fits_no_other_way(nodes: int) -> None:
    names = ("gpt2-xl", "llama-3.1-8b", "llama-2-13b", "llama-2-70b")
    for gpu in (x for x in gpus.ALL if x.fabric >= 200):
        precision, compared = gpus.precision_of(gpu), set()
        for name, batch in product(names, (1, 16)):
            asked_for = question(model=BUILT_IN[name], gpu=gpu, nodes=nodes, precision=precision)
            choices = recommend(replace(asked_for, wanted_batch=8 * nodes * batch))
            fitting = [c.setup for c in choices if c.verdict is Fit.FITS]
            if len({setup.offloads_optimizer for setup in fitting}) == 2:
                compared.add(name)
                assert not fitting[0].offloads_optimizer, (gpu.name, name, batch)
        assert "gpt2-xl" in compared, gpu.name


def test_of_what_is_about_as_fast_the_simplest_comes_first() -> None:
    adapters = question(gpu=gpus.find("a100-80g"), nodes=2, lora=16)
    choices = best_per_strategy(recommend(replace(adapters, wanted_batch=128)))
    assert choices[0].setup.strategy is Strategy.DDP
    (zero1,) = [choice for choice in choices if choice.setup.strategy is Strategy.ZERO1]
    assert choices[0].step_s / AS_FAST < zero1.step_s < choices[0].step_s


def adapters_on(card: str, **changes: Any) -> Question:
    """Ask about LoRA of rank 64 on a 7B model, samples of 1,024 tokens, on one card."""
    facts = {"model": BUILT_IN["llama-2-7b"], "nodes": 1, "procs_per_node": 1, "lora": 64}
    gpu = gpus.find(card)
    precision = gpus.precision_of(gpu)
    host = 128 * GIB
    asked = question(gpu=gpu, seq_len=1024, precision=precision, host_bytes=host, **facts)
    return replace(asked, **changes)


def test_adapters_fill_a_card_with_few_passes() -> None:
    for card, wanted, strategy, micro_batch in [
        ("rtx3090", True, Strategy.ZERO2_OFFLOAD, 2),
        ("v100-32g", True, Strategy.NONE, 4),
        ("a100-40g", True, Strategy.NONE, 8),
        ("a100-80g", True, Strategy.NONE, 32),
        ("a100-80g", None, Strategy.NONE, 4),
    ]:
        choices = recommend(adapters_on(card, wanted_ckpt=wanted, wanted_batch=64))
        best = choices[0].setup
        assert (best.strategy, best.micro_batch) == (strategy, micro_batch), card
        assert {choice.setup.grad_ckpt for choice in choices} == ({wanted} if wanted else {0, 1})


def test_four_samples_of_a_7b_model_do_not_fit_into_24_gib() -> None:
    asked = adapters_on("rtx3090")
    setups = [replace(asked.setup, grad_ckpt=True, micro_batch=n) for n in (1, 2, 4)]
    needs = [gpu_need(replace(asked, setup=setup)) for setup in setups]
    told = [(round(n.total_bytes / GIB, 1), n.verdict) for n in needs if n is not None]
    assert told == [(18.9, Fit.FITS), (20.3, Fit.TIGHT), (23.0, Fit.NO)]


def test_of_one_strategy_the_largest_micro_batch_that_fits_comes_first() -> None:
    asked = adapters_on("a100-80g", wanted_ckpt=True, wanted_batch=64)
    choices = recommend(asked, strategy=Strategy.NONE)
    fitting = [c.setup.micro_batch for c in choices if c.verdict is Fit.FITS]
    assert fitting == sorted(fitting, reverse=True)
    assert choices[fitting.index(1)].step_s > 1.3 * choices[0].step_s


def test_what_if_changes_one_thing() -> None:
    for what in WHAT_IF[:-1]:
        asked_for, name = question(micro_batch=2), what.replace("-", "_")
        values = [getattr(found.setup, name) for found in neighbours(asked_for, what)]
        assert values
        assert getattr(asked_for.setup, name) not in values
        for found, value in zip(neighbours(asked_for, what), values, strict=True):
            assert found.setup == replace(asked_for.setup, **{name: value})


def test_what_if_gpu_asks_the_same_of_every_other_card_the_fastest_first() -> None:
    asked = adapters_on("a100-40g")
    found = neighbours(asked, "gpu")
    named = {each.gpu.name for each in found if each.gpu}
    assert named == {gpu.name for gpu in gpus.ALL} - {"A100-40G"}
    steps = [step.mid_s for each in found if (step := step_duration(each))]
    assert steps == sorted(steps)
    assert len(steps) == len(found)
    for each in found:
        assert each.gpu is not None
        assert each.gpu_bytes == each.gpu.memory_bytes
        precision = "bf16" if "bf16" in each.gpu.tflops else "fp16"
        assert each.setup == replace(asked.setup, precision=precision)


def test_one_node_is_faster_than_several_of_as_many_gpus() -> None:
    def seconds(strategy: Strategy, nodes: int) -> float:
        asked = question(
            model=BUILT_IN["gpt2-xl"], seq_len=1024, nodes=nodes, procs_per_node=8 // nodes
        )
        choices = recommend(replace(asked, wanted_batch=64), strategy=strategy)
        return min(choice.step_s for choice in choices)

    for strategy in (Strategy.DDP, Strategy.FSDP, Strategy.ZERO2, Strategy.ZERO3):
        one, two, four = (seconds(strategy, nodes) for nodes in (1, 2, 4))
        assert one < two < four  # a node of fewer GPUs has fewer network cards


# One question and its answer: every line of it, and what is left out where too little is


def ask(**changes: Any) -> Question:
    setup = Setup(
        model=BUILT_IN["llama-3.1-8b"],
        nodes=4,
        procs_per_node=8,
        strategy=Strategy.ZERO3,
        micro_batch=4,
        accumulation=2,
        seq_len=4096,
        grad_ckpt=True,
    )
    facts = {"gpu": H100, "gpu_bytes": H100.memory_bytes, "samples": 1_200_000, "epochs": 10}
    return Question(**{"setup": setup, **facts, **changes})


def test_the_verdict_goes_by_the_share() -> None:
    for share, verdict in ((0.79, Fit.FITS), (0.8, Fit.TIGHT), (0.95, Fit.TIGHT), (0.951, Fit.NO)):
        need = Need(terms=(term("x", share * 1000, "", ""),), capacity_bytes=1000)
        assert need.verdict is verdict, share
    needed = estimate(ask()).host_memory.total_bytes  # a node's fits below 70 %
    for share, verdict in ((0.69, Fit.FITS), (0.71, Fit.TIGHT), (0.94, Fit.TIGHT), (0.96, Fit.NO)):
        assert estimate(ask(host_bytes=round(needed / share))).host_memory.verdict is verdict
    for disk_bytes, verdict in ((200 * 10**9, Fit.NO), (10**13, Fit.FITS)):
        assert estimate(ask(disk_bytes=disk_bytes, save_every=500)).disk.verdict is verdict


def test_the_worst_verdict_is_that_of_the_whole() -> None:
    assert estimate(ask(host_bytes=2000 * GIB)).verdict is Fit.FITS
    assert estimate(ask(host_bytes=16 * GIB)).verdict is Fit.NO
    assert estimate(ask(gpu_bytes=None)).verdict is None
    assert estimate(ask(gpu_bytes=None, host_bytes=2000 * GIB)).verdict is None
    assert estimate(ask(gpu_bytes=None, host_bytes=16 * GIB)).verdict is Fit.NO


def test_without_shape_activations_are_left_out_and_that_is_said() -> None:
    model = from_numbers(Model(name="", params=8_030_261_248))
    answer = estimate(ask(setup=replace(ask().setup, model=model)))
    assert answer.gpu_memory is not None
    assert not any("activations" in term.name for term in answer.gpu_memory.terms)
    said = "activations are not counted without the model's shape: the total is too low"
    assert said in answer.notes


@pytest.mark.parametrize(
    ("unknown", "why"),
    [
        ({"gpu": None}, "the speed of a GPU is not known from its memory alone"),
        ({"gpu": None, "gpu_bytes": None, "is_cpu": True}, "the speed of CPUs is not known"),
        ({"setup": replace(ask().setup, seq_len=0)}, "the length of a sample is not known"),
    ],
)
def test_where_no_time_is_told_that_is_said(unknown: dict[str, Any], why: str) -> None:
    answer = estimate(ask(**unknown))
    assert answer.time is None
    assert f"no time is estimated: {why}; pass --step-time if you know it" in answer.notes


def test_what_a_plan_should_be_read_with_is_a_note() -> None:
    for seq_len, is_said in ((1024, False), (1025, True)):
        gpt2 = replace(ask().setup, model=BUILT_IN["gpt2"], seq_len=seq_len)
        longer = f"samples of {seq_len:,} tokens are longer than the model's maximum of 1,024"
        assert (longer in estimate(ask(setup=gpt2)).notes) is is_said
    known = ask(samples=29_500)
    few = replace(known.setup, nodes=1, micro_batch=4, accumulation=1)
    assert estimate(replace(known, setup=few)).notes == (
        "29,500 samples do not fill batches of 32; accelerate repeats 4 in each epoch's last step",
    )
    for gated, like in ((True, "Llama"), (False, "GPT-2")):  # a family that was not measured
        model = replace(BUILT_IN["llama-3.1-8b"], family="x", gated=gated)
        notes = estimate(Question(setup=Setup(model=model, seq_len=128))).notes
        assert f"the activations of 'x' models are assumed to be those of {like}" in notes
