"""Find setups that fit instead of one that does not, with the fewest changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Final

from clusterrun.config.spec import Strategy
from clusterrun.estimates.estimate import Question, counts_activations
from clusterrun.estimates.inputs import Fit, Setup
from clusterrun.estimates.recommend import Choice, recommend

MOST: Final = 3
_MORE_NODES: Final = (2, 4, 8, 16, 32, 64)
_RANK: Final = 16  # of the adapters that are proposed


def alternatives(question: Question) -> list[Choice]:
    """Return up to three other ways to train the same batch that fit, the fewest changes first.

    None of them includes all changes of another. If all that fit on these GPUs fit tightly,
    adapters and more nodes are also tried. Return [] if too little is known to recommend.
    """
    if question.gpu is None or question.is_cpu or not counts_activations(question.setup):
        return []
    # Unset what may change; one rank under ddp is the same setup as without a strategy.
    setup = question.setup
    if setup.world == 1 and setup.strategy is Strategy.DDP:
        setup = replace(setup, strategy=Strategy.NONE)
    asked = replace(question, setup=setup, wanted_ckpt=None)
    found = _fitting(asked)
    chosen: list[Choice] = []
    for choice in sorted(found, key=lambda each: _price(each, asked.setup)):
        what = changed(choice.setup, asked.setup)
        if not any(changed(each.setup, asked.setup) <= what for each in chosen):
            chosen.append(choice)
    if not any(choice.verdict is Fit.FITS for choice in chosen):
        chosen = [*chosen[:1], *_beyond(asked)]
    return chosen[:MOST]


def changed(setup: Setup, asked: Setup) -> frozenset[str]:
    """Return the names of the facts in which a setup differs from the requested one."""
    names = ("strategy", "micro_batch", "grad_ckpt", "nodes", "lora", "load_in_4bit")
    return frozenset(name for name in names if getattr(setup, name) != getattr(asked, name))


def _fitting(question: Question) -> list[Choice]:
    found = recommend(question, question.setup.effective_batch)
    return [choice for choice in found if choice.setup != question.setup]


def _price(choice: Choice, asked: Setup) -> tuple[bool, int]:
    return choice.verdict is Fit.TIGHT, len(changed(choice.setup, asked))


def _beyond(question: Question) -> Iterator[Choice]:
    """Yield a choice with adapters, on a 4-bit base if needed, and one with enough nodes."""
    setup, model = question.setup, question.setup.model
    adapted = replace(setup, lora=setup.lora or _RANK)
    quantized = () if model.active_params else (replace(adapted, load_in_4bit=True),)
    wider = (_on_nodes(setup, setup.nodes * factor) for factor in _MORE_NODES)
    for ways in ((adapted, *quantized), wider):
        found = (_simplest(question, way) for way in ways if way != setup)
        yield from islice((choice for choice in found if choice), 1)


def _simplest(question: Question, setup: Setup) -> Choice | None:
    """Return the choice that fits, not tightly, with the fewest changes to the question."""
    found = [c for c in _fitting(replace(question, setup=setup)) if c.verdict is Fit.FITS]
    return min(found, key=lambda each: _price(each, question.setup), default=None)


def _on_nodes(setup: Setup, nodes: int) -> Setup:
    """Return the setup on `nodes`, with the same batch if the ranks can share it, else larger."""
    each = max(1, setup.effective_batch // (nodes * setup.procs_per_node))
    return replace(setup, nodes=nodes, micro_batch=1, accumulation=each)
