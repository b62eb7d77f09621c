"""Estimate what the forward pass leaves on a GPU for the backward pass: activations and logits."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from clusterrun.estimates.setup import Setup, Term
from clusterrun.spec import Strategy

TEMPORARIES = 1.15  # the peak over what is saved, from 28 copies (56 bytes) for Llama 3 published
MEASURED = "measured on transformers 5 with saved_tensors_hooks, SDPA"


class Arithmetic(str, Enum):
    """How a forward pass gets its numbers, which decides what it saves."""

    FP32 = "fp32"
    AUTOCAST = "autocast"  # fp32 weights and residuals, products of 16 bits
    HALF = "half"  # weights and residuals of 16 bits


class Saved(NamedTuple):
    """Bytes that a block saves of each element of its hidden states, and parts of it."""

    fixed: float
    kv: float  # of each share of k, the heads of keys and values to heads
    ffn: float  # of each multiple of f, the feed-forward width to the hidden size


# (gated, arithmetic): of the blocks of Llama and of GPT-2, whose GELU is not fused.
SAVED = {
    (True, Arithmetic.HALF): Saved(20, 4, 8),
    (True, Arithmetic.AUTOCAST): Saved(30, 4, 8),
    (False, Arithmetic.HALF): Saved(16, 0, 10),
    (False, Arithmetic.AUTOCAST): Saved(20, 0, 10),
    (True, Arithmetic.FP32): Saved(40, 8, 16),
    (False, Arithmetic.FP32): Saved(32, 0, 20),
}
CHECKPOINT = {Arithmetic.FP32: 4, Arithmetic.AUTOCAST: 4, Arithmetic.HALF: 2}
LOGITS = {True: 6, False: 8}  # by whether the arithmetic is of 16 bits


def saved_bytes(setup: Setup) -> float:
    """Return the bytes that one block saves of each element of its hidden states.

    Attention counts as fused, as transformers has it by default, and dropout as off.
    """
    model = setup.model
    saved = SAVED[model.gated, arithmetic(setup)]
    kv_share = (model.kv_heads or model.heads) / model.heads
    return saved.fixed + saved.kv * kv_share + saved.ffn * model.ffn / model.hidden


def arithmetic(setup: Setup) -> Arithmetic:
    """Tell how the strategy's forward pass gets its numbers."""
    if not setup.is_half:
        return Arithmetic.FP32
    keeps_fp32 = setup.strategy in (Strategy.NONE, Strategy.DDP)
    return Arithmetic.AUTOCAST if keeps_fp32 else Arithmetic.HALF


def terms(setup: Setup) -> tuple[Term, ...]:
    """Return activations and logits; nothing where shape or sequence length is not known."""
    model = setup.model
    if not (model.has_shape and setup.seq_len):
        return ()
    element = setup.seq_len * setup.micro_batch * model.hidden
    each = saved_bytes(setup)
    layer, formula = each * TEMPORARIES * element, f"{each:.4g} s b h x {TEMPORARIES}"
    logits = _logits(setup)
    if not setup.grad_ckpt:
        name, size = "activations", int(model.layers * layer)
        return (Term(name=name, bytes=size, formula=f"{formula} L", source=MEASURED), *logits)
    # the block that is computed again has its own input among what it saves
    kept = CHECKPOINT[arithmetic(setup)]
    inputs = int(kept * element * (model.layers - 1))
    return (
        Term(name="checkpoints", bytes=inputs, formula=f"{kept} s b h (L - 1)", source=MEASURED),
        Term(name="one block's activations", bytes=int(layer), formula=formula, source=MEASURED),
        *logits,
    )


def _logits(setup: Setup) -> tuple[Term, ...]:
    each = LOGITS[setup.is_half]
    size = each * setup.seq_len * setup.micro_batch * setup.model.vocab
    return (Term(name="logits", bytes=size, formula=f"{each} s b V", source=MEASURED),)
