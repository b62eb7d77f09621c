"""Recommend strategies, micro-batches and accumulations that fit, the fastest first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from clusterrun.config.choices import Strategy
from clusterrun.errors import UsageError
from clusterrun.estimates import gpus
from clusterrun.estimates.estimate import (
    Question,
    counts_activations,
    disk_need,
    gpu_need,
    host_need,
    mistake,
    step_duration,
    wrong_sizes,
)
from clusterrun.estimates.inputs import Fit, Setup
from clusterrun.estimates.speed import step_cost

MAX_MICRO_BATCH: Final = 1024
AS_FAST: Final = 1.05  # `step_cost` is not more precise than that
WHAT_IF: Final = ("micro-batch", "strategy", "nodes", "seq-len", "gpu")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to train, what it needs, and the seconds of its step as `step_cost` estimates it."""

    setup: Setup
    step_s: float
    gpu_bytes: int
    host_bytes: int
    verdict: Fit  # TIGHT at best if it offloads and the memory of the host is unknown


def recommend(question: Question, *, strategy: Strategy | None = None) -> list[Choice]:
    """Return the choices that fit at the effective batch, of all strategies or one, fastest first.

    Choices that fit tightly come last. Raises UsageError if the batch can't be divided or the
    memory or speed of the GPUs is unknown.
    """
    _refuse_cpu(question)
    if question.gpu is None or question.gpu_bytes is None:
        text = "a recommendation needs the memory and the speed of the GPU"
        raise UsageError(text, hint="name the GPU, such as --gpu a100-80g")
    if not counts_activations(question.setup):
        text = "a recommendation needs the sizes of the activations, which are unknown"
        hint = "pass --seq-len and a model whose shape is known, such as --model qwen3-30b-a3b"
        raise UsageError(text, hint=hint)
    setups = (x for x in _setups(question) if strategy is None or x.strategy == strategy)
    choices = [_choice_of(question, setup) for setup in setups]
    return [*_fastest_first(choices, Fit.FITS), *_fastest_first(choices, Fit.TIGHT)]


def _refuse_cpu(question: Question) -> None:
    if question.is_cpu:
        text = "this training runs on CPUs, but --recommend compares only GPUs"
        raise UsageError(text, hint="request GPUs (--gpus-per-node)")


def _fastest_first(choices: list[Choice], verdict: Fit) -> list[Choice]:
    """Sort the choices with a verdict by time; those about as fast as the fastest count as ties."""
    chosen = [choice for choice in choices if choice.verdict is verdict]
    as_fast_s = AS_FAST * min((choice.step_s for choice in chosen), default=0.0)
    return sorted(chosen, key=lambda choice: max(choice.step_s, as_fast_s))  # ties: simplest first


def best_per_strategy(choices: list[Choice]) -> list[Choice]:
    """Keep the first choice of each strategy."""
    first = {choice.setup.strategy: choice for choice in reversed(choices)}
    return [choice for choice in choices if choice is first[choice.setup.strategy]]


def smallest(question: Question) -> Choice:
    """Return the choice that needs the least GPU memory, even if that is too much."""
    choices = (_choice_of(question, setup) for setup in _setups(question))
    return min(choices, key=lambda choice: choice.gpu_bytes)


def _setups(question: Question) -> Iterator[Setup]:
    """Yield every way to reach the effective batch. Raises UsageError if there is none."""
    asked, wanted_ckpt, effective = question.setup, question.wanted_ckpt, question.effective_batch
    ranks, strategies = asked.data_parallel, _strategies(asked)
    if not strategies:
        raise UsageError("no strategy supports the parallel sizes", hint="change launch.*_parallel")
    per_rank, rest = divmod(effective, ranks)
    if rest or not per_rank:
        text = f"an effective batch of {effective} is not divisible by {ranks} data-parallel ranks"
        raise UsageError(text, hint=f"use {max(1, round(effective / ranks)) * ranks}")
    divisors = [n for n in range(min(per_rank, MAX_MICRO_BATCH), 0, -1) if per_rank % n == 0]
    for strategy in strategies:
        for grad_ckpt in (False, True) if wanted_ckpt is None else (wanted_ckpt,):
            for micro_batch in divisors:
                yield replace(
                    asked,
                    strategy=strategy,
                    grad_ckpt=grad_ckpt,
                    micro_batch=micro_batch,
                    accumulation=per_rank // micro_batch,
                )


def _strategies(asked: Setup) -> list[Strategy]:
    """Return the strategies that can train the setup, the simplest first."""
    known = sorted(Strategy, key=lambda each: each.order)
    if asked.world == 1:  # nothing can be sharded, but DeepSpeed can offload
        return [s for s in known if s is Strategy.NONE or (s.is_deepspeed and s.offload)]
    able = (s for s in known if s is not Strategy.NONE and (asked.nodes > 1 or not s.is_hybrid))
    return [s for s in able if not wrong_sizes(replace(asked, strategy=s))]


