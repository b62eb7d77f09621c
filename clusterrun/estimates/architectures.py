"""Count the parameters of the model families of transformers, module by module, from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from clusterrun.errors import UsageError
from clusterrun.estimates import experts
from clusterrun.estimates.anatomy import (
    BY_HAND,
    Config,
    Heads,
    attention,
    built,
    embeddings,
    gated,
    heads_of,
    linear,
)
from clusterrun.estimates.experts import Experts
from clusterrun.estimates.inputs import Model

SIZE_ALONE = "say --params and --active-params alone: a shape is counted without experts"


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """What differs between families of gated feed-forward networks and RMS norms, as Llama's.

    The projections of attention have biases by the config's `bias_key`, by `bias` without one; the
    projection out has one only by `attention_bias`. `head_dim` is the default of the config.
    """

    bias_key: str = ""
    bias: bool = False
    head_dim: int = 0
    head_norm: bool = False
    is_latent: bool = False
    experts: Callable[[Config], Experts] | None = None


def _decoder(family: Decoder, config: Config) -> Model:
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    heads, attend = _attention(family, config, hidden)
    own = family.experts(config) if family.experts else None
    sparse = own.layers if own else 0
    outside = (*attend, hidden, hidden, *(2 * (heads.dim,) if family.head_norm else ()))
    blocks = [(sparse, (*outside, *own.modules(hidden)))] if own and sparse else []
    if dense := layers - sparse:
        ffn = config.number("intermediate_size")
        blocks.append((dense, (*outside, *gated(hidden, ffn, bias=config.has_mlp_bias))))
    shape = Model(
        name=config.name,
        params=0,
        hidden=hidden,
        heads=heads.count,
        kv_heads=heads.kv,
        head_dim=heads.dim,
        head_norm=family.head_norm,
        ffn=own.ffn if own else config.number("intermediate_size"),
        vocab=config.number("vocab_size"),
    )
    idle = own.idle(hidden) if own else 0
    outer = (*embeddings(config, hidden, tied=False), hidden)
    return built(shape, outer, tuple(blocks), idle=idle)


def _attention(family: Decoder, config: Config, hidden: int) -> tuple[Heads, tuple[int, ...]]:
    if family.is_latent:
        return experts.latent_attention(config, hidden)
    heads = heads_of(config, head_dim=family.head_dim)
    bias = config.flag(family.bias_key, family.bias) if family.bias_key else family.bias
    out = bias and family.bias_key == "attention_bias"
    query, key_value = heads.count * heads.dim, heads.kv * heads.dim
    return heads, attention(hidden, query, key_value, ins=bias, out=out)


def _plain(shape: Model, outer: tuple[int, ...], *, fused: bool = True, bias: bool = True) -> Model:
    """Count a model with layer norms and without gates; `fused` joins queries, keys and values."""
    hidden, ffn = shape.hidden, shape.ffn
    project = linear(hidden, hidden, bias=bias)
    ins = (linear(hidden, 3 * hidden, bias=bias),) if fused else 3 * (project,)
    mlp = (linear(hidden, ffn, bias=True), linear(ffn, hidden, bias=True))
    block = (*ins, project, *mlp, *2 * (2 * hidden,))
    return built(shape, (*outer, 2 * hidden), ((shape.layers, block),))


_USUAL = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_GPT2 = ("n_embd", "n_layer", "n_head", "n_inner")


def _shape(config: Config, keys: tuple[str, str, str, str] = _USUAL, *, wide: int = 0) -> Model:
    """Read a shape by its keys; the default feed-forward width is `wide` times the hidden size."""
    hidden, heads = config.number(keys[0]), config.number(keys[2])
    return Model(
        name=config.name,
        params=0,
        hidden=hidden,
        layers=config.number(keys[1]),
        heads=heads,
        kv_heads=heads,
        ffn=config.number(keys[3], wide * hidden or None),
        vocab=config.number("vocab_size"),
        gated=False,
    )


def _gpt2(config: Config) -> Model:
    shape = _shape(config, _GPT2, wide=4)
    positions = config.number("n_positions", 1024) * shape.hidden
    return _plain(shape, (*embeddings(config, shape.hidden, tied=True), positions))


def _gpt_neox(config: Config) -> Model:
    shape = _shape(config)
    bias = config.flag("attention_bias", True)
    return _plain(shape, embeddings(config, shape.hidden, tied=False), bias=bias)


def _bert(config: Config) -> Model:
    shape = _shape(config)
    hidden = shape.hidden
    words, dense = shape.vocab * hidden, linear(hidden, hidden, bias=True)
    head = config.head(("ForMaskedLM", "ForSequenceClassification", "BertModel"), "BertModel")
    heads: dict[str, tuple[int, ...]] = {
        "BertModel": (words, dense),
        # its output layer has the words' embedding for a weight, and a bias of its own
        "ForMaskedLM": (words + shape.vocab, dense, 2 * hidden),
        "ForSequenceClassification": (words, dense, linear(hidden, _labels(config), bias=True)),
    }
    if not config.flag("tie_word_embeddings", True):
        raise UsageError(f"'{config.name}' has untied embeddings, unlike BERT", hint=BY_HAND)
    positions = config.number("max_position_embeddings", 512) * hidden
    types = config.number("type_vocab_size", 2) * hidden
    return _plain(shape, (*heads[head], positions, types), fused=False)


def _labels(config: Config) -> int:
    named = config.values.get("id2label")
    return len(named) if isinstance(named, Mapping) else config.number("num_labels", 2)


def _t5(config: Config) -> Model:
    """Count T5 of both versions and mT5.

    Of an untied config the language head counts: transformers 5 ties it until a checkpoint with a
    head of its own is loaded. Heads count as unknown: there are two sequences, and heads wider than
    the hidden size, for which activations can't be estimated.
    """
    hidden, ffn = config.number("d_model"), config.number("d_ff")
    heads, vocab = config.number("num_heads"), config.number("vocab_size")
    inner = heads * config.number("d_kv")
    layers = config.number("num_layers")
    has_gate = str(config.values.get("feed_forward_proj", "relu")).startswith("gated")
    attend = (*3 * (linear(hidden, inner),), linear(inner, hidden), hidden)
    mlp = (*(2 if has_gate else 1) * (linear(hidden, ffn),), linear(ffn, hidden), hidden)
    head = config.head(("ForConditionalGeneration", "T5Model"), "ForConditionalGeneration")
    own_head = head != "T5Model" and not config.flag("tie_word_embeddings", True)
    distances = config.number("relative_attention_num_buckets", 32) * heads
    words = (vocab * hidden,) * (2 if own_head else 1)
    decoders = config.number("num_decoder_layers", layers)
    return built(
        Model(name=config.name, params=0, hidden=hidden, ffn=ffn, vocab=vocab, gated=has_gate),
        outer=(*words, *2 * (hidden,), *2 * (distances,)),
        blocks=((layers, (*attend, *mlp)), (decoders, (*2 * attend, *mlp))),
    )


_DECODERS: Mapping[str, Decoder] = {
    "llama": Decoder(bias_key="attention_bias"),
    "mistral": Decoder(),
    "qwen2": Decoder(bias=True),
    "qwen3": Decoder(bias_key="attention_bias", head_dim=128, head_norm=True),
    "mixtral": Decoder(experts=experts.mixtral),
    "qwen2_moe": Decoder(bias_key="qkv_bias", bias=True, experts=experts.qwen2),
    "qwen3_moe": Decoder(bias_key="attention_bias", head_norm=True, experts=experts.qwen3),
    "deepseek_v2": Decoder(is_latent=True, experts=experts.deepseek),
    "deepseek_v3": Decoder(is_latent=True, experts=experts.deepseek),
}
FAMILIES: Mapping[str, Callable[[Config], Model]] = {
    **{name: partial(_decoder, family) for name, family in _DECODERS.items()},
    **{"gpt2": _gpt2, "gpt_neox": _gpt_neox, "bert": _bert, "t5": _t5, "mt5": _t5},
}


def count_model(config: Config) -> Model:
    """Count a model of a known family; raise UsageError for any other."""
    family = config.values.get("model_type")
    if not isinstance(family, str):
        raise UsageError(f"the config of '{config.name}' has no 'model_type'", hint=BY_HAND)
    count = FAMILIES.get(family)
    if count is None:
        raise UsageError(
            f"models of type '{family}' can't be counted; known: {', '.join(FAMILIES)}",
            hint=SIZE_ALONE if any(name in config.values for name in experts.COUNTS) else BY_HAND,
        )
    return count(config)
