"""Count the parameters of the model families of transformers, module by module, from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from clusterrun.errors import UsageError

BY_HAND = "say --params, and --hidden --layers --heads --kv-heads --ffn --vocab as far as known"
SIZE_ALONE = "say --params alone: a shape is counted without experts"
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
CAUSAL = ("ForCausalLM", "LMHeadModel")
HEADLESS = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "GPT2Model", "GPTNeoXModel")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Read numbers of a config.json, with errors that name the model and the key."""

    name: str
    values: Mapping[str, Any]

    def number(self, key: str, default: int | None = None) -> int:
        """Return a positive number; the default where the key is missing or null."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise UsageError(f"the config of '{self.name}' has no '{key}'", hint=BY_HAND)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.unreadable(key, "a positive number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value; the default where the key is missing or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.unreadable(key, "true or false")
        return value

    def unreadable(self, key: str, wanted: str) -> UsageError:
        """Return the error about a value that is not what it must be."""
        value = self.values[key]
        return UsageError(
            f"'{key}' of the config of '{self.name}' is {value!r}, not {wanted}", hint=BY_HAND
        )

    def head(self, known: tuple[str, ...], default: str) -> str:
        """Return which of the known endings the model's class has, by `architectures`."""
        named = self.values.get("architectures")
        if named is None or named == []:
            return default
        if not isinstance(named, list) or not isinstance(named[0], str):
            raise self.unreadable("architectures", "a list of class names")
        for ending in known:
            if named[0].endswith(ending):
                return ending
        raise UsageError(f"'{named[0]}' of '{self.name}' can't be counted", hint=BY_HAND)


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The own parameters of each module: outside the blocks, and of each kind of block."""

    outer: tuple[int, ...]
    blocks: tuple[tuple[int, tuple[int, ...]], ...]  # (how many, the modules of one)
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int = 0  # as many as heads where 0
    head_dim: int = 0  # what the hidden size leaves where 0
    head_norm: bool = False
    gated: bool = False

    @property
    def params(self) -> int:
        """Return all parameters."""
        return sum(self.outer) + sum(count * sum(block) for count, block in self.blocks)

    @property
    def largest_layer(self) -> int:
        """Return the largest module's own parameters, as DeepSpeed's estimators count them."""
        return max(max(self.outer), *(max(block) for _, block in self.blocks))

    @property
    def block(self) -> int:
        """Return the parameters of the largest block."""
        return max(sum(block) for _, block in self.blocks)

    @property
    def layers(self) -> int:
        """Return the number of blocks."""
        return sum(count for count, _ in self.blocks)


def linear(inputs: int, outputs: int, *, bias: bool = False) -> int:
    """Return the parameters of a linear layer."""
    return inputs * outputs + (outputs if bias else 0)


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
    attention = (
        linear(hidden, query, bias=ins),
        *2 * (linear(hidden, key_value, bias=ins),),
        linear(query, hidden, bias=out),
    )
    gated = (*2 * (linear(hidden, ffn, bias=mlp),), linear(ffn, hidden, bias=mlp))
    return (*attention, *gated, *2 * (hidden,), *2 * (head_norm,))


def _llama(config: Config) -> Anatomy:
    """Count Llama, Mistral, Qwen 2 and Qwen 3, which differ in biases and norms."""
    family = config.values["model_type"]
    hidden, ffn = config.number("hidden_size"), config.number("intermediate_size")
    heads, vocab = config.number("num_attention_heads"), config.number("vocab_size")
    kv_heads = config.number("num_key_value_heads", heads)
    if heads > hidden:
        raise config.unreadable("num_attention_heads", f"at most hidden_size, {hidden}")
    head_dim = config.number("head_dim", 128 if family == "qwen3" else hidden // heads)
    attention = family in ("llama", "qwen3") and config.flag("attention_bias", False)
    mlp = family == "llama" and config.flag("mlp_bias", False)
    block = llama_block(
        hidden,
        ffn,
        heads * head_dim,
        kv_heads * head_dim,
        biases=(attention or family == "qwen2", attention, mlp),
        head_norm=head_dim if family == "qwen3" else 0,
    )
    return Anatomy(
        outer=(*_embeddings(config, hidden, vocab, tied=False), hidden),
        blocks=((config.number("num_hidden_layers"), block),),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_norm=family == "qwen3",
        ffn=ffn,
        vocab=vocab,
        gated=True,
    )


def _embeddings(config: Config, hidden: int, vocab: int, *, tied: bool) -> tuple[int, ...]:
    """Count the words' embedding and, where the model has one of its own, the language head."""
    head = config.head((*CAUSAL, *HEADLESS), "ForCausalLM")
    is_tied = config.flag("tie_word_embeddings", tied)
    return (vocab * hidden,) * (2 if head in CAUSAL and not is_tied else 1)


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
        outer=(*_embeddings(config, hidden, vocab, tied=True), positions, 2 * hidden),
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
        outer=(*_embeddings(config, hidden, vocab, tied=False), 2 * hidden),
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
    gated = str(config.values.get("feed_forward_proj", "relu")).startswith("gated")
    attention = (*3 * (linear(hidden, inner),), linear(inner, hidden), hidden)
    mlp = (*(2 if gated else 1) * (linear(hidden, ffn),), linear(ffn, hidden), hidden)
    head = config.head(("ForConditionalGeneration", "T5Model"), "ForConditionalGeneration")
    own_head = head != "T5Model" and not config.flag("tie_word_embeddings", True)
    distances = config.number("relative_attention_num_buckets", 32) * heads
    words = (vocab * hidden,) * (2 if own_head else 1)
    return Anatomy(
        outer=(*words, *2 * (hidden,), *2 * (distances,)),
        blocks=(
            (layers, (*attention, *mlp)),
            (config.number("num_decoder_layers", layers), (*2 * attention, *mlp)),
        ),
        hidden=hidden,
        heads=0,  # two sequences, and heads wider than `hidden`: no activations are told of it
        ffn=ffn,
        vocab=vocab,
        gated=gated,
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
            hint=SIZE_ALONE if any(name in config.values for name in EXPERTS) else BY_HAND,
        )
    return count(config)
