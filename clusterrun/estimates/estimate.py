"""Answer one question about a training with everything that can be estimated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from clusterrun.config.choices import LrRule, Network
from clusterrun.errors import UsageError
from clusterrun.estimates import memory, speed, steps
from clusterrun.estimates.gpus import Gpu
from clusterrun.estimates.inputs import Fit, Setup, Term, total
from clusterrun.estimates.speed import Cost, Duration, Links, Scaling, Speedup
from clusterrun.estimates.steps import Loader, Rates
from clusterrun.launch.world_shape import check_sizes

FITS_BELOW: Final = 0.80  # of the capacity; above it a training fits tightly
HOST_FITS_BELOW: Final = 0.70  # of a node's memory: the page cache needs some of the rest
TIGHT_BELOW: Final = 0.95  # of the capacity; above it a training does not fit
FRAGMENTATION: Final = 1.05  # memory that torch's allocator can't reuse
KEEP: Final = 2


@dataclass(frozen=True, kw_only=True)
class Question:
    """A setup, its resources and its data; None means unknown."""

    setup: Setup
    is_cpu: bool = False
    gpu: Gpu | None = None
    gpu_bytes: int | None = None  # the memory of one GPU
    host_bytes: int | None = None  # allocated on a node
    cpus_per_rank: int | None = None  # allocated
    samples: int | None = None
    epochs: float | None = None
    max_steps: int | None = None
    wanted_batch: int | None = None
    wanted_ckpt: bool | None = None
    lr: float | None = None
    base_batch: int | None = None
    lr_rule: LrRule = LrRule.LINEAR
    mfu: float = speed.MFU
    step_time_s: float | None = None
    save_every: int | None = None
    keep: int = KEEP
    keep_best: int = 0
    limit_s: int | None = None  # the time limit of a job
    disk_bytes: int | None = None  # free space
    prices: Mapping[str, float] = field(default_factory=dict)  # per hour, by the name of a card
    scaling: Scaling | None = None  # measured for the same script
    network: Network = Network.AUTO
    within_node: float | None = None  # bytes a second; None: as the card
    between_nodes: float | None = None  # bytes a second; None: as the card and the network

    @property
    def effective_batch(self) -> int:
        """The samples of a step: the requested number, or the product of its parts."""
        return self.wanted_batch or self.setup.effective_batch

    def links(self, gpu: Gpu) -> Links:
        """Return the bandwidths of a GPU's links; those that the user gave take precedence."""
        gpu_bits = 1e9 * gpu.fabric  # a second; 0: it has no network card of its own
        if self.network is Network.EFA and gpu.compute_capability < (9, 0):  # before Hopper
            gpu_bits = min(gpu_bits, speed.EFA_BEFORE_HOPPER)
        node_bits = (self.setup.procs_per_node * gpu_bits) or speed.ONE_CARD
        if self.network is Network.ETHERNET:
            node_bits = speed.SOCKETS
        pcie = speed.PCIE_REACHED * 1e9 * gpu.pcie
        nvlink = speed.NVLINK_REACHED * (1e9 * gpu.nvlink / 2)  # one direction; 0: no NVLink
        return Links(
            within_node=self.within_node or nvlink or pcie,
            between_nodes=self.between_nodes or speed.FABRIC_REACHED * node_bits / 8,
            to_host=pcie,
        )


