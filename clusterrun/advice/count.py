"""Count a model with transformers: a config.json on standard input, the numbers on output.

The job's Python runs the text of this file; it may be older, and need not have clusterrun. The
config is from strangers: its own code is never run, and its model has no memory.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MEMORY_BYTES = 8 << 30
# Keys of a config about how a model was trained or is loaded, not about its shape.
LOADING = (
    *("dtype", "torch_dtype", "attn_implementation", "_attn_implementation"),
    *("auto_map", "quantization_config"),
)
HEADS = ("ImageTextToText", "SpeechSeq2Seq", "Seq2SeqLM", "CausalLM", "ImageClassification")
# Names of the second matrix that a gate needs, and of norms of queries and keys.
GATE = re.compile(r"gate_|\.wi_1\.|\.w3\.|\.v1|\.Wi\.|glu")
HEAD_NORM = re.compile(r"\.[qk]_(layer)?norm\.")


def main() -> None:
    """Print the numbers, or what is missing or wrong."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        answer: dict[str, Any] = {"missing": str(error)}
    else:
        try:
            answer = counted(json.load(sys.stdin), transformers)
        except Exception as error:  # noqa: BLE001 a config can cause any
            answer = {"wrong": f"{type(error).__name__}: {error}"}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


def counted(values: Mapping[str, Any], transformers: Any) -> dict[str, Any]:
    """Build a config's model without memory, and return what clusterrun's `Model` needs."""
    family = values.get("model_type")
    if not isinstance(family, str) or family not in transformers.CONFIG_MAPPING:
        version = transformers.__version__
        raise ValueError(f"transformers {version} has no models of type {family!r}")
    config = transformers.CONFIG_MAPPING[family].from_dict(
        {key: each for key, each in values.items() if key not in LOADING}
    )
    model, text = _built(_class(config, transformers), config), config.get_text_config()
    # The shape is that of the language model; an image encoder beside it only has parameters.
    language = model if text is config else _built(transformers.AutoModel, text)
    params, shape = _size(model.parameters()), _shape(text, language)
    idle = shape.pop("idle")
    return {
        **shape,
        "params": params,
        "active_params": params - idle if idle else 0,
        "largest_layer": max(_size(each.parameters(recurse=False)) for each in model.modules()),
    }


def _class(config: Any, transformers: Any) -> Any:
    """Return the class that the config names, else that of its first task in HEADS."""
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if getattr(named, "config_class", None) is type(config):
        return named
    usual = [getattr(transformers, f"AutoModelFor{head}", None) for head in HEADS]
    found = (auto for auto in usual if auto and type(config) in auto._model_mapping)
    return next(found, transformers.AutoModel)


def _built(kind: Any, config: Any) -> Any:
    import torch

    with torch.device("meta"):
        if hasattr(kind, "from_config"):  # only Auto classes have it
            return kind.from_config(config, trust_remote_code=False)
        return kind(config)


def _shape(config: Any, model: Any) -> dict[str, Any]:
    blocks = list(_blocks(config, model))
    named = [(f".{name}", each) for block in blocks for name, each in block.named_parameters()]
    names = " ".join(name for name, _ in named)
    routed = _size(each for name, each in named if ".experts." in name)
    decoders = _number(config, "num_decoder_layers", "decoder_layers")
    vocab = _number(config, "vocab_size")
    positions = _number(config, "max_position_embeddings", "n_positions")
    if not vocab:  # an image: its patches, and the class token
        side = _number(config, "image_size") // (_number(config, "patch_size") or 1)
        positions = side**2 + 1
    return {
        **_attention(config),
        **_feed_forward(config, routed),
        "linear_params": _size(each for _, each in named) - routed,
        "block": max((_size(block.parameters()) for block in blocks), default=0),
        "layers": len(blocks) or _number(config, "num_hidden_layers"),
        "cross_layers": decoders if config.is_encoder_decoder else 0,
        "vocab": vocab,
        "gated": bool(GATE.search(names)),
        "head_norm": bool(HEAD_NORM.search(names)),
        "family": config.model_type,
        "positions": positions,
        "is_text": vocab > 0,
    }


def _blocks(config: Any, model: Any) -> Iterator[Any]:
    """Yield the blocks: what is in the outermost lists that are as long as the config says."""
    lengths = [each for key, each in config.to_dict().items() if "layer" in key]
    for child in model.children():
        if type(child).__name__ != "ModuleList":
            yield from _blocks(config, child)
        elif len(child) in lengths:
            yield from child


def _attention(config: Any) -> dict[str, int]:
    """Return the heads and their width, 0 if they share the hidden size.

    Multi-head latent attention (MLA, arXiv:2405.04434) makes keys and values for each head. Queries
    and keys are wider than values: `Model` has one width, so it gets the mean.
    """
    heads = _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads") or heads
    width = _number(config, "head_dim", "d_kv")
    if _number(config, "kv_lora_rank"):
        key_width = _number(config, "qk_nope_head_dim") + _number(config, "qk_rope_head_dim")
        kv_heads, width = heads, (key_width + _number(config, "v_head_dim")) // 2
    return {
        "hidden": _number(config, "hidden_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": width,
    }


def _feed_forward(config: Any, routed: int) -> dict[str, int]:
    """Return the width that a token uses, and how many of the `routed` parameters it does not."""
    dense = _number(config, "intermediate_size", "d_ff", "ffn_dim", "n_inner", "ffn_hidden_size")
    dense = dense or 4 * _number(config, "hidden_size")
    if not routed:
        return {"ffn": dense, "idle": 0}
    experts = _number(config, "num_local_experts", "num_experts", "n_routed_experts")
    met = _number(config, "num_experts_per_tok", "num_experts_per_token")
    if not 0 < met <= experts:
        raise ValueError(f"a token cannot use {met} of {experts} experts")
    each = _number(config, "moe_intermediate_size") or dense
    shared = _number(config, "shared_expert_intermediate_size", "shared_intermediate_size")
    shared = shared or each * _number(config, "n_shared_experts")
    return {
        "ffn": met * each + shared,
        "experts_met": met,
        "expert_ffn": each,
        "idle": routed * (experts - met) // experts,
    }


def _number(config: Any, *names: str) -> int:
    """Return the first of these keys that is a number; 0 without any."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if type(value) is int), 0)


def _size(parameters: Iterable[Any]) -> int:
    return sum(each.numel() for each in parameters)


if __name__ == "__main__":
    main()