def _choice_of(question: Question, setup: Setup) -> Choice:
    """Estimate one way to train; its verdict is the worst of GPU, host and disk."""
    asked = replace(question, setup=setup)
    gpu, host = gpu_need(asked), host_need(asked)
    assert gpu is not None  # `recommend` refuses CPUs and an unknown GPU
    assert question.gpu is not None
    links = question.links(question.gpu)
    if_host_unknown = Fit.TIGHT if setup.offloads_optimizer else Fit.FITS
    verdicts = (gpu.verdict, host.verdict or if_host_unknown, disk_need(asked).verdict)
    return Choice(
        setup=setup,
        step_s=step_cost(setup, question.gpu, links, mfu=question.mfu).total_s,
        gpu_bytes=gpu.total_bytes,
        host_bytes=host.total_bytes,
        verdict=max([each for each in verdicts if each is not None], key=list(Fit).index),
    )


def neighbours(question: Question, what: str) -> list[Question]:
    """Return sensible questions that differ only in `what`, one of WHAT_IF. Raises UsageError."""
    if what == "gpu":
        return _on_other_gpus(question)
    setup, field = question.setup, what.replace("-", "_")
    now = getattr(setup, field)
    values = _strategies(setup) if what == "strategy" else [now // 2, now * 2, now * 4]
    changes: list[dict[str, Any]] = [{field: x} for x in values if x and x != now]
    asked = (replace(question, setup=replace(setup, **change)) for change in changes)
    return [neighbour for neighbour in asked if not mistake(neighbour)]


def _on_other_gpus(question: Question) -> list[Question]:
    """Ask about all other GPUs, the fastest first if times are known; in fp16 without bf16."""
    _refuse_cpu(question)
    setup, asked = question.setup, []
    for gpu in gpus.ALL:
        if question.gpu is None or gpu.name != question.gpu.name:
            on_gpu = setup if setup.precision in gpu.tflops else replace(setup, precision="fp16")
            # A measured step says nothing about another GPU.
            card = replace(question, gpu=gpu, gpu_bytes=gpu.memory_bytes, step_time_s=None)
            asked.append(replace(card, setup=on_gpu))
    return sorted(asked, key=lambda each: step.mid_s if (step := step_duration(each)) else 0.0)


MOST: Final = 3
_MORE_NODES: Final = (2, 4, 8, 16, 32, 64)
_RANK: Final = 16  # of the adapters that are proposed


def alternatives(question: Question) -> list[Choice]:
    """Return up to three other ways to train the same batch that fit, the fewest changes first.

    None of them makes all changes of another one. If none fits well on these GPUs,
    adapters and more nodes are also tried. Return [] if too little is known to recommend.
    """
    if question.gpu is None or question.is_cpu or not counts_activations(question.setup):
        return []
    # Unset what may change; one rank under ddp is the same setup as without a strategy.
    setup = question.setup
    if setup.world == 1 and setup.strategy is Strategy.DDP:
        setup = replace(setup, strategy=Strategy.NONE)
    asked = replace(question, setup=setup, wanted_ckpt=None, wanted_batch=None)
    chosen: list[Choice] = []
    for choice in sorted(_fitting(asked), key=lambda each: _changes_key(each, asked.setup)):
        changes = changed(choice.setup, asked.setup)
        if not any(changed(each.setup, asked.setup).issubset(changes) for each in chosen):
            chosen.append(choice)
    if not any(choice.verdict is Fit.FITS for choice in chosen):
        chosen = [*chosen[:1], *_with_adapters_or_nodes(asked)]
    return chosen[:MOST]


def changed(setup: Setup, asked: Setup) -> frozenset[str]:
    """Return the names of the facts in which a setup differs from the requested one."""
    names = ("strategy", "micro_batch", "grad_ckpt", "nodes", "lora", "load_in_4bit")
    return frozenset(name for name in names if getattr(setup, name) != getattr(asked, name))


def _fitting(question: Question) -> list[Choice]:
    return [choice for choice in recommend(question) if choice.setup != question.setup]


def _changes_key(choice: Choice, asked: Setup) -> tuple[bool, int]:
    """Return the key to sort by: tight choices last, then by the number of changes."""
    return choice.verdict is Fit.TIGHT, len(changed(choice.setup, asked))


def _with_adapters_or_nodes(question: Question) -> Iterator[Choice]:
    """Yield a choice with adapters, on a 4-bit base if needed, and one with enough nodes."""
    setup = question.setup
    adapted = replace(setup, lora=setup.lora or _RANK)
    with_adapters = [adapted]
    if not setup.model.active_params:  # experts can't be quantized
        with_adapters.append(replace(adapted, load_in_4bit=True))
    wider = (replace(setup, nodes=setup.nodes * factor, micro_batch=1) for factor in _MORE_NODES)
    # The same batch if the ranks can share it, else a larger one.
    on_more_nodes = (
        replace(each, accumulation=max(1, setup.effective_batch // each.world)) for each in wider
    )
    yield from _first_that_fits(question, with_adapters)
    yield from _first_that_fits(question, on_more_nodes)


def _first_that_fits(question: Question, setups: Iterable[Setup]) -> Iterator[Choice]:
    """Yield at most one choice: that with the fewest changes for the first setup that fits well."""
    for setup in setups:
        fitting = _fitting(replace(question, setup=setup)) if setup != question.setup else []
        fits_well = [choice for choice in fitting if choice.verdict is Fit.FITS]
        if fits_well:
            yield min(fits_well, key=lambda each: _changes_key(each, question.setup))
            return
