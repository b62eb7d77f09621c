"""One question, one answer: all that is told of it, and what is left out where too little is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clusterrun.config.choices import Strategy
from clusterrun.estimates import gpus
from clusterrun.estimates.estimate import Need, Question, estimate
from clusterrun.estimates.inputs import GIB, Fit, Model, Setup, term
from clusterrun.estimates.models import BUILT_IN, from_numbers

H100 = gpus.find("h100-80g")


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
    shares = {0.79: Fit.FITS, 0.80: Fit.TIGHT, 0.95: Fit.TIGHT, 0.951: Fit.NO}
    assert {
        share: Need(terms=(term("x", share * 1000, "", ""),), capacity_bytes=1000).verdict
        for share in shares
    } == shares


def test_a_nodes_memory_fits_below_70_percent() -> None:
    needed = estimate(ask()).host_memory.total_bytes
    for share, verdict in ((0.69, Fit.FITS), (0.71, Fit.TIGHT), (0.94, Fit.TIGHT), (0.96, Fit.NO)):
        assert estimate(ask(host_bytes=round(needed / share))).host_memory.verdict is verdict


def test_the_worst_verdict_is_that_of_the_whole() -> None:
    assert estimate(ask(host_bytes=2000 * GIB)).verdict is Fit.FITS
    assert estimate(ask(host_bytes=16 * GIB)).verdict is Fit.NO
    assert estimate(ask(gpu_bytes=None)).verdict is None
    assert estimate(ask(gpu_bytes=None, host_bytes=2000 * GIB)).verdict is None
    assert estimate(ask(gpu_bytes=None, host_bytes=16 * GIB)).verdict is Fit.NO


def test_a_disk_that_is_too_small_is_told() -> None:
    assert estimate(ask(disk_bytes=200 * 10**9, save_every=500)).disk.verdict is Fit.NO
    assert estimate(ask(disk_bytes=10**13, save_every=500)).disk.verdict is Fit.FITS


def test_without_shape_activations_are_left_out_and_that_is_said() -> None:
    known = ask()
    blind = replace(
        known, setup=replace(known.setup, model=from_numbers(Model(name="", params=8_030_261_248)))
    )
    answer = estimate(blind)
    assert answer.gpu_memory is not None
    assert not any("activations" in term.name for term in answer.gpu_memory.terms)
    assert (
        "activations are not counted without the model's shape: the total is too low"
        in answer.notes
    )


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


def test_samples_longer_than_a_model_is_made_for_are_told() -> None:
    for seq_len, is_said in ((1024, False), (1025, True)):
        gpt2 = replace(ask().setup, model=BUILT_IN["gpt2"], seq_len=seq_len)
        longer = f"samples of {seq_len:,} tokens are longer than the model's maximum of 1,024"
        assert (longer in estimate(ask(setup=gpt2)).notes) is is_said


def test_repeated_samples_are_told() -> None:
    known = ask(samples=29_500)
    few = replace(known.setup, nodes=1, micro_batch=4, accumulation=1)
    (note,) = estimate(replace(known, setup=few)).notes
    assert note == (
        "29,500 samples are not divisible by 32; accelerate repeats 4 in the last step of an epoch"
    )


def test_the_activations_of_a_family_that_was_not_measured_are_a_note() -> None:
    for gated, like in ((True, "Llama"), (False, "GPT-2")):
        model = replace(BUILT_IN["llama-3.1-8b"], family="x", gated=gated)
        notes = estimate(Question(setup=Setup(model=model, seq_len=128))).notes
        assert f"the activations of 'x' models are assumed to be those of {like}" in notes
