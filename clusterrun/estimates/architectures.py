"""Count the parameters of transformers' model families from a config, module by module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from clusterrun.errors import UsageError
from clusterrun.estimates import experts, vision
from clusterrun.estimates.anatomy import (
    BY_HAND,
    Config,
    Heads,
    attention,
    built,
    embeddings,
    gated,
    heads_of,
    joined,
    linear,
)
from clusterrun.estimates.experts import Experts
from clusterrun.estimates.inputs import Model

SIZE_ALONE = "pass only --params and --active-params: the other options describe no experts"


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The differences between families with gated feed-forward networks and RMS norms, like Llama.

    The config's `bias_key` decides whether the projections of attention have biases; `bias` is its
    default. The output projection has one only if the key is `attention_bias`. `head_dim` and
    `tied` are defaults for the config. `norms` is the number of norms of the hidden size in a
    block. `head_norm`: queries and keys have a norm as wide as a head, `wide_norm`: as wide as all
    heads. `fused`: queries, keys and values are one module, as are gate and up. `sinks` adds a
    parameter for each head.
    """

    bias_key: str = ""
    bias: bool = False
    head_dim: int = 0
    tied: bool = False
    norms: int = 2
    head_norm: bool = False
    wide_norm: bool = False
    fused: bool = False
    sinks: bool = False
    is_latent: bool = False
    experts: Callable[[Config], Experts] | None = None


def _decoder(family: Decoder, config: Config) -> Model:
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    heads, attend = _attention(family, config, hidden)
    own = family.experts(config) if family.experts else None
    sparse = own.layers if own else 0
    outside = (*attend, *family.norms * (hidden,), *_norms_of_heads(family, heads))
    blocks = [(sparse, (*outside, *own.modules(hidden)))] if own and sparse else []
    if dense := layers - sparse:
        ffn = gated(hidden, config.number("intermediate_size"), bias=config.has_mlp_bias)
        blocks.append((dense, (*outside, *(joined(ffn, 2) if family.fused else ffn))))
    shape = Model(
        name=config.name,
        params=0,
        hidden=hidden,
        heads=heads.count,
        kv_heads=heads.kv,
        head_dim=heads.dim,
        head_norm=family.head_norm or family.wide_norm,
        ffn=own.width if own else config.number("intermediate_size"),
        experts_met=own.met if own else 0,
        expert_ffn=own.ffn if own else 0,
        vocab=config.number("vocab_size"),
    )
    outer = (*embeddings(config, hidden, tied=family.tied), hidden)
    routed, idle = (own.routed(hidden), own.idle(hidden)) if own else (0, 0)
    return built(shape, outer, tuple(blocks), routed=routed, idle=idle)


def _norms_of_heads(family: Decoder, heads: Heads) -> tuple[int, ...]:
    if family.wide_norm:
        return (heads.count * heads.dim, heads.kv * heads.dim)
    return 2 * (heads.dim,) if family.head_norm else ()


def _attention(family: Decoder, config: Config, hidden: int) -> tuple[Heads, tuple[int, ...]]:
    if family.is_latent:
        return experts.latent_attention(config, hidden)
    heads = heads_of(config, head_dim=family.head_dim)
    bias = config.flag(family.bias_key, family.bias) if family.bias_key else family.bias
    out = bias and family.bias_key == "attention_bias"
    query, key_value = heads.count * heads.dim, heads.kv * heads.dim
    modules = attention(hidden, query, key_value, ins=bias, out=out)
    modules = joined(modules, 3) if family.fused else modules
    return heads, (*modules, heads.count) if family.sinks else modules


def _plain(shape: Model, outer: tuple[int, ...], *, fused: bool = True, bias: bool = True) -> Model:
    """Count a model with layer norms and without gates; `fused` joins queries, keys and values."""
    hidden, ffn = shape.hidden, shape.ffn
    project = linear(hidden, hidden, bias=bias)
    ins = (linear(hidden, 3 * hidden, bias=bias),) if fused else 3 * (project,)
    mlp = (linear(hidden, ffn, bias=True), linear(ffn, hidden, bias=True))
    block = (*ins, project, *mlp, *2 * (2 * hidden,))
    return built(shape, (*outer, 2 * hidden), ((shape.layers, block),))


_USUAL = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def _shape(
    config: Config,
    keys: tuple[str, str, str, str] = _USUAL,
    *,
    wide: int = 0,
    has_words: bool = True,
) -> Model:
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
        vocab=config.number("vocab_size") if has_words else 0,
        gated=False,
    )


