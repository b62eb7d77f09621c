"""Parameters counted from configs, from numbers and by name, against transformers' own models."""

from __future__ import annotations

import random
from typing import Any

import pytest

from clusterrun.errors import UsageError
from clusterrun.estimates.models import BUILT_IN, find, from_config, from_numbers
from tests.estimates.golden import TABLES

TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 10,
}


@pytest.mark.parametrize("name", TABLES["models"])
def test_a_built_in_model_has_its_published_size(name: str) -> None:
    model = BUILT_IN[name]
    assert [model.params, model.largest_layer] == TABLES["models"][name]


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("META-LLAMA/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("openai-community/gpt2", "gpt2"),
        ("google-t5/t5-3b", "t5-3b"),
        ("bigscience/T0_3B", "bigscience/T0_3B"),
    ],
)
def test_a_model_is_found_by_its_usual_names(spelling: str, canonical: str) -> None:
    model = find(spelling)
    assert model is not None
    assert (model.name, model.params) == (spelling, BUILT_IN[canonical].params)


@pytest.mark.parametrize("name", ["gpt", "someone/gpt2", "mistralai/Mistral-7B-v0.3", ""])
def test_a_model_of_another_name_is_not_taken_for_one_that_is_known(name: str) -> None:
    assert find(name) is None


def test_every_built_in_shape_is_complete_but_for_t5() -> None:
    without = {name for name, model in BUILT_IN.items() if not model.has_shape}
    assert without == {"t5-large", "t5-3b", "t5-11b", "bigscience/T0_3B", "bigscience/T0"}


def test_one_block_of_llama_has_its_projections_and_two_norms() -> None:
    model = BUILT_IN["llama-3.1-8b"]
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    assert model.block == attention + 3 * 4096 * 14336 + 2 * 4096


def test_tied_embeddings_count_once() -> None:
    untied = from_config(TINY_LLAMA, "tiny")
    tied = from_config({**TINY_LLAMA, "tie_word_embeddings": True}, "tiny")
    assert untied.params - tied.params == 10 * 8


# Configs that can't be read


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "the config of 'mine' has no 'model_type'"),
        ({"model_type": "mamba"}, "models of type 'mamba' can't be counted"),
        ({"model_type": ["llama"]}, "the config of 'mine' has no 'model_type'"),
        ({**TINY_LLAMA, "hidden_size": None}, "the config of 'mine' has no 'hidden_size'"),
        (
            {**TINY_LLAMA, "hidden_size": "8"},
            "'hidden_size' of the config of 'mine' is '8', not a positive number",
        ),
        (
            {**TINY_LLAMA, "hidden_size": 8, "num_attention_heads": 16},
            "'num_attention_heads' of the config of 'mine' is 16, not at most hidden_size, 8",
        ),
        (
            {**TINY_LLAMA, "vocab_size": True},
            "'vocab_size' of the config of 'mine' is True, not a positive number",
        ),
        (
            {**TINY_LLAMA, "tie_word_embeddings": "no"},
            "'tie_word_embeddings' of the config of 'mine' is 'no', not true or false",
        ),
        (
            {**TINY_LLAMA, "architectures": ["LlamaForTokenClassification"]},
            "'LlamaForTokenClassification' of 'mine' can't be counted",
        ),
        (
            {**TINY_LLAMA, "architectures": "LlamaModel"},
            "'architectures' of the config of 'mine' is 'LlamaModel', not a list of class names",
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_an_error_that_says_why(
    config: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError) as raised:
        from_config(config, "mine")
    assert raised.value.message.startswith(says)
    assert "--params" in raised.value.hints[0]


# Numbers given by hand


def test_the_number_of_parameters_is_enough() -> None:
    model = from_numbers(params=8_030_261_248)
    assert (model.params, model.largest_layer, model.has_shape) == (8_030_261_248, 0, False)


def test_a_shape_alone_is_counted_as_llamas() -> None:
    model = from_numbers(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256)
    known = BUILT_IN["llama-3.1-8b"]
    assert (model.params, model.block, model.largest_layer, model.gated) == (
        known.params,
        known.block,
        known.largest_layer,
        True,
    )


def test_a_shape_whose_gates_would_not_fit_has_none() -> None:
    xl = BUILT_IN["gpt2-xl"]
    model = from_numbers(params=xl.params, hidden=1600, layers=48, heads=25, ffn=6400, vocab=50257)
    assert (model.params, model.gated) == (xl.params, False)
    assert model.block == pytest.approx(xl.block, rel=1e-3)  # biases are not known


def test_a_shape_larger_than_the_parameters_is_refused() -> None:
    with pytest.raises(UsageError, match="have more than the 1000000 parameters"):
        from_numbers(params=1_000_000, hidden=4096, layers=32, heads=32, ffn=14336)


def test_half_a_shape_and_no_parameters_says_what_is_missing() -> None:
    with pytest.raises(UsageError, match="--ffn, --vocab missing"):
        from_numbers(hidden=4096, layers=32, heads=32)


@pytest.mark.parametrize("numbers", [{"heads": 3}, {"heads": 8, "kv_heads": 3}])
def test_heads_that_do_not_divide_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="don't divide"):
        from_numbers(params=10**9, hidden=64, **numbers)


