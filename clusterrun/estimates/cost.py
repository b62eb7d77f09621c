"""Estimate how long an optimizer step takes: its passes, its traffic, and the host's work.

The shorter of passes and traffic overlaps with the longer, except for a tenth. Traffic follows the
ZeRO paper (arXiv 1910.02054, section 7): 2 volumes of the gradients for data parallelism and ZeRO 1
and 2; 3 volumes with sharded weights, in each pass instead of each step. FSDP sends its gradients
once a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from clusterrun.estimates import speed
from clusterrun.estimates.gpus import Gpu
from clusterrun.estimates.inputs import Setup
from clusterrun.estimates.links import Links
from clusterrun.estimates.parts import part_of_gpu
from clusterrun.estimates.speed import MFU, MFU_BAND, Duration
from clusterrun.estimates.states import trainable_params

FP32: Final = 4
EXPOSED: Final = 0.1  # of work or traffic, whichever is less
# Parameters a second that the CPUs of a node update, with norm, clipping and casts: from the
# 8 x A800 table in docs/plan.md, where offload adds 17 to 20 s for 6.7 billion.
HOST_STEPS: Final = 0.42e9


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
    """Estimate an optimizer step. Raises UsageError for an impossible MFU."""
    return Cost(
        compute_s=setup.accumulation * speed.pass_seconds(setup, gpu, mfu),
        network_s=_network_seconds(part_of_gpu(setup), links),
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
    """Return the assumptions behind a ranking of strategies."""
    return (
        f"ranked by work and by traffic at {links}; the shorter overlaps with the longer, except "
        f"for a tenth; a node's CPUs update {HOST_STEPS / 1e9:g} billion parameters a second"
    )


def _network_seconds(setup: Setup, links: Links) -> float:
    between = links.within_node if setup.nodes == 1 else min(links.within_node, links.between_nodes)
    if setup.strategy.is_fsdp and setup.replicas > 1:
        # Replicas communicate between nodes, in a ring per local rank; shards within if they fit.
        is_within = setup.shards * setup.parallel.tensor <= setup.procs_per_node
        replicated = 2 * FP32 * trainable_params(setup) / between
        return _sent_bytes(setup) / (links.within_node if is_within else between) + replicated
    # One ring over all ranks enters each node once, over all of its network cards.
    return _sent_bytes(setup) / between


def _sent_bytes(setup: Setup) -> float:
    """Return the bytes that a GPU sends and receives in one optimizer step."""
    if max(setup.shards, setup.data_parallel) == 1:
        return 0.0
    half, trainable = setup.number_bytes, trainable_params(setup)
    weights = 2 * half * setup.model.params * setup.accumulation
    if setup.strategy.is_fsdp:  # accelerate adds the passes up before FSDP reduces
        return weights + half * trainable
    gradient = half if setup.strategy.is_deepspeed else FP32
    if setup.strategy.stage == 3:
        return weights + setup.accumulation * gradient * trainable
    reduces = setup.accumulation if setup.strategy.stage == 2 else 1
    return (reduces * gradient + gradient) * trainable


def _host_seconds(setup: Setup, links: Links) -> float:
    """Return the seconds of the optimizer's step on the host and of the transfers for it."""
    if not setup.offloads_optimizer:
        return 0.0
    half, trainable = setup.number_bytes, trainable_params(setup)
    carried = 2 * half * trainable / setup.shards
    if setup.strategy.is_deepspeed:  # it adds the passes up on the host
        carried += 2 * FP32 * (setup.accumulation - 1) * trainable / setup.shards
    if setup.offloads_params:
        carried += 2 * half * setup.accumulation * setup.model.params / setup.shards
    return carried / links.to_host + trainable / setup.nodes / HOST_STEPS
