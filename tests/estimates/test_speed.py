"""How long a training takes, from its arithmetic or from a measured step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.config.choices import Network, Strategy
from clusterrun.errors import UsageError
from clusterrun.estimates.estimate import Question, estimate, measured_speedup, usual_speedup
from clusterrun.estimates.gpus import ALL, Gpu, find
from clusterrun.estimates.inputs import Model, Setup
from clusterrun.estimates.models import BUILT_IN, from_numbers
from clusterrun.estimates.speed import (
    EXPOSED,
    KERNELS,
    LORA_KERNELS,
    MFU,
    Duration,
    Links,
    Point,
    Scaling,
    filled,
    flops_per_token,
    pass_seconds,
    segments,
    step_cost,
    step_time,
)
from tests.estimates.saved import launches_of_a_pass

HOUR_S = 3600
LLAMA = BUILT_IN["llama-3.1-8b"]
SETUP = Setup(model=LLAMA, nodes=4, procs_per_node=8, seq_len=4096)


def timed(setup: Setup, gpu: Gpu, *, mfu: float = MFU) -> Duration:
    """Estimate a step over the card's own links."""
    return step_time(setup, gpu, Question(setup=setup).links(gpu), mfu=mfu)


def test_attention_is_an_eighth_of_the_work_of_8b_at_4096() -> None:
    work = flops_per_token(LLAMA, 4096)
    assert work == 6 * 8_030_261_248 + 12 * 32 * 4096 * 4096
    assert work / flops_per_token(LLAMA, 0) == pytest.approx(1.13, abs=0.005)


def test_frozen_weights_need_no_gradients_of_their_own() -> None:
    saved = flops_per_token(LLAMA, 4096) - flops_per_token(LLAMA, 4096, lora=16)
    assert saved == 2 * LLAMA.params


def test_the_band_is_that_of_mfu_30_to_50_percent_of_what_fills_the_gpu() -> None:
    setup = replace(SETUP, micro_batch=64, strategy=Strategy.ZERO2)
    took = timed(setup, find("a100-80g"))
    work = setup.effective_batch * 4096 * flops_per_token(LLAMA, 4096) / (32 * 312e12)
    assert took.low_s == pytest.approx(work / 0.5, rel=0.01)
    assert took.mid_s == pytest.approx(work / 0.4, rel=0.01)
    assert took.high_s == pytest.approx(work / 0.3, rel=0.01)


ADAPTED = Setup(model=BUILT_IN["llama-2-7b"], seq_len=1024, lora=64)


def test_small_passes_leave_a_gpu_half_empty() -> None:
    for micro_batch, share in ((1, 0.70), (2, 0.83), (8, 0.95), (16, 0.97)):
        setup = replace(ADAPTED, micro_batch=micro_batch)
        assert filled(setup, find("a100-40g"), 0.4) == pytest.approx(share, abs=0.006)


@given(st.sampled_from(ALL), st.sampled_from(["gpt2", "llama-2-7b", "t5-3b"]), st.integers(1, 64))
def test_a_larger_micro_batch_costs_less_a_sample_and_more_in_all(
    gpu: Gpu, name: str, micro_batch: int
) -> None:
    setup = Setup(model=BUILT_IN[name], precision="fp16", seq_len=128, micro_batch=micro_batch)
    larger = replace(setup, micro_batch=2 * micro_batch)
    one, two = (pass_seconds(each, gpu, 0.4) for each in (setup, larger))
    assert one <= two <= 2 * one
    assert 0 < filled(setup, gpu, 0.4) <= filled(larger, gpu, 0.4) < 1


def test_several_passes_of_a_step_add_their_gradients_up() -> None:
    card, parts = find("a100-80g"), {"ddp": 1, "zero1": 1, "zero2": 8, "fsdp": 1}
    for strategy, divisor in parts.items():
        setup = replace(ADAPTED, lora=0, procs_per_node=8, strategy=Strategy(strategy))
        one, many = (pass_seconds(replace(setup, accumulation=n), card, 0.4) for n in (1, 2))
        assert many - one == pytest.approx(12 * setup.model.params / divisor / 2039e9)


def test_a_tiny_transformer_takes_the_time_of_its_launches() -> None:
    tiny = from_numbers(
        Model(name="", params=0, hidden=256, layers=3, heads=8, ffn=1024, vocab=1000)
    )
    setup = Setup(model=tiny, seq_len=64, micro_batch=16)
    took = timed(setup, find("rtx4090"))
    assert took.mid_s == pytest.approx(0.0046, rel=0.01)
    assert filled(setup, find("rtx4090"), 0.4) < 0.1
    assert 16 / took.mid_s == pytest.approx(3_460, rel=0.01)


def test_a_precision_that_the_card_lacks_is_refused() -> None:
    with pytest.raises(UsageError, match="V100-16G does not compute in bf16") as refused:
        timed(SETUP, find("v100"))
    assert refused.value.hints == ("pass --mixed-precision fp16 or auto",)


def test_the_guides_52083_steps_take_7_to_11_hours() -> None:
    for step_s, hours in ((0.5, 7), (0.8, 11)):
        time = estimate(Question(setup=SETUP, step_time_s=step_s, max_steps=52_083)).time
        assert time is not None
        assert time.whole is not None
        assert int(time.whole.mid_s / HOUR_S) == hours
        assert time.whole.low_s == time.whole.high_s
        assert time.whole.basis == "measured"


def test_the_default_speed_ups() -> None:
    bands = {2: (1.8, 1.9), 4: (3.5, 3.8), 8: (6.5, 7.0)}
    for gpus in range(1, 10):
        one = replace(ASKED, setup=replace(ASKED_SETUP, nodes=1, procs_per_node=gpus))
        usual = usual_speedup(one)
        assert (usual and (usual.low, usual.high)) == bands.get(gpus)
        assert usual_speedup(replace(one, is_cpu=True)) is None


