"""Estimate how long a training takes, from its work and the GPU's peak or from a measured step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from clusterrun.errors import UsageError
from clusterrun.estimates.gpus import Gpu
from clusterrun.estimates.inputs import Model, Setup

MFU: Final = 0.40  # of the peak in passes that fill the GPU; assumed unless a step was measured
MFU_BAND: Final = (0.75, 1.25)  # times MFU: 0.30 to 0.50
# NVIDIA, Matrix Multiplication Background User's Guide: the most efficient tile, and wave
# quantization. On average half of the last wave is lost.
TILE: Final = 256 * 128
LAST_WAVE: Final = 0.5
# Kernels of a block, forward and backward, counted in transformers 5.23's Llama under autocast,
# without and with peft's adapters on all projections. An operation of eager torch takes the CPU 5
# to 25 microseconds.
KERNELS: Final = 154
LORA_KERNELS: Final = 285
LAUNCH_S: Final = 10e-6
GRADIENT_TRAFFIC: Final = 12  # bytes per parameter and pass to add the gradient to the sum
# Speed-up over one GPU, lowest and highest, on GPUs of one node: a rule of thumb.
SCALING: Final[Mapping[int, tuple[float, float]]] = {2: (1.8, 1.9), 4: (3.5, 3.8), 8: (6.5, 7.0)}


@dataclass(frozen=True, kw_only=True)
class Duration:
    """A duration in seconds, from best to worst case. `basis` is "mfu" or "measured"."""

    low_s: float
    mid_s: float
    high_s: float
    basis: str

    def times(self, factor: float) -> Duration:
        """Return the duration times a factor."""
        low, mid, high = (seconds * factor for seconds in (self.low_s, self.mid_s, self.high_s))
        return replace(self, low_s=low, mid_s=mid, high_s=high)


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """The speed-up over one GPU, or the measured one over `base` ranks."""

    low: float
    high: float
    base: int = 1
    measured_at: str = ""  # in ISO 8601; "": not measured


def flops_per_token(model: Model, seq_len: int, *, lora: int = 0) -> float:
    """Return the operations of training on one token: 6P + 12*L*q*s, with q the width of all heads.

    See PaLM, arXiv:2204.02311, appendix B. P counts the parameters that a token uses, so not all
    experts. L counts the attentions; encoder and decoder are assumed to read equally many tokens.
    Attention is omitted if the shape of the model is unknown. Frozen weights need no gradients, so
    LoRA takes 4P; its adapters are not counted. By the definition of MFU, recomputed activations
    never count.
    """
    work = (4 if lora else 6) * (model.active_params or model.params)
    return work + 12 * (model.layers + model.cross_layers) * model.query_width * seq_len


def pass_seconds(setup: Setup, gpu: Gpu, mfu: float) -> float:
    """Estimate the seconds that a GPU takes forward and backward over one micro-batch.

    Three costs do not shrink with the batch. The last wave of tiles of each matrix product is half
    full on average. A block's kernels are launched one by one, however small they are. If a step
    has several passes, their gradients are added up in the GPU's memory.
    """
    work_s = _work_seconds(setup, gpu, mfu)
    tokens = setup.micro_batch * setup.seq_len
    # Waves of tiles of a product of the size tokens x hidden; 0 if one of them is unknown.
    waves = tokens * setup.model.hidden / (TILE * gpu.processors)
    tiled_s = work_s * (1 + LAST_WAVE / waves) if waves else work_s
    launch_s = LAUNCH_S * setup.model.layers * (LORA_KERNELS if setup.lora else KERNELS)
    return recompute_factor(setup) * max(tiled_s, launch_s) + _summing_seconds(setup, gpu)


def filled(setup: Setup, gpu: Gpu, mfu: float) -> float:
    """Return the share of `mfu` that passes of this size reach; close to 1 for large ones."""
    return recompute_factor(setup) * _work_seconds(setup, gpu, mfu) / pass_seconds(setup, gpu, mfu)


def reached_mfu(setup: Setup, gpu: Gpu, step_s: float) -> float:
    """Return the MFU of a step of `step_s` seconds."""
    return setup.accumulation * _work_seconds(setup, gpu, 1.0) / step_s


def recompute_factor(setup: Setup) -> float:
    """Return the factor by which activation checkpointing adds work: one more forward pass.

    >>> from clusterrun.estimates.models import BUILT_IN
    >>> llama = BUILT_IN["llama-2-7b"]
    >>> [round(recompute_factor(Setup(model=llama, grad_ckpt=True, lora=r)), 2) for r in (0, 64)]
    [1.33, 1.5]
    """
    if not setup.grad_ckpt:
        return 1.0
    forward = flops_per_token(setup.model, setup.seq_len) / 3  # backward does twice the work
    return 1 + forward / flops_per_token(setup.model, setup.seq_len, lora=setup.lora)


def _work_seconds(setup: Setup, gpu: Gpu, mfu: float) -> float:
    """Return a micro-batch's seconds at an MFU. Raises UsageError if a GPU lacks the precision."""
    if setup.precision not in gpu.tflops:
        text = f"the {gpu.name} does not compute in {setup.precision}"
        raise UsageError(text, hint="pass --mixed-precision fp16 or auto")
    tokens = setup.micro_batch * setup.seq_len / setup.parallel.model  # a rank's share
    work = tokens * flops_per_token(setup.model, setup.seq_len, lora=setup.lora)
    return work / (gpu.tflops[setup.precision] * 1e12 * mfu)


