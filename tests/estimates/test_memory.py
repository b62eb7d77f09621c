"""Memory of GPUs and hosts: the formulas of each strategy, and what must hold of any training."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.advice import count
from clusterrun.config.choices import Optimizer, Strategy
from clusterrun.errors import UsageError
from clusterrun.estimates import memory
from clusterrun.estimates.inputs import GIB, Model, Setup, Term, total
from clusterrun.estimates.memory import best_terms, checkpoint_terms
from clusterrun.estimates.models import BUILT_IN, from_numbers
from tests.estimates.golden import TABLES
from tests.examples.worlds import command
from tests.road import descendants

LLAMA = BUILT_IN["llama-3.1-8b"]
P = LLAMA.params
U = LLAMA.block
SHARDED = [
    *(Strategy.FSDP, Strategy.FSDP_HYBRID, Strategy.FSDP_OFFLOAD),
    *(Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3),
    *(Strategy.ZERO2_OFFLOAD, Strategy.ZERO3_OFFLOAD),
]
OFFLOADED = {
    Strategy.FSDP: Strategy.FSDP_OFFLOAD,
    Strategy.ZERO2: Strategy.ZERO2_OFFLOAD,
    Strategy.ZERO3: Strategy.ZERO3_OFFLOAD,
}
STATES = ("weights", "gradients", "optimizer")


def _setup(strategy: Strategy, **changes: Any) -> Setup:
    facts = {"model": LLAMA, "nodes": 2, "procs_per_node": 4, "strategy": strategy, **changes}
    return Setup(**facts)


def _sizes(terms: tuple[Term, ...]) -> dict[str, int]:
    return {term.name: term.bytes for term in terms}


def states(setup: Setup) -> int:
    """Return the bytes of the model's states on a GPU."""
    return total(term for term in memory.gpu_terms(setup) if term.name in STATES)


# Model states, in bytes of each parameter, on 2 nodes of 4 GPUs


EACH = {
    **{("none", "fp32"): 16, ("ddp", "fp32"): 16, ("ddp", "bf16"): 16, ("fsdp", "bf16"): 16 / 8},
    **{("fsdp-hybrid", "bf16"): 16 / 4, ("fsdp-offload", "bf16"): 0, ("zero1", "bf16"): 6},
    **{("zero2", "bf16"): 2 + 18 / 8, ("zero2-offload", "bf16"): 2, ("zero3", "bf16"): 18 / 8},
    **{("zero3-offload", "bf16"): 0, ("zero2", "fp32"): 4 + 20 / 8, ("zero3", "fp32"): 24 / 8},
}


def test_a_strategy_keeps_its_share_of_the_states() -> None:
    for (strategy, precision), each in EACH.items():
        kept = states(_setup(Strategy(strategy), precision=precision))
        assert kept == pytest.approx(each * P, abs=3), (strategy, precision)


def test_an_optimizer_keeps_its_own_bytes_of_each_parameter() -> None:
    states = {"adamw": 8, "adam8bit": 2, "lion": 4, "sgd": 4}
    for optimizer in Optimizer:
        each = states[optimizer.value]
        sizes = _sizes(memory.gpu_terms(_setup(Strategy.DDP, optimizer=optimizer)))
        assert sizes["optimizer"] == each * P
        setup = replace(SETUP, optimizer=optimizer)
        assert of_each_param(setup)["optimizer"] == each
        assert of_each_param(replace(setup, strategy=Strategy.ZERO2))["optimizer"] == 4 + each


# Buffers


def test_each_strategy_has_its_buffers() -> None:
    fp32, busy = {"precision": "fp32"}, {"seq_len": 4096, "micro_batch": 8}
    table: list[tuple[Strategy, dict[str, Any], str, int | None]] = [
        (Strategy.DDP, {}, "gradient buckets", 4 * P),
        (Strategy.DDP, {"nodes": 1, "procs_per_node": 1}, "gradient buckets", None),  # alone
        (Strategy.DDP, {"precision": "bf16"}, "cast weights", 2 * P),
        (Strategy.DDP, fp32, "cast weights", None),
        (Strategy.FSDP, {"precision": "bf16"}, "cast weights", None),
        # Two blocks, and what is outside of blocks.
        (Strategy.FSDP, {}, "gathered weights", 2 * (P - 32 * U + 2 * U)),
        (Strategy.FSDP, {}, "whole gradients", 2 * 2 * LLAMA.largest_layer),
        (Strategy.FSDP, {}, "accumulated gradients", None),
        (Strategy.FSDP, {"accumulation": 4}, "accumulated gradients", 2 * P),
        (Strategy.ZERO3, {"accumulation": 4}, "accumulated gradients", None),
        # DeepSpeed's defaults.
        (Strategy.ZERO3, {}, "reduce bucket", 2 * 500_000_000),
        (Strategy.ZERO3, {}, "gathered weights", 4 * LLAMA.largest_layer),  # > 1e9 x 2 bytes
        # AdamW copies one state, unless activations leave no room.
        (Strategy.DDP, fp32, "optimizer step", 4 * P),
        (Strategy.DDP, {**fp32, **busy}, "optimizer step", None),
    ]
    for strategy, changes, name, size in table:
        sizes = _sizes(memory.gpu_terms(_setup(strategy, **changes)))
        assert sizes.get(name) == size, (strategy, changes, name)


