"""Write the first lines of `plan`: whether a training fits, and what would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from clusterrun.cli.plan_numbers import gib, gigabytes, number, span
from clusterrun.estimates.alternatives import changed
from clusterrun.estimates.estimate import Estimate, Need, Time
from clusterrun.estimates.inputs import GIB, Fit, Setup
from clusterrun.estimates.recommend import Choice
from clusterrun.shared.durations import clock
from clusterrun.shared.wording import count

_WORDS: Final = {Fit.FITS: "fits", Fit.TIGHT: "fits tightly", Fit.NO: "does not fit"}


def verdict_line(answer: Estimate) -> str:
    """Return the verdict with the need that decides it."""
    verdict = answer.verdict
    if verdict is None:
        need = answer.gpu_memory or answer.host_memory
        where = "GPU" if answer.gpu_memory else "node"
        least = f"no verdict: {'at least ' if need.is_part else ''}"
        if need.capacity_bytes is None:
            option = "--gpu h100-80g" if answer.gpu_memory else "--host-mem 64GiB"
            return f"{least}{gib(need.total_bytes)} GiB per {where}; pass {option} for a verdict"
        return f"{least}{_of(need)} per {where}, and activations are not counted"
    for need, what in _needs(answer):
        if need.verdict is verdict:
            return f"{_WORDS[verdict]}: {what}"
    return f"does not finish: {_unfinished(answer)}"


def _needs(answer: Estimate) -> Iterator[tuple[Need, str]]:
    """Yield each need with its text, the GPU's first."""
    gpu, host, disk = answer.gpu_memory, answer.host_memory, answer.disk
    if gpu is not None:
        yield gpu, f"{_of(gpu)} per GPU"
    yield host, f"{_of(host)} of memory per node"
    there = gigabytes(disk.capacity_bytes or 0)
    yield disk, f"{gigabytes(disk.total_bytes)} of checkpoints on a disk with {there} free"


def _of(need: Need) -> str:
    """Write a need and its capacity, with a decimal if they would look the same or are small."""
    needed, there = need.total_bytes / GIB, (need.capacity_bytes or 0) / GIB
    digits = 0 if min(needed, there) >= 10 and round(needed) != round(there) else 1
    return f"{needed:,.{digits}f} of {there:,.{digits}f} GiB"


def _unfinished(answer: Estimate) -> str:
    limit = clock(answer.question.limit_s or 0)
    takes = f"{span(answer.time.whole)} " if answer.time and answer.time.whole else ""
    return f"{takes}in a job of {limit} that saves nothing; pass --save-every or raise --time"


def alternative_lines(found: Sequence[Choice], asked: Setup) -> Iterator[str]:
    """Yield the options that would make it fit, one alternative per line."""
    for label, choice in zip(("would fit:", *len(found) * [""]), found, strict=False):
        tightly = ", tightly" if choice.verdict is Fit.TIGHT else ""
        options = changed_options(choice.setup, asked)
        yield f"{label:<12}{options} ({choice.gpu_bytes / GIB:,.0f} GiB{tightly})"


def changed_options(setup: Setup, asked: Setup) -> str:
    """Return the options that change `asked` into `setup`."""
    what = changed(setup, asked)
    passes = f"--micro-batch {setup.micro_batch} --accumulation {setup.accumulation}"
    options = {
        f"--nodes {setup.nodes}": "nodes" in what,
        f"--lora {setup.lora}": "lora" in what,
        "--load-in-4bit": "load_in_4bit" in what,
        f"--strategy {setup.strategy.value}": ("strategy" in what and setup.world > 1)
        or setup.offloads_optimizer,
        "--grad-ckpt" if setup.grad_ckpt else "--no-grad-ckpt": "grad_ckpt" in what,
        passes: "micro_batch" in what or setup.accumulation != asked.accumulation,
    }
    return " ".join(option for option, is_changed in options.items() if is_changed)


def pace_line(answer: Estimate) -> str:
    """Return time, GPU-hours and rate of the training; "" if unknown or short of memory."""
    time, setup = answer.time, answer.question.setup
    if time is None or answer.lacks_memory:
        return ""
    things = count(setup.world, "rank" if answer.question.is_cpu else "GPU")
    parts = [f"{span(time.whole)} on {things}"] if time.whole else []
    parts += [f"{number(answer.gpu_hours)} GPU-hours"] if answer.gpu_hours else []
    return ", ".join([*parts, rate(time, setup)])


def rate(time: Time, setup: Setup) -> str:
    """Return the tokens a second of all ranks, or the samples if these have no tokens."""
    tokens = tokens_per_s(time, setup)
    return f"{number(tokens)} tokens/s" if tokens else f"{number(time.samples_s)} samples/s"


def tokens_per_s(time: Time, setup: Setup) -> float | None:
    """Return the tokens a second of all ranks; None if samples have no tokens."""
    return time.samples_s * setup.seq_len if setup.seq_len and setup.model.is_text else None