def _summing_seconds(setup: Setup, gpu: Gpu) -> float:
    """Return the seconds to add up the gradients of a pass: all, or a shard under ZeRO 2 and 3."""
    if setup.accumulation == 1:  # a single pass has nothing to add to
        return 0.0
    is_shard = setup.strategy.is_deepspeed and setup.strategy.stage > 1
    summed = setup.trained / (setup.shards if is_shard else 1)
    return GRADIENT_TRAFFIC * summed / (1e9 * gpu.bandwidth)


def segments(seconds: float, limit_s: int) -> int:
    """Count the jobs of `limit_s` seconds that a training takes; starts and saves add a tenth.

    >>> segments(36_000, 39_600), segments(36_001, 39_600)
    (1, 2)
    """
    return math.ceil(seconds * 11 / (limit_s * 10))  # 11/10 of the time, in exact numbers


# Assumed shares of the nominal speed in one direction. Published bus bandwidths of nccl-tests are
# close: 230 to 250 GB/s on 8 A100 (of 300), 35 to 45 on 8 H100-PCIe (of 63). See
# docs/plan.md.
NVLINK_REACHED: Final = 0.8
PCIE_REACHED: Final = 0.5
FABRIC_REACHED: Final = 0.9
ONE_CARD: Final = 100e9  # bits a second of a node whose GPUs have no network cards of their own
SOCKETS: Final = 25e9  # of a node, over TCP: assumed
EFA_BEFORE_HOPPER: Final = 50e9  # of a GPU: AWS p4d.24xlarge, 400 Gb/s for 8


@dataclass(frozen=True, kw_only=True)
class Links:
    """The real speeds in one direction, in bytes a second."""

    within_node: float  # of a GPU, to the others of its node
    between_nodes: float  # of a node, to other nodes
    to_host: float  # of a GPU, to the host's memory


FP32: Final = 4
EXPOSED: Final = 0.1  # of work or traffic, whichever is less
# Parameters a second that the CPUs of a node update, with norm, clipping and casts: from the
# 8 x A800 table in docs/plan.md, where offload adds 17 to 20 s for 6.7 billion.
HOST_PARAMS_PER_S: Final = 0.42e9


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The parts of a step in seconds; the host's work overlaps with nothing."""

    compute_s: float
    network_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        """Return how long the step takes."""
        shorter, longer = sorted((self.compute_s, self.network_s))
        return longer + EXPOSED * shorter + self.host_s


def step_cost(setup: Setup, gpu: Gpu, links: Links, *, mfu: float = MFU) -> Cost:
    """Estimate an optimizer step. Raises UsageError if the GPU lacks the precision."""
    return Cost(
        compute_s=setup.accumulation * pass_seconds(setup, gpu, mfu),
        network_s=_network_seconds(setup.of_gpu, links),
        host_s=_host_seconds(setup, links),
    )


def step_time(setup: Setup, gpu: Gpu, links: Links, *, mfu: float = MFU) -> Duration:
    """Estimate how long an optimizer step takes, by an MFU and the band around it."""
    usual = step_cost(setup, gpu, links, mfu=mfu).total_s
    unlucky, lucky = (
        step_cost(setup, gpu, links, mfu=min(1.0, share * mfu)).total_s for share in MFU_BAND
    )
    return Duration(low_s=lucky, mid_s=usual, high_s=unlucky, basis="mfu")


