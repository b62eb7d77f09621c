"""Find the size and shape of a model from a config.json, from numbers, or from a name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from clusterrun.errors import UsageError
from clusterrun.estimates.anatomy import Config, attention, built, gated
from clusterrun.estimates.architectures import count_model
from clusterrun.estimates.inputs import Model


def from_config(config: Mapping[str, Any], name: str) -> Model:
    """Count a model from the content of its config.json, as transformers would build it.

    `architectures` decides whether a language head counts. Raises UsageError for a family, a class
    or a value that can't be read.
    """
    known = Config(name=name, values=config)
    source = f"counted from the config ({config.get('model_type')})"
    return replace(count_model(known), source=source, positions=_positions(known))


def _positions(config: Config) -> int:
    keys = ("n_positions", "max_position_embeddings")
    return max(0 if config.values.get(key) is None else config.number(key) for key in keys)


def from_numbers(
    *,
    params: int = 0,
    active_params: int = 0,
    hidden: int = 0,
    layers: int = 0,
    heads: int = 0,
    kv_heads: int = 0,
    ffn: int = 0,
    vocab: int = 0,
) -> Model:
    """Describe a model by its parameters, its shape, or both.

    Without `params` the whole shape is needed, and counted as Llama's (`kv_heads` 0 means `heads`).
    With both, blocks have gates as Llama's if they fit into `params`. `active_params` are those
    that work on a token, 0 if all do.
    """
    if active_params > params:
        raise UsageError(
            f"--active-params {active_params} are more than --params {params}",
            hint="--params are all of them, --active-params those that work on a token",
        )
    numbers = {"hidden": hidden, "layers": layers, "heads": heads, "ffn": ffn, "vocab": vocab}
    missing = [f"--{key}" for key, value in numbers.items() if not value]
    if not params and missing:
        raise UsageError(
            f"the size of the model is not known: {', '.join(missing)} missing", hint="or --params"
        )
    kv_heads = kv_heads or heads
    if heads and (hidden % heads or heads % kv_heads):
        raise UsageError(
            f"--hidden {hidden}, --heads {heads} and --kv-heads {kv_heads} don't divide",
            hint="heads share the hidden size, and the heads of keys and values, evenly",
        )
    shape = Model(
        name="",
        params=params,
        active_params=active_params,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        source="numbers given" if params else "counted from the shape, as Llama's",
    )
    is_whole = hidden and layers and heads and ffn
    return replace(_shaped(shape), active_params=active_params) if is_whole else shape


def _shaped(shape: Model) -> Model:
    hidden, ffn, layers, params = shape.hidden, shape.ffn, shape.layers, shape.params
    mlp = gated(hidden, ffn)
    block = (
        *attention(hidden, hidden, hidden * shape.kv_heads // shape.heads),
        *mlp,
        hidden,
        hidden,
    )
    has_gate = not params or layers * sum(block) <= params
    if not has_gate:
        block = (*block[:5], *block[6:])
    if params and layers * sum(block) > params:
        raise UsageError(
            f"{layers} layers of --hidden {hidden} and --ffn {ffn} have more than the "
            f"{params} parameters of --params",
            hint="leave out --params, or the shape",
        )
    outer = (*2 * (shape.vocab * hidden,), hidden)
    model = built(replace(shape, gated=has_gate), outer, ((layers, block),))
    return replace(model, params=params) if params else model


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, positions: int
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    shape = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024}
    return {"model_type": "gpt2", **shape, "vocab_size": 50257}


def _t5(hidden: int, heads: int, head_dim: int, ffn: int, layers: int = 24) -> dict[str, Any]:
    shape = {"d_model": hidden, "num_heads": heads, "d_kv": head_dim, "d_ff": ffn}
    return {"model_type": "t5", **shape, "num_layers": layers, "vocab_size": 32128}


# From their configs on the Hugging Face Hub; T0 without its language head, as published.
_T0 = {"feed_forward_proj": "gated-gelu", "architectures": ["T5Model"]}
_CONFIGS: Mapping[str, dict[str, Any]] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "bert-base-cased": {
        "model_type": "bert",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 28996,
    },
    "t5-small": _t5(512, 8, 64, 2048, 6),
    "t5-base": _t5(768, 12, 64, 3072, 12),
    "t5-large": _t5(1024, 16, 64, 4096),
    "t5-3b": _t5(1024, 32, 128, 16384),
    "t5-11b": _t5(1024, 128, 128, 65536),
    "bigscience/T0_3B": {**_t5(2048, 32, 64, 5120), **_T0},
    "bigscience/T0": {**_t5(4096, 64, 64, 10240), **_T0},
    "llama-2-7b": _llama(4096, 32, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": _llama(5120, 40, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": _llama(8192, 80, 64, 8, 28672, 32000, 4096),
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 14336, 128256, 131072),
    "llama-3.1-70b": _llama(8192, 80, 64, 8, 28672, 128256, 131072),
    "mistral-7b": {**_llama(4096, 32, 32, 8, 14336, 32000, 32768), "model_type": "mistral"},
}

BUILT_IN: Mapping[str, Model] = {
    name: replace(from_config(config, name), source="built in") for name, config in _CONFIGS.items()
}

# Other names of the same sizes: repositories of the Hub, and variants that are trained further. Not
# Mistral v0.3, which has more words.
_SPELLINGS = re.compile(
    r"(?:openai-community/|google-bert/|google-t5/)?(gpt2(?:-xl)?|bert-base-cased|t5-(?:small|base|large|3b|11b))"
    r"|(?:meta-llama/)?(llama-2-\d+b)(?:-chat)?(?:-hf)?"
    r"|(?:meta-llama/)?(?:meta-)?(llama-3\.1-\d+b)(?:-instruct)?"
    r"|(?:mistralai/)?(mistral-7b)(?:-v0\.1|-instruct-v0\.[12])?"
    r"|(?:bigscience/)?(?:(t0_3b)|(t0)p{0,2})"
)


def _known(name: str) -> str:
    """Return the name by which a model is built in; "" if it is not."""
    found = _SPELLINGS.fullmatch(name.lower())
    known = found[found.lastindex or 0] if found else ""
    known = {"t0": "bigscience/T0", "t0_3b": "bigscience/T0_3B"}.get(known, known)
    return known if known in BUILT_IN else ""


def find(name: str) -> Model | None:
    """Return a built-in model by one of its usual names, whatever their case; else None."""
    known = BUILT_IN.get(_known(name))
    return None if known is None else replace(known, name=name)


def find_config(name: str) -> Mapping[str, Any] | None:
    """Return the config of a built-in model by one of its usual names; else None."""
    return _CONFIGS.get(_known(name))
