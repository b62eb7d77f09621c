"""Models by name and by numbers, against their published sizes."""

from __future__ import annotations

import pytest

from clusterrun.errors import UsageError
from clusterrun.estimates.inputs import Model
from clusterrun.estimates.models import BUILT_IN, find, from_numbers, nearest
from clusterrun.shared import assets
from tests.estimates.golden import TABLES

PUBLISHED = TABLES["models"]
KNOWN = assets.read_json("estimates/models.json")["models"]


def test_a_model_has_the_size_that_was_published_and_that_of_its_repository() -> None:
    sizes = {name: [BUILT_IN[name].params, BUILT_IN[name].largest_layer] for name in PUBLISHED}
    assert sizes == PUBLISHED
    for name, entry in KNOWN.items():
        model = BUILT_IN[name]
        assert model.params == pytest.approx(entry["published"], rel=1e-4), name
        assert all(repo.count("/") == 1 for repo in entry["repos"])
        assert (model.active_params > 0) == ("active" in entry), name
        if "active" in entry:
            words = model.vocab * model.hidden  # some cards leave them out
            counts = (model.active_params, model.active_params - words)
            assert min(abs(found / entry["active"] - 1) for found in counts) < 0.03, name


def test_the_known_models_are_those_that_people_train_now() -> None:
    wanted = (
        "llama-3.1-8b llama-3.2-3b llama-3.3-70b qwen2.5-7b qwen3-8b qwen3-30b-a3b gemma-2-9b "
        "gemma-3-4b phi-3-mini phi-4 mistral-7b mistral-nemo-12b mistral-small-24b mixtral-8x7b "
        "deepseek-v2-lite deepseek-v3 deepseek-r1 deepseek-r1-distill-qwen-7b gpt-oss-20b "
        "gpt-oss-120b smollm2-1.7b smollm3-3b olmo-2-7b bert-base-uncased vit-base t5-3b"
    )
    assert set(wanted.split()) <= set(BUILT_IN)


def test_a_name_that_is_nearly_right_has_a_nearest_one() -> None:
    near = {
        "qwen-3-8b": "qwen3-8b",
        "llama3.1-8b": "llama-3.1-8b",
        "unsloth/Llama-3.1-8B-Instruct": "llama-3.1-8b",
        "gpt5": "gpt2",
    }
    assert {name: nearest(name)[0] for name in near} == near
    assert nearest("nothing-like-it") == []
    others = ("gpt", "someone/gpt2", "mistralai/Mistral-7B-v0.4", "", *near)
    assert [name for name in others if find(name)] == []


def test_a_model_is_found_by_its_usual_names() -> None:
    for spelling, known in {
        "Qwen/Qwen3-8B-Instruct": "qwen3-8b",
        "qwen3-8B": "qwen3-8b",
        "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
        "google/gemma-3-4b-it": "gemma-3-4b",
        "mistralai/Mistral-7B-v0.3": "mistral-7b-v0.3",
        "mistralai/Mistral-7B-Instruct-v0.2": "mistral-7b",
        "microsoft/Phi-3.5-mini-instruct": "phi-3-mini",
        "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
        "llama-3.1-8b": "llama-3.1-8b",
        "META-LLAMA/Meta-Llama-3.1-70B-Instruct": "llama-3.1-70b",
        "meta-llama/Llama-2-7b-hf": "llama-2-7b",
        "mistralai/Mistral-7B-v0.1": "mistral-7b",
        "openai-community/gpt2": "gpt2",
        "google-t5/t5-3b": "t5-3b",
        "bigscience/T0_3B": "bigscience/T0_3B",
    }.items():
        model = find(spelling)
        assert model is not None
        assert (model.name, model.params) == (spelling, BUILT_IN[known].params)


# Numbers given by hand


def of_shape(**numbers: int) -> Model:
    return from_numbers(Model(**{"name": "", "params": 0, **numbers}))  # type: ignore[arg-type]


def test_a_shape_alone_is_counted_as_llamas_unless_its_gates_would_not_fit() -> None:
    known, xl = BUILT_IN["llama-3.1-8b"], BUILT_IN["gpt2-xl"]
    model = of_shape(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256)
    found = (model.params, model.block, model.largest_layer, model.gated)
    assert found == (known.params, known.block, known.largest_layer, True)
    model = of_shape(params=xl.params, hidden=1600, layers=48, heads=25, ffn=6400, vocab=50257)
    assert (model.params, model.gated) == (xl.params, False)
    assert model.block == pytest.approx(xl.block, rel=1e-3)  # biases are not known


def test_numbers_that_contradict_each_other_are_refused() -> None:
    for numbers, message in [
        ({"params": 10**6, "hidden": 4096, "layers": 32, "heads": 32, "ffn": 14336}, "more param"),
        ({"params": 10, "active_params": 20}, "--active-params 20 is more than --params 10"),
    ]:
        with pytest.raises(UsageError, match=message):
            of_shape(**numbers)
