"""Estimate what the forward pass saves on a GPU for the backward pass: activations and logits."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from clusterrun.estimates.inputs import Setup, Term, term

MEASURED = "measured on transformers 5.23, fused attention, no dropout"


class Arithmetic(IntEnum):
    """The precision of a forward pass, which decides what it saves; its place in each `Bytes`."""

    FP32 = 0
    AUTOCAST = 1  # fp32 weights and residuals, 16-bit products
    HALF = 2  # 16-bit weights and residuals


Bytes = tuple[float, float, float]


class Saved(NamedTuple):
    """Bytes that a block saves for each element: by arithmetic, in fp32, autocast and 16 bits.

    The elements are those of the hidden states (`fixed`), of all heads together (`query`), of all
    heads of keys together (`kv`), of the feed-forward network, of all experts that a token uses
    (`routed`), and of the attention scores if attention is not fused (`score`).
    """

    fixed: Bytes = (0, 0, 0)
    query: Bytes = (0, 0, 0)
    kv: Bytes = (0, 0, 0)
    ffn: Bytes = (0, 0, 0)
    routed: Bytes = (0, 0, 0)
    score: Bytes = (0, 0, 0)


# The blocks of Llama, and of GPT-2, whose GELU is not fused. Those of GPT-NeoX and BERT save less
# than GPT-2's.
GATED = Saved(fixed=(24, 26, 16), query=(8, 4, 4), kv=(8, 4, 4), ffn=(16, 8, 8))
UNGATED = Saved(fixed=(32, 20, 16), ffn=(20, 10, 10))
# The blocks of T5's encoder, and what the second attention of its decoder saves.
T5_GATED = Saved(fixed=(24, 26, 20), query=(16, 14, 14), ffn=(28, 14, 14))
T5_UNGATED = Saved(fixed=(24, 24, 20), query=(16, 14, 14), ffn=(4, 4, 2))
CROSS = Saved(fixed=(12, 14, 10), query=(16, 8, 8))
# What norms of queries and keys save in addition.
HEAD_NORM = Saved(query=(8.1, 6.1, 6.1), kv=(8.1, 6.1, 6.1))
# What experts save beyond one feed-forward network of the same width: each has its own input and
# output, and autocast leaves their products in fp32.
EXPERT = Saved(fixed=(8.2, 8.2, 4.2))
ROUTED = Saved(routed=(0, 8, 0))

_BIASED = Saved(score=(4, 4, 4))  # the bias of positions is added to the mask in each block
_LATENT = Saved(query=(16.5, 22.5, 24))  # 13 to 16, 19 to 22 and 20 to 24 were measured
MORE = {  # than Llama's blocks, by family
    "phi3": Saved(fixed=(9.2, 0, 4.7)),
    "olmo2": Saved(fixed=(0.1, 2.6, 6.6)),
    "gemma": Saved(fixed=(0.1, 0.1, 4.2)),
    "gemma2": Saved(fixed=(22.1, 19.1, 23.1), score=(8, 8, 8)),
    "gemma3_text": Saved(fixed=(16.1, 18.6, 22.6)),
    "qwen2_moe": Saved(fixed=(4.1, 8.3, 2.1)),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "t5": _BIASED,
    "mt5": _BIASED,
    "gpt_oss": Saved(routed=(14.2, 13.3, 8.7), score=(4, 6, 2)),
}
PLAIN = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gpt2", "gpt_neox", "bert", "vit")
FAMILIES = {"", *PLAIN, "mixtral", "qwen3_moe", *MORE}  # whose blocks were measured
CHECKPOINT = (4, 4, 2)
# Live tensors as a multiple of saved ones: of each block, and in addition of the one in backward.
EACH_BLOCK, ONE_BLOCK = 1.15, 0.35
# Each logit takes 4 bytes four times: as accelerate returns it, log-softmax, and both gradients.
LOGIT_BYTES = 16


def saved_bytes(setup: Setup) -> float:
    """Return the bytes that one block saves per element of its hidden states.

    Attention is the default of transformers (fused, except in Gemma 2 and gpt-oss); dropout is
    off. Of an encoder and a decoder, this is the mean of their blocks.
    """
    model = setup.model
    usual = (GATED, UNGATED) if not model.cross_layers else (T5_GATED, T5_UNGATED)
    parts = (
        (usual[not model.gated], 1.0),
        (HEAD_NORM, model.head_norm),
        (CROSS, model.cross_layers / model.layers),
        (MORE.get(model.family, Saved()), 1.0),
        (EXPERT, model.experts_met),
        (ROUTED, 1.0),
    )
    return sum(share * _of_hidden(setup, saved) for saved, share in parts)


def _of_hidden(setup: Setup, saved: Saved) -> float:
    """Return the bytes per element of the hidden states."""
    model = setup.model
    fixed, query, kv, ffn, routed, score = (each[arithmetic(setup)] for each in saved)
    wide = query * model.query_width + kv * model.key_value_width + ffn * model.ffn
    wide += routed * model.experts_met * model.expert_ffn + score * model.heads * setup.seq_len
    return fixed + wide / model.hidden


def arithmetic(setup: Setup) -> Arithmetic:
    """Return the precision of the strategy's forward pass."""
    if not setup.is_half:
        return Arithmetic.FP32
    return Arithmetic.HALF if setup.strategy.stage else Arithmetic.AUTOCAST


def terms(setup: Setup) -> tuple[Term, ...]:
    """Return activations and logits; () if shape or sequence length is unknown."""
    model = setup.model
    if not (model.has_shape and setup.seq_len):
        return ()
    tokens = setup.seq_len * setup.micro_batch
    block, more = saved_bytes(setup), EACH_BLOCK + ONE_BLOCK
    # In bytes per element of the hidden states.
    parts: dict[str, tuple[float, str]] = {
        "activations": (
            block * (EACH_BLOCK * model.layers + ONE_BLOCK),
            f"{block:.4g} s b h ({EACH_BLOCK} L + {ONE_BLOCK})",
        )
    }
    if setup.grad_ckpt:  # the inputs of blocks, and one whole block, which includes its own input
        kept = CHECKPOINT[arithmetic(setup)]
        parts = {
            "checkpointed activations": (kept * (model.layers - 1), f"{kept:.4g} s b h (L - 1)"),
            "one block's activations": (block * more, f"{block:.4g} s b h x {more:g}"),
        }
    return (
        *(term(name, x * tokens * model.hidden, y, MEASURED) for name, (x, y) in parts.items()),
        term("logits", LOGIT_BYTES * tokens * model.vocab, f"{LOGIT_BYTES} s b V", MEASURED),
    )