# LoRA


def test_adapters_sit_on_every_projection() -> None:
    attention = 2 * (4096 + 4096) + 2 * (4096 + 1024)
    assert LLAMA.adapter_params(16) == 16 * 32 * (attention + 3 * (4096 + 14336))


@pytest.mark.torch
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_are_as_many_as_peft_makes_for_all_linear_layers(family: str) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    shape = {"num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 99}
    config = transformers.LlamaConfig(
        **shape, hidden_size=32, intermediate_size=80, num_key_value_heads=2
    )
    if family == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=3, n_inner=80, vocab_size=99)
    adapters = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(config), adapters)
    trained, _ = model.get_nb_trainable_parameters()
    shape = count.counted({**config.to_dict(), "architectures": None}, transformers)
    told = Model(name="", **shape).adapter_params(8)
    # of GPT-2 one adapter serves query, key and value, which are one layer: 4 h, not 6 h
    assert told == trained + (2 * 32 * 8 * 3 if family == "gpt2" else 0)


def test_lora_freezes_the_weights_in_half_precision() -> None:
    adapters = LLAMA.adapter_params(16)
    assert states(_setup(Strategy.DDP, lora=16)) == 2 * P + 16 * adapters
    assert states(_setup(Strategy.DDP, lora=16, precision="fp32")) == 4 * P + 16 * adapters


def test_lora_of_a_model_without_shape_says_what_is_missing() -> None:
    setup = _setup(Strategy.DDP, model=from_numbers(Model(name="", params=10**9)), lora=8)
    with pytest.raises(UsageError, match="adapters can't be sized without the model's shape"):
        memory.gpu_terms(setup)


# Host


def test_a_node_holds_what_is_offloaded_and_what_is_loaded() -> None:
    for strategy, each in [
        (Strategy.DDP, 4 * 4),  # each of 4 processes
        (Strategy.FSDP, 4),  # one of them
        (Strategy.FSDP_OFFLOAD, 16 / 2 + 4),  # half of the states
        (Strategy.ZERO2, 4 * 4 * 1.5),
        (Strategy.ZERO2_OFFLOAD, 16 * 1.5),
        (Strategy.ZERO3_OFFLOAD, 18 / 2 * 1.5),
    ]:
        *_, last = memory.host_terms(_setup(strategy))
        assert last.bytes == pytest.approx(each * P, abs=2)


# What must hold of any training

MODELS = st.sampled_from(
    [
        *(LLAMA, BUILT_IN["gpt2"], BUILT_IN["t5-3b"], BUILT_IN["llama-2-70b"]),
        from_numbers(Model(name="", params=10**9)),
        from_numbers(Model(name="", params=0, hidden=64, layers=1, heads=2, ffn=100, vocab=300)),
    ]
)


@st.composite
def setups(draw: st.DrawFn, strategies: list[Strategy] | None = None) -> Setup:
    model = draw(MODELS)
    return Setup(
        model=model,
        nodes=draw(st.integers(1, 64)),
        procs_per_node=draw(st.integers(1, 16)),
        strategy=draw(st.sampled_from(strategies or list(Strategy))),
        precision=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        micro_batch=draw(st.integers(1, 64)),
        accumulation=draw(st.integers(1, 8)),
        seq_len=draw(st.sampled_from([0, 1, 128, 4096])),
        grad_ckpt=draw(st.booleans()),
        optimizer=draw(st.sampled_from(list(Optimizer))),
        lora=draw(st.sampled_from([0, 8])) if model.has_shape else 0,
    )


def _gpu(setup: Setup) -> int:
    return total(memory.gpu_terms(setup))


@given(setups())
def test_every_term_is_positive_and_says_its_formula_and_source(setup: Setup) -> None:
    for term in (*memory.gpu_terms(setup), *memory.host_terms(setup), *memory.cpu_terms(setup)):
        assert term.bytes > 0
        assert term.formula
        assert term.source