@dataclass(frozen=True, kw_only=True)
class Need:
    """The bytes that are needed, part by part, and the capacity (None: unknown)."""

    terms: tuple[Term, ...]
    capacity_bytes: int | None
    margin: float = 1.0
    is_part: bool = False  # not all could be counted, so the verdict is NO or unknown
    band: tuple[float, float] | None = None  # lowest and highest measured share of the total
    fits_below: float = FITS_BELOW  # share of the capacity; from it on the need is tight

    @property
    def total_bytes(self) -> int:
        """Return the sum with its margin."""
        return round(total(self.terms) * self.margin)

    @property
    def verdict(self) -> Fit | None:
        """Return whether it fits; None if too little is known."""
        if self.capacity_bytes is None:
            return None
        share = self.total_bytes / self.capacity_bytes
        if share > TIGHT_BELOW:
            return Fit.NO
        if self.is_part:  # what was not counted may need the rest of the capacity
            return None
        return Fit.FITS if share < self.fits_below else Fit.TIGHT


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Optimizer steps: the full ones of an epoch, those that accelerate runs, and the total."""

    full_per_epoch: int | None = None
    accelerate_per_epoch: int | None = None
    repeated: int = 0  # samples, in the last step of an epoch
    total: int | None = None  # None: no end is known


@dataclass(frozen=True, kw_only=True)
class Time:
    """The durations of a step, an epoch and the training, and the number of jobs it takes."""

    step: Duration
    samples_s: float  # samples a second of all ranks
    filled: float  # share of the MFU that passes of this size reach; 1 if a step was measured
    mfu: float | None  # of the whole step; None: the GPU is unknown
    cost: Cost | None  # the parts of a step that is estimated
    epoch: Duration | None
    whole: Duration | None
    segments: int | None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The answer; None for what the question leaves open."""

    question: Question
    gpu_memory: Need | None
    host_memory: Need
    disk: Need
    steps: Steps
    rates: Rates | None
    time: Time | None
    speedup: Speedup | None  # measured, or the usual one of the GPUs of one node
    loader: Loader
    notes: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> Fit | None:
        """Return the worst of the verdicts; None if that of the GPUs is unknown."""
        needs = (self.gpu_memory, self.host_memory, self.disk)
        known = [need.verdict for need in needs if need and need.verdict]
        if self.never_ends or Fit.NO in known:
            return Fit.NO
        if self.gpu_memory is not None and self.gpu_memory.verdict is None:
            return None
        return max(known, key=list(Fit).index, default=None)  # Fit goes from best to worst

    @property
    def lacks_memory(self) -> bool:
        """Return whether it needs more memory than a GPU or a node has."""
        return any(need and need.verdict is Fit.NO for need in (self.gpu_memory, self.host_memory))

    @property
    def gpu_hours(self) -> float | None:
        """Return the hours of all GPUs together; None on CPUs, or if the time is unknown."""
        if self.question.is_cpu or self.time is None or self.time.whole is None:
            return None
        return self.question.setup.world * self.time.whole.mid_s / 3600

    @property
    def cost(self) -> float | None:
        """Return the price of the whole training; None if price or time is unknown."""
        gpu = self.question.gpu
        price = self.question.prices.get(gpu.name) if gpu else None
        hours = self.gpu_hours
        return None if price is None or hours is None else price * hours

    @property
    def never_ends(self) -> bool:
        """Return whether the training exceeds the time limit of a job and saves nothing."""
        segments = self.time.segments if self.time else None
        return bool(segments and segments > 1 and not self.question.save_every)


def estimate(question: Question) -> Estimate:
    """Estimate everything that the question allows. Raises UsageError for contradictory facts."""
    counted, setup = count_steps(question), question.setup
    rates: Rates | None = None
    if question.lr is not None and question.base_batch is not None:
        batch, optimizer = setup.effective_batch, setup.optimizer
        rates = steps.scaled(question.lr, question.base_batch, batch, optimizer)
    return Estimate(
        question=question,
        gpu_memory=gpu_need(question),
        host_memory=host_need(question),
        disk=disk_need(question),
        steps=counted,
        rates=rates,
        time=_time(question, counted),
        speedup=measured_speedup(question) or usual_speedup(question),
        loader=steps.advice(question.cpus_per_rank, question.host_bytes, is_cpu=question.is_cpu),
        notes=tuple(_notes(question, counted)),
    )


def measured_speedup(question: Question) -> Speedup | None:
    """Return the speed-up of this world over the smallest one; None if it was not measured."""
    setup, scaling = question.setup, question.scaling
    if scaling is None or not scaling.is_of(setup, is_cpu=question.is_cpu):
        return None
    base = scaling.points[0].ranks
    for point in scaling.points:
        if point.ranks == setup.world and point.ranks != base:
            gain = scaling.gain(point).speedup
            return Speedup(low=gain, high=gain, base=base, measured_at=scaling.measured_at)
    return None


def usual_speedup(question: Question) -> Speedup | None:
    """Return the usual speed-up of 2, 4 or 8 GPUs of one node; None for any other world."""
    setup = question.setup
    is_on_gpus_of_one_node = setup.nodes == 1 and not question.is_cpu
    is_only_data_parallel = setup.data_parallel > 1 and setup.parallel.model == 1
    if not (is_on_gpus_of_one_node and is_only_data_parallel):
        return None
    band = speed.SCALING.get(setup.world)
    return Speedup(low=band[0], high=band[1]) if band else None


