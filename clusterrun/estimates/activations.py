"""Estimate what the forward pass leaves on a GPU for the backward pass: activations and logits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from clusterrun.config.spec import Strategy
from clusterrun.estimates.inputs import Setup, Term, term

MEASURED = "measured on transformers 5.23, fused attention, no dropout"


class Arithmetic(str, Enum):
    """The precision of a forward pass, which decides what it saves."""

    FP32 = "fp32"
    AUTOCAST = "autocast"  # fp32 weights and residuals, products of 16 bits
    HALF = "half"  # weights and residuals of 16 bits


class Saved(NamedTuple):
    """Bytes that a block saves of each element of its hidden states, and of wider or narrower ones.

    Widths are relative to the hidden size.
    """

    fixed: float
    query: float  # of all heads together
    kv: float  # of all heads of keys together
    ffn: float  # of the feed-forward network


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What a forward pass leaves, in bytes of each element of the hidden states.

    One more block saves `block`, or `kept` if activations are computed again; `outside` is saved
    outside of blocks, without logits and loss. `is_traced`: a model was built and measured.
    """

    block: float
    kept: float
    outside: float = 0.0
    source: str = MEASURED
    is_traced: bool = False


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
# What norms of queries and keys save in addition, for each element of these.
HEAD_NORM = {Arithmetic.HALF: 6.1, Arithmetic.AUTOCAST: 6.1, Arithmetic.FP32: 8.1}
CHECKPOINT = {Arithmetic.HALF: 2, Arithmetic.AUTOCAST: 4, Arithmetic.FP32: 4}
# What live tensors reach beyond what is saved: of each block, and of the one that goes backward.
EACH_BLOCK, ONE_BLOCK = 1.15, 0.35
# Of each logit 4 bytes four times: as accelerate returns it, its log-softmax, and their gradients.
LOGIT_BYTES = 16


def saved_bytes(setup: Setup) -> float:
    """Return the bytes that one block saves of each element of its hidden states.

    Attention counts as fused, as transformers has it by default, and dropout as off.
    """
    model = setup.model
    saved = SAVED[model.gated, arithmetic(setup)]
    norm = HEAD_NORM[arithmetic(setup)] if model.head_norm else 0
    query = (saved.query + norm) * model.query_width
    kv = (saved.kv + norm) * model.key_value_width
    return saved.fixed + (query + kv + saved.ffn * model.ffn) / model.hidden


def arithmetic(setup: Setup) -> Arithmetic:
    """Return the precision of the strategy's forward pass."""
    if not setup.is_half:
        return Arithmetic.FP32
    keeps_fp32 = setup.strategy in (Strategy.NONE, Strategy.DDP)
    return Arithmetic.AUTOCAST if keeps_fp32 else Arithmetic.HALF


def closed_form(setup: Setup) -> Activations:
    """Return what the closed form leaves."""
    return Activations(block=saved_bytes(setup), kept=CHECKPOINT[arithmetic(setup)])


def terms(setup: Setup, traced: Activations | None = None) -> tuple[Term, ...]:
    """Return activations and logits; nothing if shape or sequence length is unknown.

    A trace of this very setup replaces the closed form.
    """
    model = setup.model
    if not (model.has_shape and setup.seq_len):
        return ()
    tokens = setup.seq_len * setup.micro_batch
    left = traced or closed_form(setup)
    logits = LOGIT_BYTES * tokens * model.vocab
    return (
        *(
            _term(name, each * tokens * model.hidden, formula, left)
            for name, each, formula in (_checkpointed if setup.grad_ckpt else _whole)(setup, left)
        ),
        *_outside(tokens * model.hidden, left),
        term("logits", logits, f"{LOGIT_BYTES} s b V", MEASURED),
    )


def _whole(setup: Setup, left: Activations) -> tuple[tuple[str, float, str], ...]:
    """Return the activations of all blocks in bytes for each element of hidden states."""
    each = left.block * (EACH_BLOCK * setup.model.layers + ONE_BLOCK)
    return (("activations", each, f"{left.block:.4g} s b h ({EACH_BLOCK} L + {ONE_BLOCK})"),)


def _checkpointed(setup: Setup, left: Activations) -> tuple[tuple[str, float, str], ...]:
    """Return the inputs of blocks, and one block; its own input is among what it saves."""
    more = EACH_BLOCK + ONE_BLOCK
    return (
        ("checkpoints", left.kept * (setup.model.layers - 1), f"{left.kept:.4g} s b h (L - 1)"),
        ("one block's activations", left.block * more, f"{left.block:.4g} s b h x {more:g}"),
    )


def _outside(elements: int, left: Activations) -> tuple[Term, ...]:
    """Return what is saved outside of blocks, which the closed form leaves out."""
    if not left.outside:
        return ()
    formula = f"{left.outside:.4g} s b h"
    return (_term("outside of blocks", left.outside * elements, formula, left),)


def _term(name: str, size: float, formula: str, left: Activations) -> Term:
    formula = f"{formula}, traced" if left.is_traced else formula
    return term(name, size, formula, left.source)