# Against transformers


def _random_config(family: str, draw: random.Random) -> dict[str, Any]:
    heads = draw.choice([2, 4, 8])
    kv_heads = draw.choice([1, 2, heads])
    hidden = heads * draw.choice([4, 8])
    shape = {
        "hidden_size": hidden,
        "intermediate_size": draw.randrange(10, 100),
        "num_attention_heads": heads,
        "num_hidden_layers": draw.randrange(1, 5),
        "vocab_size": draw.randrange(50, 300),
    }
    tied = {"tie_word_embeddings": draw.random() < 0.5}
    grouped = {**shape, **tied, "num_key_value_heads": kv_heads}
    configs: dict[str, dict[str, Any]] = {
        "llama": {
            **grouped,
            "attention_bias": draw.random() < 0.5,
            "mlp_bias": draw.random() < 0.5,
        },
        "mistral": {**grouped, "head_dim": draw.choice([4, 16])},
        "qwen2": grouped,
        "qwen3": {**grouped, "head_dim": draw.choice([4, 16])},
        "gpt2": {
            **tied,
            "n_embd": hidden,
            "n_head": heads,
            "n_layer": draw.randrange(1, 5),
            "n_positions": draw.randrange(10, 50),
            "n_inner": draw.choice([None, 24]),
            "vocab_size": draw.randrange(50, 300),
        },
        "gpt_neox": {**shape, **tied, "attention_bias": draw.random() < 0.5},
        "bert": {**shape, "type_vocab_size": draw.choice([1, 2]), "max_position_embeddings": 33},
        "t5": {
            "d_model": hidden,
            "d_kv": draw.choice([4, 16]),
            "d_ff": draw.randrange(10, 100),
            "num_heads": heads,
            "num_layers": draw.randrange(1, 5),
            "num_decoder_layers": draw.randrange(1, 5),
            "vocab_size": draw.randrange(50, 300),
            "feed_forward_proj": draw.choice(["relu", "gated-gelu"]),
            "relative_attention_num_buckets": draw.choice([8, 32]),
        },
    }
    return configs[family]


CLASSES = {
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXModel"),
    "bert": ("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
    "t5": ("T5ForConditionalGeneration", "T5Model"),
}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("family", "architecture"),
    [(family, name) for family, names in CLASSES.items() for name in names],
)
def test_transformers_builds_a_model_of_just_that_many_parameters(
    family: str, architecture: str
) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    draw = random.Random(f"{family} {architecture}")
    for _ in range(5):
        values = _random_config(family, draw)
        config = transformers.AutoConfig.for_model(family, **values)
        with torch.device("meta"):
            built = getattr(transformers, architecture)(config)
        saved = {**config.to_dict(), "architectures": [architecture]}
        counted = from_config(saved, "tiny")
        layers = [sum(p.numel() for p in m.parameters(recurse=False)) for m in built.modules()]
        told = (counted.params, counted.largest_layer)
        assert told == (built.num_parameters(), max(layers)), values


def test_a_model_with_experts_has_a_size_and_no_shape_to_say() -> None:
    with pytest.raises(UsageError) as refused:
        from_config({"model_type": "mixtral", "num_local_experts": 8}, "mine")
    assert refused.value.hints == ("say --params alone: a shape is counted without experts",)
