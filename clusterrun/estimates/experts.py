"""Count experts: feed-forward networks, of which each token uses a few in each block."""

from __future__ import annotations

from dataclasses import dataclass, replace

from clusterrun.estimates.anatomy import Config, Heads, gated, linear

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of the same key


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a block: `count` in all, of which a token uses `met`.

    `layers` is the number of blocks with experts. `shared` are the sizes of the modules that every
    token uses, `shared_ffn` is their width. `bias`: router and experts have biases.
    """

    count: int
    met: int
    ffn: int
    layers: int
    shared: tuple[int, ...] = ()
    shared_ffn: int = 0
    bias: bool = False

    @property
    def width(self) -> int:
        """Return the feed-forward width that a token uses in a block."""
        return self.met * self.ffn + self.shared_ffn

    def modules(self, hidden: int) -> tuple[int, ...]:
        """Return the sizes of router, experts (one module, as in transformers 5) and `shared`."""
        router = linear(hidden, self.count, bias=self.bias)
        return (router, self.count * self._each(hidden), *self.shared)

    def routed(self, hidden: int) -> int:
        """Return the parameters of all experts, in all blocks."""
        return self.layers * self.count * self._each(hidden)

    def idle(self, hidden: int) -> int:
        """Return the parameters of the experts that a token does not use, in all blocks."""
        return self.layers * (self.count - self.met) * self._each(hidden)

    def _each(self, hidden: int) -> int:
        return sum(gated(hidden, self.ffn, bias=self.bias))


def _experts(
    config: Config, ffn: str, layers: int, shared: tuple[int, ...] = (), shared_ffn: int = 0
) -> Experts:
    key = next((key for key in COUNTS if config.values.get(key) is not None), COUNTS[0])
    there, met = config.number(key), config.number("num_experts_per_tok")
    if met > there:
        raise config.unreadable("num_experts_per_tok", f"at most {key}, {there}")
    return Experts(
        count=there,
        met=met,
        ffn=config.number(ffn),
        layers=layers,
        shared=shared,
        shared_ffn=shared_ffn,
    )


def mixtral(config: Config) -> Experts:
    """Read the experts of Mixtral: all layers have them."""
    return _experts(config, "intermediate_size", config.number("num_hidden_layers"))


def qwen2(config: Config) -> Experts:
    """Read the experts of Qwen 2 MoE, and its shared expert with a gate."""
    hidden, ffn = config.number("hidden_size"), config.number("shared_expert_intermediate_size")
    shared = (*gated(hidden, ffn), hidden)
    return _experts(config, "moe_intermediate_size", _sparse(config), shared, ffn)


def qwen3(config: Config) -> Experts:
    """Read the experts of Qwen 3 MoE."""
    return _experts(config, "moe_intermediate_size", _sparse(config))


def _sparse(config: Config) -> int:
    """Count the layers with experts: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    layers, step = config.number("num_hidden_layers"), config.number("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config.unreadable("mlp_only_layers", "a list of layers")
    return sum((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def deepseek(config: Config) -> Experts:
    """Read the experts of DeepSeek 2 and 3: the first layers have none."""
    layers = config.number("num_hidden_layers")
    ffn = config.number("moe_intermediate_size") * config.number("n_shared_experts")
    shared = gated(config.number("hidden_size"), ffn, bias=config.has_mlp_bias)
    dense = config.count("first_k_dense_replace")
    if dense > layers:
        raise config.unreadable("first_k_dense_replace", f"at most num_hidden_layers, {layers}")
    return _experts(config, "moe_intermediate_size", layers - dense, shared, ffn)


def gpt_oss(config: Config) -> Experts:
    """Read the experts of gpt-oss: all layers have them, with biases."""
    return replace(mixtral(config), bias=True)


def latent_attention(config: Config, hidden: int) -> tuple[Heads, tuple[int, ...]]:
    """Return the heads and module sizes of attention over latent vectors (arXiv:2405.04434).

    Queries and keys are wider than values; the heads have the mean width, which gives the same
    work.
    """
    heads, bias = config.number("num_attention_heads"), config.flag("attention_bias", False)
    turned, plain = config.number("qk_rope_head_dim"), config.number("qk_nope_head_dim")
    value, latent = config.number("v_head_dim"), config.number("kv_lora_rank")
    query: tuple[int, ...] = (linear(hidden, heads * (plain + turned)),)
    if config.values.get("q_lora_rank") is not None:
        rank = config.number("q_lora_rank")
        query = (linear(hidden, rank, bias=bias), rank, linear(rank, heads * (plain + turned)))
    key_value = (
        *(linear(hidden, latent + turned, bias=bias), latent),
        linear(latent, heads * (plain + value)),
    )
    modules = (*query, *key_value, linear(heads * value, hidden, bias=bias))
    return Heads(heads, heads, (plain + turned + value) // 2), modules
