"""`plan --trace`: what a model without memory saves is what a real one saves, and is told so."""

from __future__ import annotations

import resource
import socket
from collections.abc import Mapping
from typing import Any

import pytest

from clusterrun.advice.trace import model_of, traced, traced_bytes
from clusterrun.config.spec import Strategy
from clusterrun.estimates import activations, memory
from clusterrun.estimates.activations import Activations, Arithmetic
from clusterrun.estimates.estimate import Question, estimate
from clusterrun.estimates.inputs import GIB, Setup, total
from clusterrun.estimates.models import from_config
from tests.estimates.saved import really_saved

SEQUENCES, TOKENS = 3, 200  # 600 is no width of the models here
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 128,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 50}  # which takes a mask
GPT2: dict[str, Any] = {
    **{"model_type": "gpt2", "n_embd": 64, "n_layer": 5, "n_head": 4, "n_positions": 256},
    **{"vocab_size": 128, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
}
CONFIGS = {"llama": LLAMA, "mistral": MISTRAL, "gpt2": GPT2}
OF = {  # a setup that computes so
    Arithmetic.FP32: {"strategy": Strategy.DDP, "precision": "fp32"},
    Arithmetic.AUTOCAST: {"strategy": Strategy.DDP, "precision": "bf16"},
    Arithmetic.HALF: {"strategy": Strategy.ZERO3, "precision": "bf16"},
}


def _setup(values: Mapping[str, Any], arithmetic: Arithmetic, **facts: Any) -> Setup:
    facts = {"seq_len": TOKENS, "micro_batch": SEQUENCES, **OF[arithmetic], **facts}
    return Setup(model=from_config(values, ""), **facts)


def _really_saved(values: Mapping[str, Any], arithmetic: Arithmetic, *, checkpointed: bool) -> int:
    import transformers

    config = transformers.AutoConfig.for_model(**values)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return really_saved(model, arithmetic, (SEQUENCES, TOKENS), checkpointed=checkpointed)


# What is traced


@pytest.mark.torch
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("arithmetic", list(Arithmetic))
@pytest.mark.parametrize("family", list(CONFIGS))
def test_a_model_without_memory_saves_what_a_real_one_saves(
    family: str, arithmetic: Arithmetic, checkpointed: bool
) -> None:
    pytest.importorskip("transformers")
    values = CONFIGS[family]
    told = traced_bytes(values, _setup(values, arithmetic), layers=5, recomputes=checkpointed)
    assert told == _really_saved(values, arithmetic, checkpointed=checkpointed)


@pytest.mark.torch
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_five_layers_save_what_follows_from_one_and_three(family: str, checkpointed: bool) -> None:
    pytest.importorskip("transformers")
    values = CONFIGS[family]
    setup = _setup(values, Arithmetic.AUTOCAST, grad_ckpt=checkpointed)
    found = traced(Question(setup=setup), values).traced
    assert found is not None
    told = (5 * found.kept + found.outside) * SEQUENCES * TOKENS * 64
    assert told == _really_saved(values, Arithmetic.AUTOCAST, checkpointed=checkpointed)


@pytest.mark.torch
def test_one_block_that_is_computed_again_saves_what_it_saves_without() -> None:
    pytest.importorskip("transformers")
    whole, again = (
        traced(Question(setup=_setup(LLAMA, Arithmetic.FP32, grad_ckpt=on)), LLAMA).traced
        for on in (False, True)
    )
    assert whole is not None
    assert again is not None
    assert again.block == whole.block == whole.kept > again.kept


@pytest.mark.torch
def test_logits_are_no_part_of_what_is_traced() -> None:
    pytest.importorskip("transformers")
    setup = _setup(LLAMA, Arithmetic.AUTOCAST)
    few = traced_bytes(LLAMA, setup, layers=1)
    assert traced_bytes({**LLAMA, "vocab_size": 12_800}, setup, layers=1) == few


@pytest.mark.torch
def test_attention_counts_without_dropout_and_what_is_beside_it_with_it() -> None:
    pytest.importorskip("transformers")
    setup = _setup(GPT2, Arithmetic.FP32)
    with_all = traced_bytes({**GPT2, "attn_pdrop": 0.5}, setup, layers=1)
    without_any = traced_bytes({**GPT2, "resid_pdrop": 0.0}, setup, layers=1)
    assert traced_bytes(GPT2, setup, layers=1) == with_all > without_any


@pytest.mark.torch
def test_how_a_config_is_to_be_loaded_changes_nothing_and_asks_no_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")

    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    setup = _setup(LLAMA, Arithmetic.AUTOCAST)
    says = {
        "torch_dtype": "float16",
        "attn_implementation": "kernels-community/flash-attn",
        "auto_map": {"AutoModelForCausalLM": "someone/else--modeling.Other"},
    }
    assert traced_bytes({**LLAMA, **says}, setup, layers=1) == traced_bytes(LLAMA, setup, layers=1)


@pytest.mark.torch
def test_a_large_model_is_traced_without_its_memory() -> None:
    pytest.importorskip("transformers")
    large = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    setup = _setup(large, Arithmetic.FP32, seq_len=2048)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert traced_bytes(large, setup, layers=3) > 10 * GIB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GIB // 1024


@pytest.mark.torch
def test_a_list_of_a_value_for_each_layer_is_cut() -> None:
    pytest.importorskip("transformers")
    values = {**LLAMA, "model_type": "qwen2", "layer_types": 5 * ["full_attention"]}
    setup = _setup(values, Arithmetic.FP32)
    assert traced_bytes(values, setup, layers=1) < traced_bytes(values, setup, layers=3)


# What becomes of it

SEEN = Activations(block=60, kept=3, outside=7, source="seen", is_traced=True)


def _terms(setup: Setup, seen: Activations | None) -> dict[str, tuple[int, str, str]]:
    terms = memory.gpu_terms(setup, traced=seen)
    return {term.name: (term.bytes, term.formula, term.source) for term in terms}


@pytest.mark.parametrize("grad_ckpt", [False, True])
def test_what_was_traced_takes_the_place_of_activations_and_of_nothing_else(
    grad_ckpt: bool,
) -> None:
    setup = _setup(LLAMA, Arithmetic.AUTOCAST, grad_ckpt=grad_ckpt)
    told, seen = _terms(setup, None), _terms(setup, SEEN)
    names = (
        {"checkpointed activations", "one block's activations"} if grad_ckpt else {"activations"}
    )
    assert {name for name in seen if seen[name] != told.get(name)} == {*names, "outside of blocks"}
    assert all(seen[name][2] == "seen" and seen[name][1].endswith(", traced") for name in names)
    assert told.keys() == seen.keys() - {"outside of blocks"}


def test_the_bytes_follow_the_formulas_that_are_shown() -> None:
    elements = SEQUENCES * TOKENS * 64
    whole = _terms(_setup(LLAMA, Arithmetic.AUTOCAST), SEEN)
    again = _terms(_setup(LLAMA, Arithmetic.AUTOCAST, grad_ckpt=True), SEEN)
    each, one = activations.EACH_BLOCK, activations.ONE_BLOCK
    assert whole["activations"][0] == int(60 * (each * 5 + one) * elements)
    assert whole["outside of blocks"][:2] == (7 * elements, "7 s b h, traced")
    assert again["checkpointed activations"][:2] == (3 * 4 * elements, "3 s b h (L - 1), traced")
    assert again["one block's activations"][0] == int(60 * (each + one) * elements)


def test_on_cpus_a_traced_sum_has_no_measured_band() -> None:
    setup = _setup(LLAMA, Arithmetic.FP32)
    told = estimate(Question(setup=setup, is_cpu=True)).host_memory
    seen = estimate(Question(setup=setup, is_cpu=True, traced=SEEN)).host_memory
    assert (told.band, seen.band) == (memory.CPU_BAND, None)
    assert "seen" in {term.source for term in seen.terms}


# The peak of all live tensors of two whole steps, on tensors without memory


def _peak(values: Mapping[str, Any], setup: Setup) -> int:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model_of(values, setup, layers=setup.model.layers)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # as on a GPU
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    words = torch.zeros(setup.micro_batch, setup.seq_len, dtype=torch.long)
    with tracker:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=words, labels=words).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()  # else it refuses a second step
    (sizes,) = tracker.get_tracker_snapshot("peak").values()
    return int(sizes["Total"])


@pytest.mark.torch
def test_a_step_on_one_gpu_stays_below_what_is_traced_and_not_far() -> None:
    pytest.importorskip("transformers")
    shape = {"n_embd": 1024, "n_layer": 4, "n_head": 16, "n_positions": 1024, "vocab_size": 32_000}
    values = {**GPT2, **shape}
    setup = _setup(values, Arithmetic.AUTOCAST, seq_len=1024, micro_batch=8)
    seen = traced(Question(setup=setup), values).traced
    told = total(memory.gpu_terms(setup, traced=seen)) - memory.CUDA_BYTES
    assert 0.7 * told < _peak(values, setup) <= told
