"""Count the parameters of the model families of transformers, module by module, from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from clusterrun.errors import UsageError
from clusterrun.estimates import experts
from clusterrun.estimates.anatomy import (
    BY_HAND,
    Anatomy,
    Config,
    attention,
    embeddings,
    gated,
    heads_of,
    linear,
)

SIZE_ALONE = "say --params and --active-params alone: a shape is counted without experts"


def llama_block(
    hidden: int,
    ffn: int,
    query: int,
    key_value: int,
    *,
    biases: tuple[bool, bool, bool] = (False, False, False),
    head_norm: int = 0,
) -> tuple[int, ...]:
    """Return the modules of a block with a gated feed-forward network and RMS norms.

    `query` and `key_value` are the widths of all heads together, `biases` those of the projections
    in, out, and of the feed-forward network.
    """
    ins, out, mlp = biases
    projections = attention(hidden, query, key_value, ins=ins, out=out)
    return (*projections, *gated(hidden, ffn, bias=mlp), *2 * (hidden,), *2 * (head_norm,))


def _llama(config: Config) -> Anatomy:
    """Count Llama, Mistral, Qwen 2 and Qwen 3, which differ in biases and norms."""
    family = config.values["model_type"]
    hidden, ffn = config.number("hidden_size"), config.number("intermediate_size")
    heads = heads_of(config, head_dim=128 if family == "qwen3" else 0)
    vocab = config.number("vocab_size")
    bias = family in ("llama", "qwen3") and config.flag("attention_bias", False)
    mlp = family == "llama" and config.flag("mlp_bias", False)
    block = llama_block(
        hidden,
        ffn,
        heads.count * heads.dim,
        heads.kv * heads.dim,
        biases=(bias or family == "qwen2", bias, mlp),
        head_norm=heads.dim if family == "qwen3" else 0,
    )
    return Anatomy(
        outer=(*embeddings(config, hidden, vocab, tied=False), hidden),
        blocks=((config.number("num_hidden_layers"), block),),
        hidden=hidden,
        heads=heads.count,
        kv_heads=heads.kv,
        head_dim=heads.dim,
        head_norm=family == "qwen3",
        ffn=ffn,
        vocab=vocab,
        gated=True,
    )


def _plain_block(hidden: int, ffn: int, *, fused: bool, bias: bool = True) -> tuple[int, ...]:
    """Return the modules of a block with layer norms, biases and no gate."""
    ins = (
        (linear(hidden, 3 * hidden, bias=bias),)
        if fused
        else 3 * (linear(hidden, hidden, bias=bias),)
    )
    mlp = (linear(hidden, ffn, bias=True), linear(ffn, hidden, bias=True))
    return (*ins, linear(hidden, hidden, bias=bias), *mlp, *2 * (2 * hidden,))


def _gpt2(config: Config) -> Anatomy:
    hidden, vocab = config.number("n_embd"), config.number("vocab_size")
    ffn = config.number("n_inner", 4 * hidden)
    positions = config.number("n_positions", 1024) * hidden
    return Anatomy(
        outer=(*embeddings(config, hidden, vocab, tied=True), positions, 2 * hidden),
        blocks=((config.number("n_layer"), _plain_block(hidden, ffn, fused=True)),),
        hidden=hidden,
        heads=config.number("n_head"),
        ffn=ffn,
        vocab=vocab,
    )


def _gpt_neox(config: Config) -> Anatomy:
    hidden, vocab = config.number("hidden_size"), config.number("vocab_size")
    ffn = config.number("intermediate_size")
    block = _plain_block(hidden, ffn, fused=True, bias=config.flag("attention_bias", True))
    return Anatomy(
        outer=(*embeddings(config, hidden, vocab, tied=False), 2 * hidden),
        blocks=((config.number("num_hidden_layers"), block),),
        hidden=hidden,
        heads=config.number("num_attention_heads"),
        ffn=ffn,
        vocab=vocab,
    )


def _bert(config: Config) -> Anatomy:
    hidden, vocab = config.number("hidden_size"), config.number("vocab_size")
    ffn = config.number("intermediate_size")
    words, dense = vocab * hidden, linear(hidden, hidden, bias=True)
    head = config.head(("ForMaskedLM", "ForSequenceClassification", "BertModel"), "BertModel")
    heads: dict[str, tuple[int, ...]] = {
        "BertModel": (words, dense),
        # its output layer has the words' embedding for a weight, and a bias of its own
        "ForMaskedLM": (words + vocab, dense, 2 * hidden),
        "ForSequenceClassification": (words, dense, linear(hidden, _labels(config), bias=True)),
    }
    if not config.flag("tie_word_embeddings", True):
        raise UsageError(f"'{config.name}' has untied embeddings, unlike BERT", hint=BY_HAND)
    positions = config.number("max_position_embeddings", 512) * hidden
    types = config.number("type_vocab_size", 2) * hidden
    return Anatomy(
        outer=(*heads[head], positions, types, 2 * hidden),
        blocks=((config.number("num_hidden_layers"), _plain_block(hidden, ffn, fused=False)),),
        hidden=hidden,
        heads=config.number("num_attention_heads"),
        ffn=ffn,
        vocab=vocab,
    )


def _labels(config: Config) -> int:
    named = config.values.get("id2label")
    return len(named) if isinstance(named, Mapping) else config.number("num_labels", 2)


def _t5(config: Config) -> Anatomy:
    """Count T5 of both versions and mT5.

    Of an untied config the language head counts: transformers 5 ties it until a checkpoint with a
    head of its own is loaded.
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
    return Anatomy(
        outer=(*words, *2 * (hidden,), *2 * (distances,)),
        blocks=(
            (layers, (*attend, *mlp)),
            (config.number("num_decoder_layers", layers), (*2 * attend, *mlp)),
        ),
        hidden=hidden,
        heads=0,  # two sequences, and heads wider than `hidden`: no activations are told of it
        ffn=ffn,
        vocab=vocab,
        gated=has_gate,
    )


FAMILIES: Mapping[str, Callable[[Config], Anatomy]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bert": _bert,
    "t5": _t5,
    "mt5": _t5,
    **experts.FAMILIES,
}


def anatomy(config: Config) -> Anatomy:
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
