"""Print what `plan` shows to people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import click

from clusterrun.cli.plan_numbers import billions, gib, gigabytes, number, span
from clusterrun.cli.plan_verdict import alternative_lines, pace_line, tokens_per_s, verdict_line
from clusterrun.cli.shared import output
from clusterrun.cli.shared.options import as_options
from clusterrun.config.choices import LrRule
from clusterrun.estimates.cost import Cost, assumption
from clusterrun.estimates.disk import checkpoint_bytes
from clusterrun.estimates.estimate import Estimate, Need, Question, Time, counts_activations
from clusterrun.estimates.inputs import Fit
from clusterrun.estimates.memory import SYMBOLS, values_of_symbols
from clusterrun.estimates.recommend import Choice, neighbours
from clusterrun.estimates.steps import schedule_steps
from clusterrun.shared.durations import clock
from clusterrun.shared.wording import count

FULL: Final = 0.90  # of the MFU: the view mentions passes that reach less
SMALL: Final = 0.01  # of a step: shorter parts are not shown
_COLOURS: Final = {Fit.FITS: "green", Fit.TIGHT: "yellow", Fit.NO: "red"}


def show(
    answer: Estimate,
    around: Sequence[Estimate],
    *,
    what: str | None,
    alternatives: Sequence[Choice] = (),
    explains: bool = False,
) -> None:
    """Print an estimate, the verdict first, and its neighbours.

    The neighbours are a table if `what` is given, else one line. `explains` adds the formulas and
    the meaning of their symbols.
    """
    for line in (*_verdict(answer, alternatives), "", *_lines(answer, explains=explains)):
        output.answer(line)
    if what is not None:
        output.answer("")
        (_show_gpus if what == "gpu" else _show_table)((answer, *around))
    elif around and not answer.lacks_memory:
        output.answer(_row("what if", "   ".join(map(_in_short, around))))
    for line in _legend(answer) if explains else ():
        output.answer(line)
    for text in answer.notes:
        output.note(text)
    output.note("estimated from formulas; to compare with a run: clusterrun plan --compare JOB")
    if output.is_on_terminal():  # the first line may have left the screen
        output.answer(next(_verdict(answer, ())))


def _verdict(answer: Estimate, alternatives: Sequence[Choice]) -> Iterator[str]:
    colour = _COLOURS[answer.verdict] if answer.verdict else None
    yield click.style(verdict_line(answer), fg=colour, bold=True)
    yield from alternative_lines(alternatives, answer.question.setup)
    if line := pace_line(answer):
        yield line


def _legend(answer: Estimate) -> Iterator[str]:
    """Yield the symbols of the formulas that are shown, with their values."""
    needs = (answer.gpu_memory, answer.host_memory, answer.disk)
    formulas = " ".join(term.formula for need in needs if need for term in need.terms)
    used = set(re.findall(r"[A-Za-z]\w*", formulas))
    values = values_of_symbols(answer.question.setup)
    yield ""
    for symbol, meaning in SYMBOLS.items():
        if symbol in used:
            yield f"  {symbol:<6}{values[symbol]:>16,.10g}  {meaning}"


def usual_neighbours(question: Question) -> list[Question]:
    """Return the default neighbours: larger micro-batches, if their activations are counted."""
    is_known = question.gpu_bytes and counts_activations(question.setup)
    return neighbours(question, "micro-batch")[-2:] if is_known else []


def _lines(answer: Estimate, *, explains: bool) -> Iterator[str]:
    yield from _head(answer.question)
    yield ""
    yield from _batch(answer)
    yield ""
    if answer.gpu_memory is not None:
        yield from _memory("memory per GPU", answer.gpu_memory, explains=explains)
        yield ""
    yield from _memory("host memory per node", answer.host_memory, explains=explains)
    yield ""
    yield from _time(answer)
    yield from _speedup(answer)
    yield from _disk(answer)
    yield _row("loader", _loader(answer))
    yield from _preset(answer)


def _head(question: Question) -> Iterator[str]:
    setup, model = question.setup, question.setup.model
    active = f", {billions(model.active_params)} active" if model.active_params else ""
    size = f"{billions(model.params)} parameters{active}"
    facts = [model.name or "unnamed", size, setup.precision]
    facts += [f"seq {setup.seq_len:,}"] if setup.seq_len else []
    facts += ["checkpointing on"] if setup.grad_ckpt else []
    facts += [f"LoRA rank {setup.lora}"] if setup.lora else []
    facts += ["base in 4 bits"] if setup.load_in_4bit else []
    yield _row("model", "   ".join(facts))
    kind = "CPU" if question.is_cpu else (question.gpu.name if question.gpu else "GPU")
    things = count(setup.world, "rank" if question.is_cpu else "GPU")
    cluster = f"{count(setup.nodes, 'node')} x {setup.procs_per_node} {kind} = {things}"
    yield _row("cluster", f"{cluster}   strategy {setup.strategy.value}")


def _batch(answer: Estimate) -> Iterator[str]:
    question, setup = answer.question, answer.question.setup
    passes = f"{setup.micro_batch} per rank x {setup.accumulation} accumulation"
    ranks = "data-parallel rank" if setup.data_parallel < setup.world else "rank"
    passes += (
        f" x {count(setup.data_parallel, ranks)} = {count(f'{setup.effective_batch:,}', 'sample')}"
    )
    tokens = f" ({setup.effective_batch * setup.seq_len:,} tokens)" if setup.seq_len else ""
    yield _row("batch", f"{passes} a step{tokens}")
    if line := _steps(answer):
        yield _row("steps", line)
    if answer.steps.total and setup.world > 1:
        length = schedule_steps(answer.steps.total, setup.world)
        yield _row(
            "", f"accelerate steps a scheduler once per process: set its length to {length:,}"
        )
    if answer.rates is not None:
        rates, base = answer.rates, f"{question.lr:.3g} at batch {question.base_batch}"
        chosen = {LrRule.LINEAR: "linear", LrRule.SQRT: "sqrt"}.get(question.lr_rule, "none")
        yield _row("lr", f"{base} -> {rates.linear:.3g} linear, {rates.sqrt:.3g} sqrt ({chosen})")
        yield from (_row("", note) for note in rates.notes)


def _steps(answer: Estimate) -> str:
    steps, question = answer.steps, answer.question
    if steps.full_per_epoch is None:
        return f"{steps.total:,} in all" if steps.total else ""
    text = f"{question.samples:,} samples / {question.setup.effective_batch:,}"
    text += f" = {steps.full_per_epoch:,} full steps per epoch"
    if steps.accelerate_per_epoch != steps.full_per_epoch:
        text += f" (accelerate runs {steps.accelerate_per_epoch:,})"
    return text + (f"; {steps.total:,} in all" if steps.total else "")


def _memory(title: str, need: Need, *, explains: bool) -> Iterator[str]:
    yield f"{title:<30}{'GiB':>8}"
    for term in need.terms:
        formula = f"   {term.formula}" if explains else ""
        yield f"  {term.name:<28}{gib(term.bytes):>8}{formula}"
    label = "total" if need.margin == 1 else f"total + {100 * (need.margin - 1):.0f} %"
    yield f"  {label:<28}{gib(need.total_bytes):>8}{_judged(need)}"
    if need.band is not None:
        low, high = (gib(share * need.total_bytes) for share in need.band)
        yield f"  {'measured runs took':<28}{low:>8}   to {high}"


def _judged(need: Need) -> str:
    if need.capacity_bytes is None:
        return ""
    share = f"{100 * need.total_bytes / need.capacity_bytes:.0f} %"
    verdict = _painted(need.verdict) if need.verdict else "without activations"
    if need.verdict is Fit.TIGHT:
        verdict += f": it fits below {100 * need.fits_below:.0f} %"
    return f"   of {gib(need.capacity_bytes)}   {share}   {verdict}"


def _time(answer: Estimate) -> Iterator[str]:
    time, question = answer.time, answer.question
    if time is None:
        return
    parts = [f"{span(time.step)} a step"]
    parts += [f"{span(time.epoch)} an epoch"] if time.epoch else []
    parts += [f"{span(time.whole)} in all"] if time.whole else []
    yield _row("time", f"{', '.join(parts)} ({_basis(time, question)})")
    tokens = tokens_per_s(time, question.setup)
    both = f", {number(tokens)} tokens/s" if tokens else ""
    yield _row("", f"{number(time.samples_s)} samples/s{both} in all")
    yield from _parts(time.cost)
    if time.whole is not None and time.step.basis != "measured":
        band = f"{clock(time.whole.low_s)} to {clock(time.whole.high_s)}"
        yield _row("", f"{band} for an MFU a quarter higher or lower")
    if answer.cost is not None:
        yield _row("cost", f"{answer.cost:,.2f} for {number(answer.gpu_hours or 0)} GPU-hours")
    if time.segments is not None and question.limit_s is not None:
        yield _row("", _segments(answer, time.segments, question.limit_s))


def _parts(cost: Cost | None) -> Iterator[str]:
    """Yield the parts of a step, if it has more than its passes."""
    if cost is None:
        return
    parts = {"passes": cost.compute_s, "traffic": cost.network_s, "host": cost.host_s}
    shown = [f"{name} {s:.2g} s" for name, s in parts.items() if s >= SMALL * cost.total_s]
    if len(shown) > 1:
        yield _row("", f"a step: {', '.join(shown)}")


def _basis(time: Time, question: Question) -> str:
    reached = f"at MFU {time.mfu:.2g}" if time.mfu else ""
    if time.step.basis == "measured":
        return f"measured, {reached}" if reached else "measured"
    if time.filled >= FULL:
        return reached
    return f"{reached}: passes this small reach {100 * time.filled:.0f} % of {question.mfu:g}"


def _speedup(answer: Estimate) -> Iterator[str]:
    found = answer.speedup
    if found is None or answer.lacks_memory:
        return
    note = f" ({found.note})" if found.note else ""
    if found.measured_at:
        share = 100 * found.low * found.base / answer.question.setup.world
        over = f"{found.low:.3g} times {count(found.base, 'rank')}{note}, efficiency {share:.0f} %"
        yield _row("speed-up", f"{over}: measured by clusterrun scaling, {found.measured_at[:10]}")
    else:
        band = f"{found.low:.3g} to {found.high:.3g} times one GPU{note}"
        yield _row("speed-up", f"{band}: a rule of thumb; measure yours with clusterrun scaling")


def _segments(answer: Estimate, segments: int, limit_s: int) -> str:
    if segments == 1:
        return f"fits into one job of {clock(limit_s)}"
    if answer.never_ends:
        no = _painted(Fit.NO)
        return f"longer than one job of {clock(limit_s)}, and saves nothing (--save-every)   {no}"
    return f"{segments} jobs of {clock(limit_s)}: clusterrun submit --chain {segments}"


def _disk(answer: Estimate) -> Iterator[str]:
    need, question = answer.disk, answer.question
    one, best = checkpoint_bytes(question.setup), question.keep_best
    sums = f"keep {question.keep} + 1 in flight"
    sums += f" + weights of the best {best}" if best else ""
    sums += f" = {gigabytes(need.total_bytes)}"
    free = f" of {gigabytes(need.capacity_bytes)} free" if need.capacity_bytes else ""
    verdict = f"   {_painted(need.verdict)}" if need.verdict is not None else ""
    if question.save_every and need.verdict is None:
        verdict = "   not checked: the job writes elsewhere"
    yield _row("disk", f"{gigabytes(one)} per checkpoint, {sums}{free}{verdict}")


def _loader(answer: Estimate) -> str:
    loader = answer.loader
    pinned = "true" if loader.pin_memory else "false"
    workers = "" if loader.num_workers is None else f"num_workers {loader.num_workers}, "
    return f"{workers}pin_memory {pinned}: {loader.why}"


def _preset(answer: Estimate) -> Iterator[str]:
    """Yield settings to start with, if no batch size was given."""
    found = answer.preset
    if found is None:
        return
    batch = f"micro-batch {found.micro_batch} x {found.accumulation} accumulation"
    ckpt = "on" if found.grad_ckpt else "off"
    yield _row("preset", f"{found.name}: {batch}, precision {found.precision.value},")
    yield _row("", f"checkpointing {ckpt}: a starting point, not measured")


# Neighbours and choices


def _in_short(answer: Estimate) -> str:
    need = answer.gpu_memory or answer.host_memory
    share = f"{100 * need.total_bytes / need.capacity_bytes:.0f} %" if need.capacity_bytes else ""
    verdict = f" {_painted(need.verdict)}" if need.verdict else ""
    what = f"micro-batch {answer.question.setup.micro_batch}"
    return f"{what}: {gib(need.total_bytes)} GiB ({share}){verdict}"


def _show_gpus(found: Sequence[Estimate]) -> None:
    """Print the cards with memory, cost and the time of the training, or of a step."""
    is_priced = any(each.cost is not None for each in found)
    span = "IN ALL" if found[-1].time and found[-1].time.whole else "A STEP"
    head = ("GPU", "PRECISION", "GPU GiB", "OF", "SHARE", "HOST", span, "SAMPLES/s")
    head += (*(("COST",) if is_priced else ()), "VERDICT")
    rows = [_gpu_cells(each, is_priced=is_priced) for each in found]
    output.answer_table(head, rows, spare=("SAMPLES/s", "HOST", "OF"))


def _gpu_cells(found: Estimate, *, is_priced: bool) -> tuple[str, ...]:
    question, need, time = found.question, found.gpu_memory, found.time
    assert need is not None  # only GPUs are compared
    held = need.capacity_bytes
    sizes = (gib(held), f"{100 * need.total_bytes / held:.0f} %") if held else ("-", "-")
    host = found.host_memory.verdict
    return (
        question.gpu.name if question.gpu else "-",
        question.setup.precision,
        gib(need.total_bytes),
        *sizes,
        host.value if host else "-",
        *((span(time.whole or time.step), number(time.samples_s)) if time else ("-", "-")),
        *(("-" if found.cost is None else f"{found.cost:,.2f}",) if is_priced else ()),
        need.verdict.value if need.verdict else "-",
    )


def _show_table(found: Iterable[Estimate]) -> None:
    head = ("STRATEGY", "NODES", "MICRO-BATCH", "SEQ", "BATCH", "GPU GiB", "HOST GiB", "VERDICT")
    output.answer_table(head, [_cells(each) for each in found], spare=("SEQ", "BATCH"))


def _cells(found: Estimate) -> tuple[str, ...]:
    setup = found.question.setup
    gpu = gib(found.gpu_memory.total_bytes) if found.gpu_memory else "-"
    verdict = found.verdict.value if found.verdict else "-"
    shape = (setup.strategy.value, setup.nodes, setup.micro_batch, setup.seq_len or "-")
    sizes = (f"{setup.effective_batch:,}", gpu, gib(found.host_memory.total_bytes), verdict)
    return (*map(str, shape), *sizes)


def show_choices(choices: Sequence[Choice], question: Question) -> None:
    """Print the best setup of each strategy, the fastest first, and how to use the first."""
    best = choices[0].step_s
    rows = [_choice_cells(choice, best, question) for choice in choices]
    head = ("STRATEGY", "MICRO-BATCH", "ACCUMULATION", "CHECKPOINTING", "GPU", "HOST GiB", "TIME")
    output.answer_table((*head, "VERDICT"), rows, spare=("HOST GiB",))
    output.answer("")
    output.answer(f"details: clusterrun plan ... {as_options(choices[0].setup)}")
    output.answer(
        "to train with the first, describe the training in clusterrun.yaml and run: "
        "clusterrun submit --plan"
    )
    if question.host_bytes is None:
        output.note("the memory of a node is unknown, so offload is at best tight; pass --host-mem")
    if question.gpu is not None:
        output.note(assumption(question.links(question.gpu)))


def _choice_cells(choice: Choice, best_s: float, question: Question) -> tuple[str, ...]:
    setup = choice.setup
    share = choice.gpu_bytes / (question.gpu_bytes or choice.gpu_bytes)
    return (
        setup.strategy.value,
        str(setup.micro_batch),
        str(setup.accumulation),
        "on" if setup.grad_ckpt else "off",
        f"{gib(choice.gpu_bytes)} GiB ({100 * share:.0f} %)",
        gib(choice.host_bytes),
        f"x{choice.step_s / best_s:.2f}",
        choice.verdict.value,
    )


def nothing_fits(least: Choice, question: Question) -> str:
    """Return the warning that nothing fits, with the setup that needs the least GPU memory."""
    gpu, host = question.gpu_bytes, question.host_bytes
    of_gpu = f" (of {gib(gpu)})" if gpu else ""
    of_host = f" (of {gib(host)})" if host else ""
    less = "use more nodes" if least.setup.lora else "use more nodes, or train adapters (--lora)"
    return (
        f"nothing fits: {as_options(least.setup)} needs {gib(least.gpu_bytes)} GiB per "
        f"GPU{of_gpu} and {gib(least.host_bytes)} GiB per node{of_host}; {less}"
    )


# Numbers


def _row(label: str, text: str) -> str:
    return f"{label:<10}{text}"


def _painted(verdict: Fit) -> str:
    return click.style(verdict.value.upper(), fg=_COLOURS[verdict], bold=True)
