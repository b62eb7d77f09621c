"""Estimate how long a step takes under each strategy, only to compare two of them.

Of work and traffic the shorter hides behind the longer, but for a tenth. Traffic as in the ZeRO
paper (arXiv 1910.02054, section 7): 2 volumes of the gradients for data parallelism and ZeRO 1 and
2, 3 for what shards the weights, too, which is paid for each pass, not each step; under FSDP the
gradients' once a step.
"""

from __future__ import annotations

from typing import Final

from clusterrun.config.spec import Strategy
from clusterrun.estimates import memory, speed
from clusterrun.estimates.inputs import Setup

FP32: Final = 4
# Assumed, in bytes a second; only the order that they give is used.
WITHIN_NODE: Final = 100e9  # of a GPU to the others of its node
BETWEEN_NODES: Final = 25e9  # of a node
PCIE: Final = 16e9  # of a GPU to the host's memory
HOST_MEMORY: Final = 100e9  # of a node, for the optimizer's step on its CPUs
EXPOSED: Final = 0.1  # of work or traffic, whichever is less
OPTIMIZER_TRAFFIC: Final = 28  # bytes read and written for a parameter in such a step
ASSUMPTION: Final = (
    "ranked by work, and traffic at 100 GB/s within a node, 25 GB/s between nodes, 16 GB/s to the "
    "host; the shorter of both hides behind the longer, but for a tenth"
)
_SHARDS_WEIGHTS: Final = (
    *(Strategy.FSDP, Strategy.FSDP_HYBRID, Strategy.FSDP_OFFLOAD),
    *(Strategy.ZERO3, Strategy.ZERO3_OFFLOAD),
)
_REDUCES_EACH_PASS: Final = (*_SHARDS_WEIGHTS, Strategy.ZERO2, Strategy.ZERO2_OFFLOAD)


def step_seconds(setup: Setup, *, compute_s: float) -> float:
    """Add to the computing of a step (one GPU's seconds) what is sent and what the host does.

    What the host does hides nowhere.
    """
    trainable = memory.trainable_params(setup)
    compute_s *= speed.recomputing(setup)
    shorter, longer = sorted((compute_s, _network_seconds(setup, trainable)))
    return longer + EXPOSED * shorter + _host_seconds(setup, trainable)


def _network_seconds(setup: Setup, trainable: int) -> float:
    if setup.strategy is Strategy.FSDP_HYBRID:
        # Shards within a node; replicas between nodes, in a ring for each of its ranks.
        replicated = 2 * FP32 * trainable / BETWEEN_NODES
        return _sent_bytes(setup, trainable) / WITHIN_NODE + replicated
    # One ring over all ranks enters each node once: it is as fast as a node's own link.
    return _sent_bytes(setup, trainable) / (WITHIN_NODE if setup.nodes == 1 else BETWEEN_NODES)


def _sent_bytes(setup: Setup, trainable: int) -> float:
    """Return what a GPU sends and receives in one optimizer step."""
    if setup.world == 1:
        return 0.0
    half = setup.number_bytes
    weights = 2 * half * setup.model.params * setup.accumulation
    if setup.strategy.is_fsdp:  # accelerate sums the passes up before it has FSDP reduce
        return weights + half * trainable
    gradient = half if setup.strategy.is_deepspeed else FP32
    if setup.strategy in _SHARDS_WEIGHTS:
        return weights + setup.accumulation * gradient * trainable
    reduces = setup.accumulation if setup.strategy in _REDUCES_EACH_PASS else 1
    return (reduces * gradient + gradient) * trainable


def _host_seconds(setup: Setup, trainable: int) -> float:
    """Return how long gradients, weights and the optimizer's step take through the host."""
    if not setup.offloads_optimizer:
        return 0.0
    half = setup.number_bytes
    own = trainable / setup.shards
    carried = 2 * half * own
    if setup.offloads_params:
        carried += 2 * half * setup.accumulation * setup.model.params / setup.shards
    stepped = OPTIMIZER_TRAFFIC * own * setup.procs_per_node / HOST_MEMORY
    return carried / PCIE + stepped
