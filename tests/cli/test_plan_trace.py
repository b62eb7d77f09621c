"""`plan --trace`: what is printed of a traced model, and what is refused in one line."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from tests.cli.conftest import CommandLine, Said

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
T5 = {"model_type": "t5", "d_model": 64, "num_heads": 4, "d_kv": 16, "d_ff": 128}
SHAPE = ("--hidden", "64", "--layers", "4", "--heads", "4", "--ffn", "160", "--vocab", "128")
NUMBERS = ("--params", "1e6", *SHAPE)
GPUS = ("--gpu", "a100-40g", "--gpus-per-node", "2", "--micro-batch", "2")


def _plan(here: CommandLine, values: dict[str, Any], *argv: str, length: str = "256") -> Said:
    (here.path / "config.json").write_text(json.dumps(values))
    length_options = ("--seq-len", length) if length else ()
    return here("plan", "--model", "config.json", "--trace", *length_options, *argv)


def _told(
    here: CommandLine, values: dict[str, Any], *argv: str, length: str = "256"
) -> dict[str, Any]:
    said = _plan(here, values, *argv, "--json", length=length)
    assert said.code == 0, said.err
    found: dict[str, Any] = json.loads(said.out)
    return found


# What is told


@pytest.mark.torch
def test_a_person_sees_what_was_traced(here: CommandLine) -> None:
    pytest.importorskip("transformers")
    said = _plan(here, LLAMA, *GPUS, "--explain")
    assert said.code == 0, said.err
    assert re.search(r"  activations .* [0-9.]+ s b h \(1.15 L \+ 0.35\), traced\n", said.out)
    assert re.search(r"  outside of blocks .* [0-9.]+ s b h, traced\n", said.out)
    assert re.search(r"  logits .* 16 s b V\n", said.out)
    assert "estimated from formulas and a traced forward pass" in said.err


@pytest.mark.torch
def test_a_program_sees_the_source_of_each_term(here: CommandLine) -> None:
    transformers = pytest.importorskip("transformers")
    answer = _told(here, LLAMA, *GPUS, "--grad-ckpt")
    sources = {term["name"]: term["source"] for term in answer["gpu_memory"]["terms"]}
    is_traced = {name for name, source in sources.items() if source.startswith("traced on a CPU")}
    assert is_traced == {"checkpointed activations", "one block's activations", "outside of blocks"}
    assert f"transformers {transformers.__version__}" in sources["checkpointed activations"]


@pytest.mark.torch
@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2"])
def test_a_built_in_model_is_built_as_its_config_says(here: CommandLine, name: str) -> None:
    pytest.importorskip("transformers")
    said = here("plan", "--model", name, "--seq-len", "1024", "--trace", "--host-mem", "2TiB")
    assert said.code == 1, said.err  # no GPU is named, so there is no verdict
    assert "and a traced forward pass" in said.err


@pytest.mark.torch
def test_numbers_beside_a_config_give_the_size_of_a_family_that_can_not_be_counted(
    here: CommandLine,
) -> None:
    pytest.importorskip("transformers")
    answer = _told(here, {**LLAMA, "model_type": "gemma"}, *NUMBERS, *GPUS)
    assert answer["inputs"]["model"]["params"] == 1_000_000
    assert "activations" in {
        term["name"]
        for term in answer["gpu_memory"]["terms"]
        if term["source"].startswith("traced")
    }


@pytest.mark.torch
def test_each_neighbour_is_traced_by_itself(here: CommandLine) -> None:
    pytest.importorskip("transformers")
    window = {**LLAMA, "model_type": "mistral", "sliding_window": 100}  # no line of the length
    around = _told(here, window, *GPUS, "--what-if", "seq-len")["what_if"]
    for found in around:
        alone = _told(here, window, *GPUS, length=str(found["seq_len"]))
        assert found["gpu_bytes"] == alone["gpu_memory"]["total_bytes"]
    assert [found["seq_len"] for found in around] == [128, 512]


@pytest.mark.torch
def test_a_neighbour_that_the_model_does_not_allow_is_named(here: CommandLine) -> None:
    pytest.importorskip("transformers")
    said = _plan(here, LLAMA, *GPUS, "--what-if", "seq-len")
    left_out = "a variant is left out: samples of 1,024 tokens are longer than the model's 512"
    assert left_out in said.err


@pytest.mark.torch
def test_what_to_start_with_is_told_beside_a_trace(here: CommandLine) -> None:
    pytest.importorskip("transformers")
    assert _told(here, LLAMA, "--gpu", "a100-40g")["preset"]["micro_batch"] > 1


# What is refused


def _refused(said: Said, error: str, hint: str) -> None:
    assert said.code == 2, said.out
    assert said.out == ""
    first, *others = said.err.splitlines()
    assert error in first
    assert first.startswith("error: ")
    assert hint in others[-1]
    assert len(others) <= 2  # a cause, where there is one, and a hint


@pytest.mark.parametrize(
    ("argv", "error", "hint"),
    [
        ((*NUMBERS, "--seq-len", "8"), "not numbers alone", "--model config.json"),
        (
            ("--model", "someone/else", *NUMBERS, "--seq-len", "8"),
            "'someone/else' is not a known model",
            "hf download someone/else config.json",
        ),
        (("--model", "gpt2"), "needs the length of a sample", "--seq-len"),
        (("--model", "gpt2", "--seq-len", "8", "--lora", "4"), "LoRA", "omit --trace"),
        (("--model", "gpt2", "--recommend"), "--recommend", "trace the setup"),
        (("--compare", "17"), "--compare", "trace the setup"),
    ],
)
def test_what_can_not_be_traced_is_refused(
    here: CommandLine, argv: tuple[str, ...], error: str, hint: str
) -> None:
    _refused(here("plan", "--trace", *argv), error, hint)


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_a_library_that_is_missing_is_named_with_the_way_to_install_it(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None if name == library else object())
    _refused(_plan(here, LLAMA), "needs torch and transformers", "pip install torch transformers")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("values", "argv", "error", "hint"),
    [
        ({**LLAMA, "model_type": "own"}, NUMBERS, "no models of type 'own'", "omit"),
        (
            {**LLAMA, "model_type": "own", "auto_map": {"AutoConfig": "x.Y"}},
            NUMBERS,
            "the config's own code is never run",
            "omit",
        ),
        (
            {**T5, "vocab_size": 128, "num_layers": 2},
            (),
            "'t5' models are not causal language models",
            "omit",
        ),
        ({**LLAMA, "num_attention_heads": 5}, NUMBERS, "can't be traced", "omit"),
        ({**LLAMA, "hidden_act": "nonsense"}, (), "can't be traced", "omit"),
        ({**LLAMA, "max_position_embeddings": 100}, (), "longer than the model's 100", "--seq-len"),
        (LLAMA, ("--params", "1e6"), "needs the model's shape", "--hidden"),
        (LLAMA, (*NUMBERS, "--layers", "3"), "the config has 4 layers of width 64", "config"),
        ({**LLAMA, "num_local_experts": 4}, (), "mixture-of-experts", "omit"),
        (
            {
                **{**LLAMA, "model_type": "qwen2", "use_sliding_window": True},
                "layer_types": 2 * ["full_attention", "sliding_attention"],
            },
            (),
            "one kind, not full_attention, sliding_attention",
            "omit",
        ),
    ],
)
def test_a_config_that_can_not_be_traced_is_refused(
    here: CommandLine, values: dict[str, Any], argv: tuple[str, ...], error: str, hint: str
) -> None:
    pytest.importorskip("transformers")
    _refused(_plan(here, values, *argv), error, hint)


@pytest.mark.torch
def test_a_mask_too_large_to_be_made_is_refused(here: CommandLine) -> None:
    pytest.importorskip("transformers")
    said = here("plan", "--model", "mistral-7b", "--seq-len", "16384", "--trace")
    _refused(said, "longer than the window of 4,096", "omit --trace")