def assumption(links: Links) -> str:
    """Return a sentence on the assumptions behind a ranking of strategies."""
    speeds = (links.within_node, links.between_nodes, links.to_host)
    within, between, host = (f"{speed / 1e9:.3g} GB/s" for speed in speeds)
    return (
        f"ranked by work and by traffic at {within} within a node, {between} between nodes, {host} "
        "to the host; the shorter of the two overlaps with the longer, except for a tenth; a "
        f"node's CPUs update {HOST_PARAMS_PER_S / 1e9:g} billion parameters a second"
    )


def _network_seconds(setup: Setup, links: Links) -> float:
    """Return the seconds of a step's traffic alone; `Cost` lets it overlap with the work."""
    slowest = links.within_node if setup.nodes == 1 else min(links.within_node, links.between_nodes)
    if setup.strategy.is_fsdp and setup.sizes.replicate > 1:
        # The shards of a copy communicate within a node if it holds all of them. The same shards
        # of all copies communicate between nodes, in one ring for each local rank.
        is_within = setup.shards * setup.parallel.tensor <= setup.procs_per_node
        replicated_s = 2 * FP32 * setup.trained / slowest
        return _sent_bytes(setup) / (links.within_node if is_within else slowest) + replicated_s
    # One ring over all ranks enters each node once, over all of its network cards.
    return _sent_bytes(setup) / slowest


def _sent_bytes(setup: Setup) -> float:
    """Return the bytes that a GPU sends and receives in one optimizer step."""
    if max(setup.shards, setup.data_parallel) == 1:
        return 0.0
    width, trained = setup.number_bytes, setup.trained
    # Sharded weights are gathered twice in each pass: forward and backward.
    weights = 2 * width * setup.model.params * setup.accumulation
    if setup.strategy.is_fsdp:  # accelerate adds the passes up before FSDP reduces
        return weights + width * trained
    gradient = width if setup.strategy.is_deepspeed else FP32
    if setup.strategy.stage == 3:
        return weights + setup.accumulation * gradient * trained
    reduces = setup.accumulation if setup.strategy.stage == 2 else 1
    gathers = 1  # of the reduced gradients, or of the updated weights
    return (reduces + gathers) * gradient * trained


def _host_seconds(setup: Setup, links: Links) -> float:
    """Return the seconds of the optimizer's step on the host and of the transfers for it."""
    if not setup.offloads_optimizer:
        return 0.0
    width, trained = setup.number_bytes, setup.trained
    carried = 2 * width * trained / setup.shards  # bytes: gradients to the host, weights back
    if setup.strategy.is_deepspeed:  # a further pass fetches the sum and returns it
        carried += 2 * FP32 * (setup.accumulation - 1) * trained / setup.shards
    if setup.offloads_params:  # fetched by the forward and by the backward of each pass
        carried += 2 * width * setup.accumulation * setup.model.params / setup.shards
    return carried / links.to_host + trained / setup.nodes / HOST_PARAMS_PER_S


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured world: `step_s` is the median time of a step, over `steps` steps."""

    nodes: int
    ranks: int
    step_s: float
    steps: int
    job_id: str
    run_dir: str


class Gain(NamedTuple):
    """The gain of a world over the smallest one."""

    speedup: float
    efficiency: float
    communication: float  # share of time lost to it and to waiting for the slowest rank


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Measured worlds of one script that differ in nodes only, the smallest first."""

    script: str
    strategy: str
    is_cpu: bool
    procs_per_node: int
    is_fixed_batch: bool  # of all ranks together; otherwise each rank keeps its batch
    measured_at: str  # local time in ISO 8601
    points: tuple[Point, ...]

    def gain(self, point: Point) -> Gain:
        """Compare a world with the smallest one."""
        base = self.points[0]
        # The samples of a step as a multiple of the fixed batch, or of the batch of a rank.
        work, base_work = (1, 1) if self.is_fixed_batch else (point.ranks, base.ranks)
        speedup = (work / point.step_s) / (base_work / base.step_s)
        efficiency = speedup * base.ranks / point.ranks
        return Gain(speedup, efficiency, max(0.0, 1 - efficiency))

    def is_of(self, setup: Setup, *, is_cpu: bool) -> bool:
        """Return whether it applies, on any number of nodes; False if ranks share samples."""
        asked = (setup.strategy.value, setup.procs_per_node, is_cpu)
        is_measured = asked == (self.strategy, self.procs_per_node, self.is_cpu)
        return is_measured and setup.parallel.model == 1