def gpu_need(question: Question) -> Need | None:
    """Add up the memory of one GPU; None for a training on CPUs."""
    if question.is_cpu:
        return None
    return Need(
        terms=memory.gpu_terms(question.setup),
        capacity_bytes=question.gpu_bytes,
        margin=FRAGMENTATION,
        is_part=not counts_activations(question.setup),
    )


def host_need(question: Question) -> Need:
    """Add up the memory of one node; a training on CPUs has a measured band."""
    setup, is_cpu = question.setup, question.is_cpu
    return Need(
        terms=memory.cpu_terms(setup) if is_cpu else memory.host_terms(setup),
        capacity_bytes=question.host_bytes,
        is_part=is_cpu and not counts_activations(setup),
        band=memory.CPU_BAND if is_cpu else None,
        fits_below=HOST_FITS_BELOW,
    )


def counts_activations(setup: Setup) -> bool:
    """Return whether enough is known of the model and its samples to count activations."""
    return setup.model.has_shape and setup.seq_len > 0


def disk_need(question: Question) -> Need:
    """Add up a run's checkpoints: those kept, one being written, and the weights of the best."""
    copies = question.keep + 1  # one more while it is being written
    checkpoints = (
        replace(each, bytes=copies * each.bytes, formula=f"{copies} x ({each.formula})")
        for each in memory.checkpoint_terms(question.setup)
    )
    best = memory.best_terms(question.setup, question.keep_best)
    return Need(terms=(*checkpoints, *best), capacity_bytes=question.disk_bytes)


def count_steps(question: Question) -> Steps:
    """Count the steps of an epoch and of the training.

    Count as accelerate does with its defaults, `even_batches=True` and `split_batches=False`, for
    a loader without `drop_last`; the HF Trainer counts the same way. Each rank gets whole batches
    in turn (BatchSamplerShard), and the data is repeated from its start until all ranks have the
    same number; a single process gets a smaller last batch instead. The end of an epoch forces a
    step, even during accumulation.
    """
    setup, samples = question.setup, question.samples
    if samples is None:
        return Steps(total=question.max_steps)
    per_epoch = math.ceil(samples / setup.effective_batch)
    # A part of an epoch is rounded up, as in the HF Trainer.
    of_epochs = math.ceil(per_epoch * question.epochs) if question.epochs else None
    pass_samples = setup.micro_batch * setup.data_parallel  # of all ranks
    rest = samples % pass_samples
    return Steps(
        full_per_epoch=samples // setup.effective_batch,
        accelerate_per_epoch=per_epoch,
        repeated=pass_samples - rest if rest and setup.data_parallel > 1 else 0,
        total=question.max_steps or of_epochs,
    )


def step_duration(question: Question) -> Duration | None:
    """Return how long an optimizer step takes; None if it can't be estimated."""
    if question.step_time_s is not None:
        took = question.step_time_s
        return Duration(low_s=took, mid_s=took, high_s=took, basis="measured")
    gpu = _timed_gpu(question)
    if gpu is None:
        return None
    return speed.step_time(question.setup, gpu, question.links(gpu), mfu=question.mfu)


def _timed_gpu(question: Question) -> Gpu | None:
    """Return the GPU if its peak tells a step's time; None on CPUs or without a sample length."""
    return question.gpu if question.setup.seq_len and not question.is_cpu else None


def _time(question: Question, counted: Steps) -> Time | None:
    """Return how long the training takes; None if the duration of a step is unknown."""
    step, gpu, setup = step_duration(question), _timed_gpu(question), question.setup
    if step is None:
        return None
    filled, cost = 1.0, None
    if gpu and question.step_time_s is None:  # the step is estimated, not measured
        filled = speed.filled(setup, gpu, question.mfu)
        cost = speed.step_cost(setup, gpu, question.links(gpu), mfu=question.mfu)
    per_epoch, limit_s = counted.accelerate_per_epoch, question.limit_s
    whole = step.times(counted.total) if counted.total else None
    return Time(
        step=step,
        samples_s=setup.effective_batch / step.mid_s,
        filled=filled,
        mfu=speed.reached_mfu(setup, gpu, step.mid_s) if gpu else None,
        cost=cost,
        epoch=step.times(per_epoch) if per_epoch else None,
        whole=whole,
        segments=speed.segments(whole.mid_s, limit_s) if whole and limit_s is not None else None,
    )