def _gpt2(config: Config) -> Model:
    shape = _shape(config, ("n_embd", "n_layer", "n_head", "n_inner"), wide=4)
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
        # the output layer shares the weight of the word embedding, and has its own bias
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
    """Count both versions of T5, and mT5.

    The language head counts if the config is untied, although transformers 5 ties it until a
    checkpoint with its own head is loaded.
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
    decoders = config.number("num_decoder_layers", layers)
    return built(
        Model(
            name=config.name,
            params=0,
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=config.number("d_kv"),
            ffn=ffn,
            vocab=vocab,
            gated=has_gate,
            cross_layers=decoders,
        ),
        outer=(*((vocab * hidden,) * (2 if own_head else 1)), *2 * (hidden,), *2 * (distances,)),
        blocks=((layers, (*attend, *mlp)), (decoders, (*2 * attend, *mlp))),
    )


def _vit(config: Config) -> Model:
    """Count a vision transformer; a sample is its patches and a class token."""
    count, inputs = vision.patches(config, image=224, patch=16)
    shape = replace(_shape(config, has_words=False), positions=count + 1, is_text=False)
    hidden = shape.hidden
    head = config.head(("ForImageClassification", "ViTModel"), "ForImageClassification")
    labels = linear(hidden, hidden if head == "ViTModel" else _labels(config), bias=True)
    outer = ((count + 2) * hidden, linear(inputs, hidden, bias=True), labels)
    return _plain(shape, outer, fused=False)


def _with_images(
    text: str,
    defaults: Mapping[str, int],
    tower: Callable[[Config, Config, int], tuple[int, ...]],
    config: Config,
) -> Model:
    """Count a language model of the family `text` and its vision tower."""
    inner, images = (config.part(key) for key in ("text_config", "vision_config"))
    tied = {key: value for key, value in config.values.items() if key == "tie_word_embeddings"}
    words = {**defaults, **inner.values, **tied, "model_type": text, "architectures": None}
    model = count_model(replace(inner, values=words))
    modules = tower(config, images, model.hidden)
    largest = max(model.largest_layer, *modules)
    return replace(model, params=model.params + sum(modules), largest_layer=largest)


_DECODERS: Mapping[str, Decoder] = {
    "llama": Decoder(bias_key="attention_bias"),
    "smollm3": Decoder(bias_key="attention_bias", tied=True),
    "olmo2": Decoder(bias_key="attention_bias", wide_norm=True),
    "phi3": Decoder(fused=True),
    "gemma": Decoder(bias_key="attention_bias", head_dim=256, tied=True),
    "gemma2": Decoder(bias_key="attention_bias", head_dim=256, tied=True, norms=4),
    "gemma3_text": Decoder(
        bias_key="attention_bias", head_dim=256, tied=True, norms=4, head_norm=True
    ),
    "mistral": Decoder(),
    "qwen2": Decoder(bias=True),
    "qwen3": Decoder(bias_key="attention_bias", head_dim=128, head_norm=True),
    "mixtral": Decoder(experts=experts.mixtral),
    "qwen2_moe": Decoder(bias_key="qkv_bias", bias=True, experts=experts.qwen2),
    "qwen3_moe": Decoder(bias_key="attention_bias", head_norm=True, experts=experts.qwen3),
    "deepseek_v2": Decoder(is_latent=True, experts=experts.deepseek),
    "deepseek_v3": Decoder(is_latent=True, experts=experts.deepseek),
    "gpt_oss": Decoder(
        bias_key="attention_bias", bias=True, head_dim=64, sinks=True, experts=experts.gpt_oss
    ),
}
FAMILIES: Mapping[str, Callable[[Config], Model]] = {
    **{name: partial(_decoder, family) for name, family in _DECODERS.items()},
    "gemma3": partial(_with_images, "gemma3_text", vision.GEMMA3_TEXT, vision.siglip),
    "mistral3": partial(_with_images, "mistral", {}, vision.pixtral),
    **{"gpt2": _gpt2, "gpt_neox": _gpt_neox, "bert": _bert, "t5": _t5, "mt5": _t5, "vit": _vit},
}


def count_model(config: Config) -> Model:
    """Count a model of a known family; raise UsageError for any other."""
    family = config.values.get("model_type")
    if not isinstance(family, str):
        raise UsageError(f"the config of '{config.name}' has no 'model_type'", hint=BY_HAND)
    count = FAMILIES.get(family)
    if count is None:
        raise UsageError(
            f"models of type '{family}' can't be counted; known types: {', '.join(FAMILIES)}",
            hint=SIZE_ALONE if any(name in config.values for name in experts.COUNTS) else BY_HAND,
        )
    model = count(config)
    return replace(model, family=model.family or family)
