"""Estimate what the forward pass saves on a GPU for the backward pass: activations and logits."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from clusterrun.estimates.inputs import Setup, Term, term

MEASURED = "measured on transformers 5.23, fused attention, no dropout"


class Arithmetic(str, Enum):
    """The precision of a forward pass, which decides what it saves."""

    FP32 = "fp32"
    AUTOCAST = "autocast"  # fp32 weights and residuals, 16-bit products
    HALF = "half"  # 16-bit weights and residuals


_COLUMN = {Arithmetic.FP32: 0, Arithmetic.AUTOCAST: 1, Arithmetic.HALF: 2}


class Saved(NamedTuple):
    """Bytes that a block saves per element of its hidden states and of wider or narrower tensors.

    Widths are relative to the hidden size.
    """

    fixed: float
    query: float  # of all heads together
    kv: float  # of all heads of keys together
    ffn: float  # of the feed-forward network


# By (gated, arithmetic): the blocks of Llama, and of GPT-2, whose GELU is not fused. Those of
# GPT-NeoX and BERT save less than GPT-2's.
SAVED = {
    (True, Arithmetic.HALF): Saved(16, 4, 4, 8),
    (True, Arithmetic.AUTOCAST): Saved(26, 4, 4, 8),
    (True, Arithmetic.FP32): Saved(24, 8, 8, 16),
    (False, Arithmetic.HALF): Saved(16, 0, 0, 10),
    (False, Arithmetic.AUTOCAST): Saved(20, 0, 0, 10),
    (False, Arithmetic.FP32): Saved(32, 0, 0, 20),
}
# By the same: the blocks of T5's encoder, and what the second attention of its decoder saves.
T5 = {
    (True, Arithmetic.HALF): Saved(20, 14, 0, 14),
    (True, Arithmetic.AUTOCAST): Saved(26, 14, 0, 14),
    (True, Arithmetic.FP32): Saved(24, 16, 0, 28),
    (False, Arithmetic.HALF): Saved(20, 14, 0, 2),
    (False, Arithmetic.AUTOCAST): Saved(24, 14, 0, 4),
    (False, Arithmetic.FP32): Saved(24, 16, 0, 4),
}
CROSS = {
    Arithmetic.HALF: Saved(10, 8, 0, 0),
    Arithmetic.AUTOCAST: Saved(14, 8, 0, 0),
    Arithmetic.FP32: Saved(12, 16, 0, 0),
}
# What norms of queries and keys save in addition, per element of these.
HEAD_NORM = {Arithmetic.HALF: 6.1, Arithmetic.AUTOCAST: 6.1, Arithmetic.FP32: 8.1}


class More(NamedTuple):
    """Bytes that a family's blocks save beyond Llama's, in fp32, under autocast and in 16 bits.

    They are per element: `fixed` of the hidden states, `query` of all heads together, `routed` of
    all experts that a token uses, `score` of the attention scores if attention is not fused.
    """

    fixed: tuple[float, float, float] = (0, 0, 0)
    query: tuple[float, float, float] = (0, 0, 0)
    routed: tuple[float, float, float] = (0, 0, 0)
    score: tuple[float, float, float] = (0, 0, 0)


_BIASED = More(score=(4, 4, 4))  # the bias of positions is added to the mask in each block
_LATENT = More(query=(16.5, 22.5, 24))  # 13 to 16, 19 to 22 and 20 to 24 were measured
MORE = {
    "phi3": More(fixed=(9.2, 0, 4.7)),
    "olmo2": More(fixed=(0.1, 2.6, 6.6)),
    "gemma": More(fixed=(0.1, 0.1, 4.2)),
    "gemma2": More(fixed=(22.1, 19.1, 23.1), score=(8, 8, 8)),
    "gemma3_text": More(fixed=(16.1, 18.6, 22.6)),
    "qwen2_moe": More(fixed=(4.1, 8.3, 2.1)),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "t5": _BIASED,
    "mt5": _BIASED,
    "gpt_oss": More(routed=(14.2, 13.3, 8.7), score=(4, 6, 2)),
}
PLAIN = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gpt2", "gpt_neox", "bert", "vit")
FAMILIES = {"", *PLAIN, "mixtral", "qwen3_moe", *MORE}  # whose blocks were measured
# What experts save beyond one feed-forward network of the same width: each has its own input and
# output, and autocast leaves their products in fp32.
EXPERT = (8.2, 8.2, 4.2)
EXPERT_FFN = (0, 8, 0)
CHECKPOINT = {Arithmetic.HALF: 2, Arithmetic.AUTOCAST: 4, Arithmetic.FP32: 4}
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
    saved = (T5 if model.cross_layers else SAVED)[model.gated, arithmetic(setup)]
    norm = HEAD_NORM[arithmetic(setup)] if model.head_norm else 0
    query = (saved.query + norm) * model.query_width
    kv = (saved.kv + norm) * model.key_value_width
    dense = saved.fixed + (query + kv + saved.ffn * model.ffn) / model.hidden
    cross = CROSS[arithmetic(setup)]
    each = cross.fixed + cross.query * model.query_width / model.hidden
    return dense + each * model.cross_layers / model.layers + _more_bytes(setup)


def _more_bytes(setup: Setup) -> float:
    """Return what a family's blocks and experts save beyond those of Llama."""
    model, found = setup.model, MORE.get(setup.model.family, More())
    column = _COLUMN[arithmetic(setup)]
    fixed, query, routed, score = (each[column] for each in found)
    wide = query * model.query_width + routed * model.experts_met * model.expert_ffn
    ffn = EXPERT_FFN[column] * model.expert_ffn / max(1, model.hidden)
    experts = model.experts_met * (EXPERT[column] + ffn)
    return fixed + (wide + score * model.heads * setup.seq_len) / model.hidden + experts


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