def _notes(question: Question, counted: Steps) -> Iterator[str]:
    """Yield what the numbers leave out or assume, and why a time or a verdict is missing."""
    setup, positions = question.setup, question.setup.model.positions
    if setup.parallel.model > 1:
        ways = "tensor, context and sequence parallelism"
        yield f"times do not include the traffic of {ways}: measure a step and pass --step-time"
    yield from _model_notes(setup)
    if 0 < positions < setup.seq_len:
        samples = f"samples of {setup.seq_len:,} tokens"
        yield f"{samples} are longer than the model's maximum of {positions:,}"
    if counted.repeated:
        pass_samples = setup.micro_batch * setup.data_parallel
        text = f"{question.samples:,} samples do not fill batches of {pass_samples}"
        yield f"{text}; accelerate repeats {counted.repeated} in each epoch's last step"
    if not question.is_cpu and question.gpu_bytes is None:
        yield "no GPU was named: pass --gpu h100-80g for a verdict and a time, or --gpu-mem 80GiB"
    elif step_duration(question) is None:
        yield f"no time is estimated: {unknown_speed(question)}; pass --step-time if you know it"


def _model_notes(setup: Setup) -> Iterator[str]:
    """Yield what is left out or assumed for unknown shapes, unmeasured families and experts."""
    model = setup.model
    if not counts_activations(setup):
        missing = "the model's shape" if setup.seq_len else "the length of a sample (--seq-len)"
        yield f"activations are not counted without {missing}: the total is too low"
    elif model.family not in memory.FAMILIES:
        similar = "Llama" if model.gated else "GPT-2"
        yield f"the activations of '{model.family}' models are assumed to be those of {similar}"
    if model.active_params:
        yield "the time assumes a dense model's MFU; to set yours, pass --mfu"


def unknown_speed(question: Question) -> str:
    """Return why the duration of a step can't be estimated."""
    if question.is_cpu:
        return "the speed of CPUs is not known"
    if question.gpu is None:
        return "the speed of a GPU is not known from its memory alone"
    return "the length of a sample is not known"


def mistake(question: Question) -> str:
    """Return why a question makes no sense; "" if it does."""
    setup, samples = question.setup, question.samples
    if samples is not None and setup.effective_batch > samples:
        batch = f"effective batch {setup.effective_batch}"
        return f"{batch} is larger than the dataset ({samples:,} samples)"
    return wrong_sizes(setup)


def wrong_sizes(setup: Setup) -> str:
    """Return why the sizes can't divide ranks or model; "" if no reason is known."""
    try:
        check_sizes(setup.parallel, setup.strategy, nodes=setup.nodes, world=setup.world)
    except UsageError as error:
        return error.message
    return _undivided_heads(setup) or _undivided_tokens(setup)


def _undivided_heads(setup: Setup) -> str:
    """Return why a size does not divide the heads; "" if all do, or they are unknown."""
    model = setup.model
    for name in ("tensor", "sequence"):
        size = getattr(setup.parallel, name)
        divided = {"heads": model.heads, "key-value heads": model.kv_heads}
        if name == "sequence" and model.kv_heads and size % model.kv_heads == 0:
            del divided["key-value heads"]  # Ulysses copies these if there are fewer than ranks
        for what, number in divided.items():
            if number % size:  # never for 0, an unknown number
                text = f"launch.{name}_parallel {size} does not divide the {number} {what}"
                return f"{text} of {model.name or 'the model'}"
    return ""


def _undivided_tokens(setup: Setup) -> str:
    """Return why a size does not divide the tokens of a sample; "" if all do."""
    sizes = setup.parallel
    # torch's context parallel gives each rank two chunks, to balance the causal mask.
    for name, divisor in (("context", 2 * sizes.context), ("sequence", sizes.sequence)):
        if getattr(sizes, name) > 1 and setup.seq_len % divisor:
            text = f"samples of {setup.seq_len:,} tokens are not divisible by {divisor}"
            return f"{text}, as launch.{name}_parallel {getattr(sizes, name)} requires"
    return ""
