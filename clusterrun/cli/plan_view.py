"""Print what `plan` shows to people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import click

from clusterrun.cli.shared import output
from clusterrun.cli.shared.options import as_options
from clusterrun.estimates.estimate import Estimate, Need, Question, Time
from clusterrun.estimates.inputs import GIB, Fit, Setup, total
from clusterrun.estimates.memory import checkpoint_terms
from clusterrun.estimates.recommend import Choice, changed
from clusterrun.estimates.speed import Duration, assumption
from clusterrun.shared.amounts import clock
from clusterrun.shared.wording import count

FULL: Final = 0.90  # share of the MFU; the view mentions passes that reach a smaller one
_COLOURS: Final = {Fit.FITS: "green", Fit.TIGHT: "yellow", Fit.NO: "red"}
_WORDS: Final = {Fit.FITS: "fits", Fit.TIGHT: "fits tightly", Fit.NO: "does not fit"}


def show(
    answer: Estimate, near: Sequence[Estimate], *, what_if: str | None, would_fit: Sequence[Choice]
) -> None:
    """Print an estimate, then those `near` it: as a table with `what_if`, otherwise as one line."""
    colour = _COLOURS[answer.verdict] if answer.verdict else None
    verdict = click.style(verdict_line(answer), fg=colour, bold=True)
    summary = (verdict, *_alternatives(would_fit, answer.question.setup), *_pace(answer))
    for line in (*summary, "", *_details(answer)):
        output.answer(line)
    if what_if is not None:
        output.answer("")
        row_of = _gpu_row if what_if == "gpu" else _setup_row
        rows = [row_of(each) for each in (answer, *near)]
        _table(rows, spare=("SAMPLES/s", "HOST", "OF", "SEQ", "BATCH"))
    elif near and not answer.lacks_memory:
        texts = []
        for each in near:
            need = each.gpu_memory or each.host_memory
            fit = f" {_painted(need.verdict)}" if need.verdict else ""
            size = f"{gib(need.total_bytes)} GiB ({_share(need)}){fit}"
            texts.append(f"micro-batch {each.question.setup.micro_batch}: {size}")
        output.answer(_row("what if", "   ".join(texts)))
    for text in answer.notes:
        output.note(text)
    output.note("estimated from formulas; to compare with a run: clusterrun plan --compare JOB")
    if output.is_on_terminal():  # the first line may have scrolled off the screen
        output.answer(verdict)


def verdict_line(answer: Estimate) -> str:
    """Return the verdict with the need that decides it."""
    verdict, disk = answer.verdict, answer.disk
    if verdict is None:
        return f"no verdict: {_need_without_verdict(answer)}"
    free = gigabytes(disk.capacity_bytes or 0)
    on_disk = f"{gigabytes(disk.total_bytes)} of checkpoints on a disk with {free} free"
    memory = ((answer.gpu_memory, "per GPU"), (answer.host_memory, "of memory per node"))
    needs = [(need, f"{_need_text(need)} {where}") for need, where in memory if need]
    for need, text in (*needs, (disk, on_disk)):
        if need.verdict is verdict:
            return f"{_WORDS[verdict]}: {text}"
    # Neither memory nor disk decides, so the time limit does.
    duration = f"{span(answer.time.whole)} " if answer.time and answer.time.whole else ""
    limit = f"in a job of {clock(answer.question.limit_s or 0)} that saves nothing"
    return f"does not finish: {duration}{limit}; pass --save-every or raise --time"


def _need_without_verdict(answer: Estimate) -> str:
    """Return how much memory is needed, and what has to be known for a verdict."""
    need = answer.gpu_memory or answer.host_memory
    where = "GPU" if answer.gpu_memory else "node"
    least = "at least " if need.is_part else ""
    if need.capacity_bytes is not None:  # so only the activations are unknown
        return f"{least}{_need_text(need)} per {where}, and activations are not counted"
    option = "--gpu h100-80g" if answer.gpu_memory else "--host-mem 64GiB"
    return f"{least}{gib(need.total_bytes)} GiB per {where}; pass {option} for a verdict"


def _need_text(need: Need) -> str:
    """Write a need and its capacity, with a decimal below 10 GiB or if both round to one number."""
    needed, capacity = need.total_bytes / GIB, (need.capacity_bytes or 0) / GIB
    digits = 0 if min(needed, capacity) >= 10 and round(needed) != round(capacity) else 1
    return f"{needed:,.{digits}f} of {capacity:,.{digits}f} GiB"


def _alternatives(choices: Sequence[Choice], requested: Setup) -> Iterator[str]:
    """Yield the options that would make the training fit, one alternative per line."""
    for index, choice in enumerate(choices):
        label = "would fit:" if index == 0 else ""
        tightly = ", tightly" if choice.verdict is Fit.TIGHT else ""
        options = changed_options(choice.setup, requested)
        yield f"{label:<12}{options} ({choice.gpu_bytes / GIB:,.0f} GiB{tightly})"


def changed_options(setup: Setup, requested: Setup) -> str:
    """Return the options that change the `requested` setup into `setup`."""
    changes = changed(setup, requested)
    passes = f"--micro-batch {setup.micro_batch} --accumulation {setup.accumulation}"
    options = {  # texts, and whether each is returned
        f"--nodes {setup.nodes}": "nodes" in changes,
        f"--lora {setup.lora}": "lora" in changes,
        "--load-in-4bit": "load_in_4bit" in changes,
        # In a world of one rank, a strategy matters only if it offloads.
        f"--strategy {setup.strategy.value}": ("strategy" in changes and setup.world > 1)
        or setup.offloads_optimizer,
        "--grad-ckpt" if setup.grad_ckpt else "--no-grad-ckpt": "grad_ckpt" in changes,
        passes: "micro_batch" in changes or setup.accumulation != requested.accumulation,
    }
    return " ".join(option for option, is_changed in options.items() if is_changed)


def _pace(answer: Estimate) -> Iterator[str]:
    """Yield a line of time, GPU-hours and rate; none if the time is unknown or memory is short."""
    time, question = answer.time, answer.question
    if time is None or answer.lacks_memory:
        return
    parts = [f"{span(time.whole)} on {_devices(question)}"] if time.whole else []
    parts += [f"{number(answer.gpu_hours)} GPU-hours"] if answer.gpu_hours else []
    tokens = tokens_per_s(time, question.setup)
    rate = f"{number(tokens)} tokens/s" if tokens else f"{number(time.samples_s)} samples/s"
    yield ", ".join([*parts, rate])


def _devices(question: Question) -> str:
    return count(question.setup.world, "rank" if question.is_cpu else "GPU")


def tokens_per_s(time: Time, setup: Setup) -> float | None:
    """Return the tokens a second of all ranks; None if samples have no tokens."""
    return time.samples_s * setup.seq_len if setup.seq_len and setup.model.is_text else None


def _details(answer: Estimate) -> Iterator[str]:
    """Yield the estimate: job, batch, memory, time, speed-up, disk and loader."""
    yield from (*_model_and_cluster(answer.question), "", *_batch(answer), "")
    if answer.gpu_memory is not None:
        yield from (*_memory("memory per GPU", answer.gpu_memory), "")
    yield from (*_memory("host memory per node", answer.host_memory), "")
    if answer.time is not None:
        yield from _time(answer, answer.time)
    yield from (*_speedup(answer), _disk(answer))
    loader = answer.loader
    workers = "" if loader.num_workers is None else f"num_workers {loader.num_workers}, "
    pins = f"pin_memory {str(loader.pin_memory).lower()}"
    yield _row("loader", f"{workers}{pins}: {loader.why}")


def _model_and_cluster(question: Question) -> Iterator[str]:
    setup, model = question.setup, question.setup.model
    active = f", {_scaled(model.active_params)} active" if model.active_params else ""
    facts = {  # texts, and whether each is shown
        model.name or "unnamed": True,
        f"{_scaled(model.params)} parameters{active}": True,
        setup.precision: True,
        f"seq {setup.seq_len:,}": setup.seq_len,
        "gradient checkpointing": setup.grad_ckpt,
        f"LoRA rank {setup.lora}": setup.lora,
        "base in 4 bits": setup.load_in_4bit,
    }
    yield _row("model", "   ".join(text for text, is_shown in facts.items() if is_shown))
    kind = "CPU" if question.is_cpu else (question.gpu.name if question.gpu else "GPU")
    cluster = f"{count(setup.nodes, 'node')} x {setup.procs_per_node} {kind} = {_devices(question)}"
    yield _row("cluster", f"{cluster}   strategy {setup.strategy.value}")


def _batch(answer: Estimate) -> Iterator[str]:
    """Yield the batch, the steps and, with --lr and its batch, how the rate scales to this one."""
    question, setup = answer.question, answer.question.setup
    ranks = "data-parallel rank" if setup.data_parallel < setup.world else "rank"
    tokens = f" ({setup.effective_batch * setup.seq_len:,} tokens)" if setup.seq_len else ""
    passes = f"{setup.micro_batch} per rank x {setup.accumulation} accumulation"
    samples = count(f"{setup.effective_batch:,}", "sample")
    factors = f"{passes} x {count(setup.data_parallel, ranks)}"
    yield _row("batch", f"{factors} = {samples} a step{tokens}")
    if line := _steps(answer):
        yield _row("steps", line)
    if answer.steps.total and setup.world > 1:
        length = answer.steps.total * setup.world  # multiply a warmup's length, too
        text = f"accelerate steps the LR scheduler once per process: set its length to {length:,}"
        yield _row("", text)
    if (rates := answer.rates) is not None:
        base, rule = f"{question.lr:.3g} at batch {question.base_batch}", question.lr_rule.value
        yield _row("lr", f"{base} -> {rates.linear:.3g} linear, {rates.sqrt:.3g} sqrt ({rule})")
        yield from (_row("", note) for note in rates.notes)


def _steps(answer: Estimate) -> str:
    """Write `1,024 samples / 32 = 32 full steps per epoch; 96 in all`; "" if nothing is known."""
    steps, question = answer.steps, answer.question
    in_all = f"{steps.total:,} in all" if steps.total else ""
    if steps.full_per_epoch is None:
        return in_all
    text = f"{question.samples:,} samples / {question.setup.effective_batch:,}"
    text += f" = {steps.full_per_epoch:,} full steps per epoch"
    if steps.accelerate_per_epoch != steps.full_per_epoch:
        text += f" (accelerate runs {steps.accelerate_per_epoch:,})"
    return f"{text}; {in_all}" if in_all else text


def _memory(title: str, need: Need) -> Iterator[str]:
    """Yield the terms of a need, then its total with the capacity and the verdict, if known."""
    yield f"{title:<30}{'GiB':>8}"
    yield from (f"  {term.name:<28}{gib(term.bytes):>8}" for term in need.terms)
    label = "total" if need.margin == 1 else f"total + {100 * (need.margin - 1):.0f} %"
    judgement = ""
    if need.capacity_bytes is not None:
        verdict = _painted(need.verdict) if need.verdict else "without activations"
        if need.verdict is Fit.TIGHT:
            verdict += f": it fits below {100 * need.fits_below:.0f} %"
        judgement = f"   of {gib(need.capacity_bytes)}   {_share(need)}   {verdict}"
    yield f"  {label:<28}{gib(need.total_bytes):>8}{judgement}"
    if need.band is not None:
        low, high = (gib(share * need.total_bytes) for share in need.band)
        yield f"  {'measured runs took':<28}{low:>8}   to {high}"


def _time(answer: Estimate, time: Time) -> Iterator[str]:
    """Yield the duration, the rate, the cost, and how many jobs of the time limit it takes."""
    question = answer.question
    durations = {"a step": time.step, "an epoch": time.epoch, "in all": time.whole}
    parts = [f"{span(duration)} {what}" for what, duration in durations.items() if duration]
    yield _row("time", f"{', '.join(parts)} ({_basis(time, question)})")
    tokens = tokens_per_s(time, question.setup)
    token_rate = f", {number(tokens)} tokens/s" if tokens else ""
    yield _row("", f"{number(time.samples_s)} samples/s{token_rate} in all")
    if time.whole is not None and time.step.basis != "measured":
        band = f"{clock(time.whole.low_s)} to {clock(time.whole.high_s)}"
        yield _row("", f"{band} for an MFU a quarter higher or lower")
    if answer.cost is not None:
        yield _row("cost", f"{answer.cost:,.2f} for {number(answer.gpu_hours or 0)} GPU-hours")
    if time.segments is not None and question.limit_s is not None:
        yield _row("", _segments(answer, time.segments, clock(question.limit_s)))


def _basis(time: Time, question: Question) -> str:
    """Say where the time of a step comes from: a measurement, or an assumed MFU."""
    mfu = f"at MFU {time.mfu:.2g}" if time.mfu else ""
    if time.step.basis == "measured":
        return f"measured, {mfu}" if mfu else "measured"
    if time.filled >= FULL:  # passes of this size reach nearly all of the assumed MFU
        return mfu
    return f"{mfu}: passes this small reach {100 * time.filled:.0f} % of {question.mfu:g}"


def _segments(answer: Estimate, segments: int, limit: str) -> str:
    """Say how many jobs the training takes; `limit` is the time limit of each, in words."""
    if segments == 1:
        return f"fits into one job of {limit}"
    if answer.never_ends:
        no = _painted(Fit.NO)
        return f"longer than one job of {limit}, and saves nothing (--save-every)   {no}"
    return f"{segments} jobs of {limit}: clusterrun submit --chain {segments}"


def _speedup(answer: Estimate) -> Iterator[str]:
    """Yield the speed-up: measured (then low and high are equal), or from a rule of thumb."""
    found = answer.speedup
    if found is None or answer.lacks_memory:
        return
    if found.measured_at:
        ranks, day = count(found.base, "rank"), found.measured_at[:10]  # in ISO format
        efficiency = 100 * found.low * found.base / answer.question.setup.world
        gain = f"{found.low:.3g} times as fast as {ranks}, efficiency {efficiency:.0f} %"
        yield _row("speed-up", f"{gain}: measured by clusterrun scaling, {day}")
    else:
        band = f"{found.low:.3g} to {found.high:.3g} times one GPU"
        yield _row("speed-up", f"{band}: a rule of thumb; measure yours with clusterrun scaling")


def _disk(answer: Estimate) -> str:
    """Return the row of the disk: one checkpoint, all that are kept, and the free space."""
    need, question = answer.disk, answer.question
    best = f" + weights of the {question.keep_best} best" if question.keep_best else ""
    kept = f"keep {question.keep} + 1 in flight{best} = {gigabytes(need.total_bytes)}"
    free = f" of {gigabytes(need.capacity_bytes)} free" if need.capacity_bytes else ""
    verdict = f"   {_painted(need.verdict)}" if need.verdict is not None else ""
    if question.save_every and need.verdict is None:  # this machine does not see the job's disk
        verdict = "   not checked: the job writes elsewhere"
    one = gigabytes(total(checkpoint_terms(question.setup)))
    return _row("disk", f"{one} per checkpoint, {kept}{free}{verdict}")


def _table(rows: Sequence[dict[str, str]], spare: tuple[str, ...]) -> None:
    """Print rows by column; leave out empty columns and, if there is no room, `spare` ones."""
    head = [name for name in rows[0] if any(row[name] for row in rows)]
    cells = [tuple(row[name] or "-" for name in head) for row in rows]
    output.answer_table(tuple(head), cells, spare=spare)


def _gpu_row(found: Estimate) -> dict[str, str]:
    """Describe a card with memory, cost and the time of the training, or else of a step."""
    question, need, time = found.question, found.gpu_memory, found.time
    assert need is not None  # only GPUs are compared
    host, capacity = found.host_memory.verdict, need.capacity_bytes
    return {
        "GPU": question.gpu.name if question.gpu else "-",
        "PRECISION": question.setup.precision,
        "GPU GiB": gib(need.total_bytes),
        "OF": gib(capacity) if capacity else "-",
        "SHARE": _share(need) or "-",
        "HOST": host.value if host else "-",
        "IN ALL": span(time.whole) if time and time.whole else "",
        "A STEP": span(time.step) if time and not time.whole else "",
        "SAMPLES/s": number(time.samples_s) if time else "-",
        "COST": "" if found.cost is None else f"{found.cost:,.2f}",
        "VERDICT": need.verdict.value if need.verdict else "-",
    }


def _setup_row(found: Estimate) -> dict[str, str]:
    """Describe a setup and its memory: the row of every comparison but that of GPUs."""
    setup = found.question.setup
    return {
        "STRATEGY": setup.strategy.value,
        "NODES": str(setup.nodes),
        "MICRO-BATCH": str(setup.micro_batch),
        "SEQ": str(setup.seq_len or "-"),
        "BATCH": f"{setup.effective_batch:,}",
        "GPU GiB": gib(found.gpu_memory.total_bytes) if found.gpu_memory else "-",
        "HOST GiB": gib(found.host_memory.total_bytes),
        "VERDICT": found.verdict.value if found.verdict else "-",
    }


def show_choices(choices: Sequence[Choice], question: Question) -> None:
    """Print the best setup of each strategy, the fastest first, and how to use the first."""
    rows = [_choice_row(each, choices[0], question) for each in choices]
    _table(rows, spare=("HOST GiB", "SHARE"))
    output.answer("")
    output.answer(f"details: clusterrun plan ... {as_options(choices[0].setup)}", wraps=False)
    how = "to train with the first, describe the training in clusterrun.yaml and run"
    output.answer(f"{how}: clusterrun submit --plan")
    if question.host_bytes is None:
        output.note("the nodes' memory is unknown, so offload is tight at best; pass --host-mem")
    if question.gpu is not None:
        output.note(assumption(question.links(question.gpu)))


def _choice_row(choice: Choice, first: Choice, question: Question) -> dict[str, str]:
    setup = choice.setup
    share = choice.gpu_bytes / (question.gpu_bytes or choice.gpu_bytes)
    return {
        "STRATEGY": setup.strategy.value,
        "MICRO-BATCH": str(setup.micro_batch),
        "ACCUMULATION": str(setup.accumulation),
        "GRAD-CKPT": "on" if setup.grad_ckpt else "off",
        "GPU GiB": gib(choice.gpu_bytes),
        "SHARE": f"{100 * share:.0f} %",
        "HOST GiB": gib(choice.host_bytes),
        "TIME": f"x{choice.step_s / first.step_s:.2f}",
        "VERDICT": choice.verdict.value,
    }


def nothing_fits(least: Choice, question: Question) -> str:
    """Return the warning that nothing fits, with the setup that needs the least GPU memory."""
    of_gpu = f" (of {gib(question.gpu_bytes)})" if question.gpu_bytes else ""
    of_host = f" (of {gib(question.host_bytes)})" if question.host_bytes else ""
    per_gpu = f"{gib(least.gpu_bytes)} GiB per GPU{of_gpu}"
    per_node = f"{gib(least.host_bytes)} GiB per node{of_host}"
    less = "use more nodes" if least.setup.lora else "use more nodes, or train adapters (--lora)"
    return f"no setup fits: even {as_options(least.setup)} needs {per_gpu} and {per_node}; {less}"


def _row(label: str, text: str) -> str:
    return f"{label:<10}{text}"


def _painted(verdict: Fit) -> str:
    return click.style(verdict.value.upper(), fg=_COLOURS[verdict], bold=True)


def _share(need: Need) -> str:
    return f"{100 * need.total_bytes / need.capacity_bytes:.0f} %" if need.capacity_bytes else ""


def gib(size: float) -> str:
    """Write bytes as GiB, with one decimal or, below 1 GiB, two."""
    return f"{size / GIB:,.2f}" if size < GIB else f"{size / GIB:,.1f}"


def number(value: float) -> str:
    """Write a number with three digits, or whole."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def gigabytes(size: float) -> str:
    """Write bytes in the decimal units of disks."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


def _scaled(value: int) -> str:
    """Write a number of parameters."""
    for unit, factor in ((" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if value >= factor:
            return f"{value / factor:.2f}{unit}"
    return str(value)


def span(duration: Duration) -> str:
    """Write the middle of a duration in seconds, minutes, hours (below two days) or days."""
    seconds = duration.mid_s
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86400:.1f} d"
