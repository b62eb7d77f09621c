"""Count models with experts: feed-forward networks of which a token meets a few in each block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from clusterrun.estimates.anatomy import (
    Anatomy,
    Config,
    Heads,
    attention,
    embeddings,
    gated,
    heads_of,
    linear,
)

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # a release's, or another's


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a block: how many there are and how many a token meets.

    `shared` are the modules beside them that every token meets.
    """

    count: int
    met: int
    ffn: int
    shared: tuple[int, ...] = ()

    def modules(self, hidden: int) -> tuple[int, ...]:
        """Return the router, all experts as one module (as transformers 5 has it), and `shared`."""
        return (linear(hidden, self.count), self.count * self.each(hidden), *self.shared)

    def each(self, hidden: int) -> int:
        """Return the parameters of one expert."""
        return sum(gated(hidden, self.ffn))


def _experts(config: Config, ffn: str, shared: tuple[int, ...] = ()) -> Experts:
    key = next((key for key in COUNTS if config.values.get(key) is not None), COUNTS[0])
    there, met = config.number(key), config.number("num_experts_per_tok")
    if met > there:
        raise config.unreadable("num_experts_per_tok", f"at most {key}, {there}")
    return Experts(count=there, met=met, ffn=config.number(ffn), shared=shared)


def _anatomy(
    config: Config,
    heads: Heads,
    outside: tuple[int, ...],
    experts: Experts,
    *,
    sparse: int,
    mlp_bias: bool = False,
) -> Anatomy:
    """Put blocks together of which `sparse` have experts; `outside` are their other modules."""
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    vocab = config.number("vocab_size")
    blocks = [(sparse, (*outside, *experts.modules(hidden)))] if sparse else []
    if dense := layers - sparse:
        ffn = config.number("intermediate_size")
        blocks.append((dense, (*outside, *gated(hidden, ffn, bias=mlp_bias))))
    return Anatomy(
        outer=(*embeddings(config, hidden, vocab, tied=False), hidden),
        blocks=tuple(blocks),
        hidden=hidden,
        heads=heads.count,
        kv_heads=heads.kv,
        head_dim=heads.dim,
        ffn=experts.ffn,
        vocab=vocab,
        gated=True,
        idle=sparse * (experts.count - experts.met) * experts.each(hidden),
    )


def _mixtral(config: Config) -> Anatomy:
    hidden, heads = config.number("hidden_size"), heads_of(config)
    outside = attention(hidden, heads.count * heads.dim, heads.kv * heads.dim)
    experts = _experts(config, "intermediate_size")
    layers = config.number("num_hidden_layers")
    return _anatomy(config, heads, (*outside, hidden, hidden), experts, sparse=layers)


def _qwen_moe(config: Config) -> Anatomy:
    """Count Qwen 2 MoE, which has a shared expert behind a gate, and Qwen 3 MoE, which has none."""
    hidden, heads = config.number("hidden_size"), heads_of(config)
    is_third = config.values["model_type"] == "qwen3_moe"
    bias = config.flag("attention_bias" if is_third else "qkv_bias", not is_third)
    outside = attention(
        hidden, heads.count * heads.dim, heads.kv * heads.dim, ins=bias, out=bias and is_third
    )
    norms = (hidden, hidden, *(2 * (heads.dim,) if is_third else ()))
    shared: tuple[int, ...] = ()
    if not is_third:
        shared = (*gated(hidden, config.number("shared_expert_intermediate_size")), hidden)
    experts = _experts(config, "moe_intermediate_size", shared)
    return _anatomy(config, heads, (*outside, *norms), experts, sparse=_sparse(config))


def _sparse(config: Config) -> int:
    """Count the layers with experts: each of `decoder_sparse_step`, but for `mlp_only_layers`."""
    layers, step = config.number("num_hidden_layers"), config.number("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config.unreadable("mlp_only_layers", "a list of layers")
    return sum((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def _deepseek(config: Config) -> Anatomy:
    """Count DeepSeek 2 and 3, whose first layers have no experts."""
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    mlp_bias = config.values["model_type"] == "deepseek_v2" and config.flag("mlp_bias", False)
    ffn = config.number("moe_intermediate_size") * config.number("n_shared_experts")
    shared = gated(hidden, ffn, bias=mlp_bias)
    experts = _experts(config, "moe_intermediate_size", shared)
    dense = config.count("first_k_dense_replace")
    if dense > layers:
        raise config.unreadable("first_k_dense_replace", f"at most num_hidden_layers, {layers}")
    heads, outside = _latent_attention(config, hidden)
    return _anatomy(
        config,
        heads,
        (*outside, hidden, hidden),
        experts,
        sparse=layers - dense,
        mlp_bias=mlp_bias,
    )


def _latent_attention(config: Config, hidden: int) -> tuple[Heads, tuple[int, ...]]:
    """Return heads and modules of attention over latent vectors (arXiv:2405.04434).

    Queries and keys are wider than values; the work of attention goes by their mean.
    """
    heads, bias = config.number("num_attention_heads"), config.flag("attention_bias", False)
    turned, plain = config.number("qk_rope_head_dim"), config.number("qk_nope_head_dim")
    value, latent = config.number("v_head_dim"), config.number("kv_lora_rank")
    query: tuple[int, ...] = (linear(hidden, heads * (plain + turned)),)
    if config.values.get("q_lora_rank") is not None:
        rank = config.number("q_lora_rank")
        query = (
            *(linear(hidden, rank, bias=bias), rank),
            linear(rank, heads * (plain + turned)),
        )
    key_value = (
        *(linear(hidden, latent + turned, bias=bias), latent),
        linear(latent, heads * (plain + value)),
    )
    modules = (*query, *key_value, linear(heads * value, hidden, bias=bias))
    return Heads(heads, heads, (plain + turned + value) // 2), modules


FAMILIES: Mapping[str, Callable[[Config], Anatomy]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