@given(st.integers(1, 10**7), st.integers(60, 10**6))
def test_the_jobs_are_as_many_as_needed_and_no_more(seconds: int, limit_s: int) -> None:
    jobs = segments(seconds, limit_s)
    assert (jobs - 1) * limit_s * 10 < seconds * 11 <= jobs * limit_s * 10


@pytest.mark.torch
@pytest.mark.parametrize(("lora", "kernels"), [(0, KERNELS), (4, LORA_KERNELS)])
def test_a_block_launches_as_many_kernels_as_are_counted(lora: int, kernels: int) -> None:
    one, three = (launches_of_a_pass(layers, lora=lora) for layers in (1, 3))
    assert (three - one) / 2 == pytest.approx(kernels, rel=0.1)


def test_checkpointing_computes_the_forward_pass_again() -> None:
    large = replace(SETUP, micro_batch=16, procs_per_node=1, nodes=1, strategy=Strategy.NONE)
    plain, again = (timed(replace(large, grad_ckpt=c), find("h100")).mid_s for c in (False, True))
    assert again == pytest.approx(plain * 4 / 3)


def test_links_are_those_of_the_card_and_the_network() -> None:
    for card, network, within, between in [
        ("h100", Network.AUTO, 360, 360),  # 8 x 400 Gb/s
        ("a100-80g", Network.INFINIBAND, 240, 180),  # 8 x 200 Gb/s
        ("a800", Network.AUTO, 160, 180),
        ("v100-32g", Network.AUTO, 120, 45),
        ("a100-80g", Network.EFA, 240, 45),
        ("h100", Network.EFA, 360, 360),
        ("h100-pcie", Network.AUTO, 31.5, 11.25),  # one card of 100 Gb/s
        ("h100", Network.ETHERNET, 360, 2.8125),
        ("nvidia_a100_80gb_pcie", Network.AUTO, 15.75, 11.25),
    ]:
        found = Question(setup=SETUP, network=network).links(find(card))
        speeds = found.within_node / 1e9, found.between_nodes / 1e9
        assert speeds == pytest.approx((within, between)), card


SLOW = Links(within_node=10e9, between_nodes=1e9, to_host=1e9)


def test_traffic_crosses_the_slowest_link() -> None:
    for strategy, each in {"ddp": 8, "zero1": 4, "zero3": 6, "fsdp": 6}.items():
        for nodes, speed_of_link in ((1, 10e9), (4, 1e9)):
            setup = replace(SETUP, nodes=nodes, strategy=Strategy(strategy))
            cost = step_cost(setup, find("h100"), SLOW)
            assert cost.network_s == pytest.approx(each * LLAMA.params / speed_of_link)
            assert cost.total_s == pytest.approx(cost.network_s + EXPOSED * cost.compute_s)


def test_what_the_host_steps_hides_nowhere() -> None:
    setup = replace(SETUP, strategy=Strategy.ZERO2_OFFLOAD)
    four, eight = (step_cost(replace(setup, nodes=n), find("h100"), SLOW) for n in (4, 8))
    assert four.total_s - four.host_s == pytest.approx(four.network_s + EXPOSED * four.compute_s)
    assert four.host_s == pytest.approx(2 * eight.host_s)
    assert four.host_s > LLAMA.params / 4 / 0.42e9


def point(nodes: int, step_s: float) -> Point:
    return Point(nodes=nodes, ranks=4 * nodes, step_s=step_s, steps=9, job_id="1", run_dir="r")


FOUND = Scaling(
    script="train.py",
    strategy="ddp",
    is_cpu=False,
    procs_per_node=4,
    is_fixed_batch=False,
    measured_at="2026-01-02T03:04:05",
    points=(point(1, 0.5), point(2, 0.625), point(4, 1.0)),
)
ASKED_SETUP = Setup(model=from_numbers(Model(name="", params=1000)), nodes=2, procs_per_node=4)
ASKED = Question(setup=ASKED_SETUP, scaling=FOUND)


def test_ranks_that_keep_their_batch_gain_by_samples_a_second() -> None:
    gains = [FOUND.gain(found) for found in FOUND.points]
    assert [gain.speedup for gain in gains] == [1.0, 1.6, 2.0]
    assert [gain.efficiency for gain in gains] == [1.0, 0.8, 0.5]
    assert [gain.communication for gain in gains] == pytest.approx([0.0, 0.2, 0.5])
    fixed = replace(FOUND, is_fixed_batch=True, points=(point(1, 0.5), point(2, 0.3125)))
    assert fixed.gain(fixed.points[1])[:2] == (1.6, 0.8)
    fast = replace(FOUND, points=(point(1, 0.5), point(2, 0.4)))
    assert fast.gain(fast.points[1])[1:] == (1.25, 0.0)


def test_a_plan_of_the_same_kind_takes_what_was_measured() -> None:
    found = measured_speedup(ASKED)
    assert found is not None
    assert (found.low, found.high, found.base, found.measured_at) == (
        *(1.6, 1.6, 4),
        FOUND.measured_at,
    )
    for other in (
        {"strategy": Strategy.ZERO3},
        {"nodes": 4, "procs_per_node": 2},
        {"nodes": 1},
        {"nodes": 3},
        {"nodes": 5},
    ):
        setup = replace(ASKED_SETUP, **other)  # type: ignore[arg-type]  # a table of kinds
        assert measured_speedup(replace(ASKED, setup=setup)) is None, other
    assert measured_speedup(replace(ASKED, scaling=None)) is None
    assert measured_speedup(replace(ASKED, is_cpu=True)) is None
