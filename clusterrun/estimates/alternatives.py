"""Find what would fit instead of a setup that does not: few changes, the fastest first."""

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
    """Return up to three other ways to train the same batch that fit.

    Each changes something that no other one changes alone. If none fits but tightly on these GPUs,
    adapters and more nodes are tried. Returns nothing if too little is known to recommend.
    """
    if question.gpu is None or question.is_cpu or not counts_activations(question.setup):
        return []
    asked = _asked(question)
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
    """Return which facts of a setup differ from those that were asked for."""
    names = ("strategy", "micro_batch", "grad_ckpt", "nodes", "lora", "load_in_4bit")
    return frozenset(name for name in names if getattr(setup, name) != getattr(asked, name))


def _asked(question: Question) -> Question:
    """Leave all open that may change; one rank under ddp is no other setup than one without."""
    setup = question.setup
    if setup.world == 1 and setup.strategy is Strategy.DDP:
        setup = replace(setup, strategy=Strategy.NONE)
    return replace(question, setup=setup, wanted_ckpt=None, traced=None)


def _fitting(question: Question) -> list[Choice]:
    found = recommend(question, question.setup.effective_batch)
    return [choice for choice in found if choice.setup != question.setup]


def _price(choice: Choice, asked: Setup) -> tuple[bool, int]:
    return choice.verdict is Fit.TIGHT, len(changed(choice.setup, asked))


def _beyond(question: Question) -> Iterator[Choice]:
    """Yield adapters, on a base in 4 bits if they need it, and the nodes that suffice."""
    setup, model = question.setup, question.setup.model
    adapted = replace(setup, lora=setup.lora or _RANK)
    quantized = () if model.active_params else (replace(adapted, load_in_4bit=True),)
    wider = (_on_nodes(setup, setup.nodes * factor) for factor in _MORE_NODES)
    for ways in ((adapted, *quantized), wider):
        found = (_simplest(question, way) for way in ways if way != setup)
        yield from islice((choice for choice in found if choice), 1)


def _simplest(question: Question, setup: Setup) -> Choice | None:
    """Return what fits, not tightly, with the fewest changes to the question."""
    found = [c for c in _fitting(replace(question, setup=setup)) if c.verdict is Fit.FITS]
    return min(found, key=lambda each: _price(each, question.setup), default=None)


def _on_nodes(setup: Setup, nodes: int) -> Setup:
    """Keep the effective batch if the ranks can share it, else a sample for each of them."""
    each = max(1, setup.effective_batch // (nodes * setup.procs_per_node))
    return replace(setup, nodes=nodes, micro_batch=1, accumulation=each)
