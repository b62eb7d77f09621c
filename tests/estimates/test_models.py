"""Parameters counted from configs, from numbers and by name, against transformers' own models."""

from __future__ import annotations

import random
from typing import Any

import pytest

from clusterrun.errors import UsageError
from clusterrun.estimates.models import BUILT_IN, find, from_config, from_numbers, nearest
from clusterrun.shared import assets
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


KNOWN = assets.read_json("estimates/models.json")["models"]


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_model_has_the_size_of_its_repository(name: str) -> None:
    entry, model = KNOWN[name], BUILT_IN[name]
    assert model.params == pytest.approx(entry["published"], rel=1e-4)
    assert all(repo.count("/") == 1 for repo in entry["repos"])
    assert (model.active_params > 0) == ("active" in entry)
    if "active" in entry:
        words = model.vocab * model.hidden  # some cards leave them out
        near = min(
            abs(found / entry["active"] - 1)
            for found in (model.active_params, model.active_params - words)
        )
        assert near < 0.03


def test_the_known_models_are_those_that_people_train_now() -> None:
    wanted = (
        "llama-3.1-8b llama-3.2-3b llama-3.3-70b qwen2.5-7b qwen3-8b qwen3-30b-a3b gemma-2-9b "
        "gemma-3-4b phi-3-mini phi-4 mistral-7b mistral-nemo-12b mistral-small-24b mixtral-8x7b "
        "deepseek-v2-lite deepseek-v3 deepseek-r1 deepseek-r1-distill-qwen-7b gpt-oss-20b "
        "gpt-oss-120b smollm2-1.7b smollm3-3b olmo-2-7b bert-base-uncased vit-base t5-3b"
    )
    assert set(wanted.split()) <= set(BUILT_IN)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("qwen-3-8b", "qwen3-8b"),
        ("llama3.1-8b", "llama-3.1-8b"),
        ("unsloth/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("gpt5", "gpt2"),
    ],
)
def test_a_name_that_is_nearly_right_has_a_nearest_one(name: str, near: str) -> None:
    assert find(name) is None
    assert nearest(name)[0] == near
    assert nearest("nothing-like-it") == []


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("Qwen/Qwen3-8B-Instruct", "qwen3-8b"),
        ("qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("google/gemma-3-4b-it", "gemma-3-4b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b"),
        ("microsoft/Phi-3.5-mini-instruct", "phi-3-mini"),
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


@pytest.mark.parametrize("name", ["gpt", "someone/gpt2", "mistralai/Mistral-7B-v0.4", ""])
def test_a_model_of_another_name_is_not_taken_for_one_that_is_known(name: str) -> None:
    assert find(name) is None


def test_every_built_in_shape_is_complete() -> None:
    assert not {name for name, model in BUILT_IN.items() if not model.has_shape}


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
            "class 'LlamaForTokenClassification' of 'mine' can't be counted",
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
    with pytest.raises(UsageError, match="do not fit together"):
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
        "mixtral": {**grouped, "num_local_experts": 6, "num_experts_per_tok": 2},
        "qwen2_moe": {
            **grouped,
            **_experts_of_some_layers(draw),
            "shared_expert_intermediate_size": 20,
            "qkv_bias": draw.random() < 0.5,
        },
        "qwen3_moe": {
            **grouped,
            **_experts_of_some_layers(draw),
            "head_dim": draw.choice([4, 16]),
            "attention_bias": draw.random() < 0.5,
        },
        "gemma": {**grouped, "head_dim": draw.choice([4, 16])},
        "gemma2": {**grouped, "head_dim": draw.choice([4, 16])},
        "gemma3_text": {**grouped, "head_dim": draw.choice([4, 16])},
        "olmo2": grouped,
        "phi3": {**grouped, "pad_token_id": 0},
        "smollm3": {**grouped, "mlp_bias": draw.random() < 0.5, "pad_token_id": 0},
        "gpt_oss": {
            **grouped,
            "head_dim": draw.choice([4, 16]),
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
        "deepseek_v2": {**shape, **tied, **_latent(draw)},
        "deepseek_v3": {**shape, **tied, **_latent(draw)},
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
        "vit": {**shape, "image_size": 64, "patch_size": draw.choice([8, 16])},
        "gemma3": {
            **tied,
            "text_config": {**grouped, "head_dim": 16},
            "vision_config": {**shape, "image_size": 64, "vision_use_head": False},
        },
        "mistral3": {
            **tied,
            "text_config": {**grouped, "model_type": "mistral", "head_dim": 16},
            "vision_config": {**shape, "model_type": "pixtral"},
            "multimodal_projector_bias": draw.random() < 0.5,
        },
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


def _experts_of_some_layers(draw: random.Random) -> dict[str, Any]:
    return {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": draw.randrange(10, 50),
        "decoder_sparse_step": draw.choice([1, 2]),
        "mlp_only_layers": draw.choice([[], [0]]),
    }


def _latent(draw: random.Random) -> dict[str, Any]:
    return {
        "moe_intermediate_size": 12,
        "n_routed_experts": 8,
        "n_shared_experts": draw.choice([1, 2]),
        "num_experts_per_tok": 2,
        "first_k_dense_replace": draw.choice([0, 1]),
        "q_lora_rank": draw.choice([None, 6]),
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_group": 1,
        "topk_group": 1,
        "attention_bias": draw.random() < 0.5,
    }


CLASSES = {
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
    "mixtral": ("MixtralForCausalLM", "MixtralModel"),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    "gemma": ("GemmaForCausalLM", "GemmaModel"),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Model"),
    "gemma3_text": ("Gemma3ForCausalLM", "Gemma3TextModel"),
    "gemma3": ("Gemma3ForConditionalGeneration",),
    "mistral3": ("Mistral3ForConditionalGeneration",),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Model"),
    "phi3": ("Phi3ForCausalLM", "Phi3Model"),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Model"),
    "gpt_oss": ("GptOssForCausalLM", "GptOssModel"),
    "vit": ("ViTForImageClassification", "ViTModel"),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Model"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Model"),
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
        counted = from_config({**config.to_dict(), "architectures": [architecture]}, "tiny")
        layers = [sum(p.numel() for p in m.parameters(recurse=False)) for m in built.modules()]
        told = (counted.params, counted.largest_layer)
        assert told == (built.num_parameters(), max(layers)), values


# Models with experts


MIXTRAL, QWEN_3_30B, DEEPSEEK_V3 = (
    KNOWN[name]["config"] for name in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
)


def test_the_idle_experts_of_a_block_are_all_that_a_token_does_not_meet() -> None:
    model = from_config(MIXTRAL, "mixtral")
    assert model.params - model.active_params == 32 * (8 - 2) * 3 * 4096 * 14336


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' of the config of 'mine' is 9, not at"),
        ({"num_experts_per_tok": None}, "the config of 'mine' has no 'num_experts_per_tok'"),
        ({"num_local_experts": 0}, "'num_local_experts' of the config of 'mine' is 0"),
    ],
)
def test_experts_that_cannot_be_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        from_config({**MIXTRAL, **changes}, "mine")


def test_layers_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="is 62, not at most num_hidden_layers, 61"):
        from_config({**DEEPSEEK_V3, "first_k_dense_replace": 62}, "mine")
    with pytest.raises(UsageError, match=r"'mlp_only_layers' .* is 3, not a list of layers"):
        from_config({**QWEN_3_30B, "mlp_only_layers": 3}, "mine")


def test_a_family_with_experts_that_is_not_known_has_sizes_to_say() -> None:
    with pytest.raises(UsageError) as refused:
        from_config({"model_type": "dbrx", "num_experts": 16}, "mine")
    hint = "pass only --params and --active-params: the other options describe no experts"
    assert refused.value.hints == (hint,)


def test_more_active_parameters_than_there_are_are_refused() -> None:
    with pytest.raises(UsageError, match="--active-params 20 is more than --params 10"):
        from_numbers(params=10, active_params=20)