@given(setups(SHARDED), st.integers(1, 8))
def test_more_ranks_never_need_more_of_each_gpu(setup: Setup, times: int) -> None:
    assert _gpu(replace(setup, nodes=setup.nodes * times)) <= _gpu(setup)
    assert _gpu(replace(setup, procs_per_node=setup.procs_per_node * times)) <= _gpu(setup)


@given(setups(), st.integers(0, 64))
def test_offload_checkpointing_and_smaller_passes_never_need_more(setup: Setup, more: int) -> None:
    assert _gpu(replace(setup, grad_ckpt=True)) <= _gpu(replace(setup, grad_ckpt=False))
    if setup.strategy in OFFLOADED:
        assert _gpu(replace(setup, strategy=OFFLOADED[setup.strategy])) <= _gpu(setup)
    larger = replace(setup, micro_batch=setup.micro_batch + more)
    assert _gpu(larger) >= _gpu(setup)
    assert total(memory.cpu_terms(larger)) >= total(memory.cpu_terms(setup))


# What two ranks of examples/train_lm.py really took on CPUs


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("strategy", "size"),
    [(Strategy.DDP, "small"), (Strategy.ZERO2, "small"), (Strategy.ZERO3, "large")],
)
def test_training_on_cpus_takes_the_memory_that_was_told_within_its_band(
    strategy: Strategy, size: str, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    width, layers = {"small": (128, 2), "large": (768, 6)}[size]
    run = f"--max-steps 3 --held-out 9 --width {width} --layers {layers}"
    measured = _peak_of_processes(*command(tmp_path, strategy.value, 2, *run.split()))
    block = 12 * width * width + 13 * width
    shape = {"hidden": width, "layers": layers, "heads": 4, "ffn": 4 * width, "vocab": 256}
    params = layers * block + (2 * 256 + 128 + 2) * width
    setup = Setup(
        model=from_numbers(Model(name="", params=params, **shape)),
        procs_per_node=2,
        strategy=strategy,
        precision="fp32",
        micro_batch=8,
        seq_len=128,
    )
    low, high = memory.CPU_BAND
    assert low <= measured / total(memory.cpu_terms(setup)) <= high


def _peak_of_processes(argv: list[str], env: Mapping[str, str]) -> int:
    """Return the most that the launcher and its ranks had in memory, shared pages counted once."""
    peak = 0
    with subprocess.Popen(
        argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as launcher:
        while launcher.poll() is None:
            peak = max(peak, sum(map(_resident_bytes, descendants(launcher.pid))))
            time.sleep(0.05)
    assert launcher.returncode == 0
    return peak


def _resident_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


MODEL = Model(
    name="toy", params=1_000_000_000, hidden=2048, layers=16, heads=16, kv_heads=16, ffn=8192
)
SETUP = Setup(model=MODEL, nodes=2, procs_per_node=4)


def of_each_param(setup: Setup) -> dict[str, float]:
    """Return bytes of each parameter, by group of files, but for what each rank adds."""
    terms = [term for term in checkpoint_terms(setup) if "ranks" not in term.formula]
    return {term.name: term.bytes / setup.trained for term in terms}


def test_each_engine_saves_its_own_bytes_of_each_parameter() -> None:
    for strategy, (precision, width) in product(
        Strategy, {"fp32": 4, "bf16": 2, "fp16": 2}.items()
    ):
        setup = replace(SETUP, strategy=strategy, precision=precision)
        # ZeRO saves fp32 weights beside the states; stages 1 and 2 also those that it trains with.
        zero = {"weights": width, "optimizer": 12} if strategy.stage < 3 else {"optimizer": 12}
        whole = {"weights": 4, "optimizer": 8}  # whatever the precision
        assert of_each_param(setup) == (zero if strategy.is_deepspeed else whole), setup


def test_lora_saves_the_adapters_alone() -> None:
    for strategy, groups in {
        Strategy.DDP: {"weights": 4, "optimizer": 8},
        Strategy.ZERO2: {"weights": 4, "optimizer": 12},  # peft's file and DeepSpeed's own
        Strategy.ZERO3: {"weights": 2, "optimizer": 12},
    }.items():
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


def test_of_the_best_only_weights_are_counted_and_none_is_in_flight() -> None:
    (weights,) = best_terms(SETUP, 5)
    assert weights.bytes == 5 * 4 * SETUP.model.params
    (adapters,) = best_terms(replace(SETUP, lora=16), 5)
    assert adapters.bytes < weights.bytes / 20
    assert best_terms(SETUP, 0) == ()


# DeepSpeed's estimators, row by row and against the installed ones


MIB = 1 << 20
ZERO2, ZERO3 = TABLES["deepspeed_zero2"], TABLES["deepspeed_zero3"]


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
