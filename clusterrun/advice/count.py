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
    """Limit this process's memory; print the numbers, or what is missing or wrong, as JSON."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]  # only root may raise it
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
    model, text_config = _build(_class(config, transformers), config), config.get_text_config()
    # The shape is that of the language model; of an image encoder only the parameters count.
    language = model if text_config is config else _build(transformers.AutoModel, text_config)
    params, shape = _size(model.parameters()), _shape(text_config, language)
    idle = shape.pop("idle")  # parameters of experts that a token does not use
    active = params - idle if idle else 0
    largest = max(_size(module.parameters(recurse=False)) for module in model.modules())
    return {**shape, "params": params, "active_params": active, "largest_layer": largest}


def _class(config: Any, transformers: Any) -> Any:
    """Return the class that the config names, else that of its first task in HEADS."""
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if getattr(named, "config_class", None) is type(config):
        return named
    usual = [getattr(transformers, f"AutoModelFor{head}", None) for head in HEADS]
    found = (auto for auto in usual if auto and type(config) in auto._model_mapping)
    return next(found, transformers.AutoModel)


def _build(model_class: Any, config: Any) -> Any:
    """Build a model on the meta device: its parameters have a size and no memory."""
    import torch

    with torch.device("meta"):
        if hasattr(model_class, "from_config"):  # only Auto classes have it
            return model_class.from_config(config, trust_remote_code=False)
        return model_class(config)


def _shape(config: Any, model: Any) -> dict[str, Any]:
    """Return the fields of `Model` about the shape, and `idle`, from config and parameters."""
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
    """Yield the blocks: what is in the outermost lists as long as the config's layer counts."""
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
    hidden = _number(config, "hidden_size")
    return {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": width}


def _feed_forward(config: Any, routed: int) -> dict[str, int]:
    """Return the width that a token uses, and how many `routed` parameters it leaves idle."""
    dense = _number(config, "intermediate_size", "d_ff", "ffn_dim", "n_inner", "ffn_hidden_size")
    dense = dense or 4 * _number(config, "hidden_size")
    if not routed:
        return {"ffn": dense, "idle": 0}
    experts = _number(config, "num_local_experts", "num_experts", "n_routed_experts")
    met = _number(config, "num_experts_per_tok", "num_experts_per_token")
    if not 0 < met <= experts:
        raise ValueError(f"the config has {experts} experts, but {met} per token")
    width = _number(config, "moe_intermediate_size") or dense  # of one expert
    shared = _number(config, "shared_expert_intermediate_size", "shared_intermediate_size")
    shared = shared or width * _number(config, "n_shared_experts")
    idle = routed * (experts - met) // experts
    return {"ffn": met * width + shared, "experts_met": met, "expert_ffn": width, "idle": idle}


def _number(config: Any, *names: str) -> int:
    """Return the first of these keys that is a number; 0 without any."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if type(value) is int), 0)


def _size(parameters: Iterable[Any]) -> int:
    return sum(each.numel() for each in parameters)


if __name__ == "__main__":
    main()
