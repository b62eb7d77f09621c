"""Read the config.json of a model, and count the parameters of its modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from clusterrun.errors import UsageError
from clusterrun.estimates.inputs import Model

BY_HAND = "pass --params, and --hidden --layers --heads --kv-heads --ffn --vocab if you know them"
CAUSAL = ("ForCausalLM", "LMHeadModel")
HEADLESS = (
    *("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "GPT2Model", "GPTNeoXModel"),
    *("MixtralModel", "Qwen2MoeModel", "Qwen3MoeModel", "DeepseekV2Model", "DeepseekV3Model"),
    *("SmolLM3Model", "Olmo2Model", "Phi3Model", "GptOssModel", "GemmaModel", "Gemma2Model"),
    "Gemma3TextModel",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Read numbers of a config.json, with errors that name the model and the key."""

    name: str
    values: Mapping[str, Any]

    def number(self, key: str, default: int | None = None) -> int:
        """Return a positive number; the default if the key is missing or null."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise UsageError(f"the config of '{self.name}' has no '{key}'", hint=BY_HAND)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.unreadable(key, "a positive number")
        return value

    def count(self, key: str) -> int:
        """Return a number that may be 0, which is the default."""
        return 0 if self.values.get(key) in (None, 0) else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean; the default if the key is missing or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.unreadable(key, "true or false")
        return value

    def part(self, key: str) -> Config:
        """Return the config of a part of the model."""
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            raise UsageError(f"the config of '{self.name}' has no '{key}'", hint=BY_HAND)
        return Config(name=self.name, values=value)

    @property
    def has_mlp_bias(self) -> bool:
        """Return whether feed-forward networks have biases; in most families they never do."""
        may = self.values["model_type"] in ("llama", "smollm3", "deepseek_v2")
        return may and self.flag("mlp_bias", False)

    def unreadable(self, key: str, wanted: str) -> UsageError:
        """Return the error about a value of the wrong kind."""
        value = self.values[key]
        return UsageError(
            f"'{key}' of the config of '{self.name}' is {value!r}, not {wanted}", hint=BY_HAND
        )

    def head(self, known: tuple[str, ...], default: str) -> str:
        """Return the known ending of the model's class in `architectures`."""
        named = self.values.get("architectures")
        if named is None or named == []:
            return default
        if not isinstance(named, list) or not isinstance(named[0], str):
            raise self.unreadable("architectures", "a list of class names")
        for ending in known:
            if named[0].endswith(ending):
                return ending
        raise UsageError(f"class '{named[0]}' of '{self.name}' can't be counted", hint=BY_HAND)


def built(
    shape: Model,
    outer: tuple[int, ...],
    blocks: tuple[tuple[int, tuple[int, ...]], ...],
    *,
    routed: int = 0,
    idle: int = 0,
) -> Model:
    """Count a model from the sizes of its modules, outside the blocks and in each kind of block.

    `blocks` has the number of blocks of each kind and the modules of one. `routed` are the
    parameters of all experts, `idle` those of experts that a token does not use.
    """
    within = sum(count * sum(block) for count, block in blocks)
    params = sum(outer) + within
    return replace(
        shape,
        params=params,
        largest_layer=max(*outer, *(max(block) for _, block in blocks)),
        block=max(sum(block) for _, block in blocks),
        layers=sum(count for count, _ in blocks),
        active_params=params - idle if idle else 0,
        linear_params=within - routed,
    )


def linear(inputs: int, outputs: int, *, bias: bool = False) -> int:
    """Return the parameters of a linear layer."""
    return inputs * outputs + (outputs if bias else 0)


@dataclass(frozen=True)
class Heads:
    """The number of attention heads, of key-value heads, and the width of each."""

    count: int
    kv: int
    dim: int


def heads_of(config: Config, *, head_dim: int = 0) -> Heads:
    """Read the heads; by default they share the hidden size."""
    hidden, count = config.number("hidden_size"), config.number("num_attention_heads")
    if count > hidden:
        raise config.unreadable("num_attention_heads", f"at most hidden_size, {hidden}")
    kv = config.number("num_key_value_heads", count)
    return Heads(count, kv, config.number("head_dim", head_dim or hidden // count))


def attention(
    hidden: int, query: int, key_value: int, *, ins: bool = False, out: bool = False
) -> tuple[int, ...]:
    """Return the sizes of the projections; `query` and `key_value` are the widths of all heads."""
    return (
        linear(hidden, query, bias=ins),
        *2 * (linear(hidden, key_value, bias=ins),),
        linear(query, hidden, bias=out),
    )


def gated(hidden: int, ffn: int, *, bias: bool = False) -> tuple[int, ...]:
    """Return the sizes of the projections of a feed-forward network with a gate."""
    return (*2 * (linear(hidden, ffn, bias=bias),), linear(ffn, hidden, bias=bias))


def joined(modules: tuple[int, ...], first: int) -> tuple[int, ...]:
    """Return the modules with the first `first` joined into one."""
    return (sum(modules[:first]), *modules[first:])


def embeddings(config: Config, hidden: int, *, tied: bool) -> tuple[int, ...]:
    """Count the word embedding and, if it has its own weights, the language head."""
    vocab = config.number("vocab_size")
    head = config.head((*CAUSAL, *HEADLESS), "ForCausalLM")
    is_tied = config.flag("tie_word_embeddings", tied)
    return (vocab * hidden,) * (2 if head in CAUSAL and not is_tied else 1)
