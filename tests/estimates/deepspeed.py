"""DeepSpeed's own estimates of the memory for model states, and the ZeRO paper's.

`zero2` and `zero3` give to the byte what the functions `estimate_zero*_model_states_mem_needs` of
DeepSpeed 0.19.8 give. Its documents still show an older form of the first.
"""

from __future__ import annotations

from typing import NamedTuple

from clusterrun.estimates.memory import BUFFER_FACTOR


class Needs(NamedTuple):
    """Bytes of each node's host memory, and of each GPU."""

    host: int
    gpu: int


def zero2(params: int, *, procs_per_node: int, nodes: int, offload: bool) -> Needs:
    """Estimate ZeRO-2 in half precision with Adam, the optimizer's states offloaded or not.

    With offload the host's part counts the GPUs of all nodes, though each node loads the models of
    its own alone: of more than one node it says too much (`zero2_offload_host` does not).
    """
    world = procs_per_node * nodes
    if offload:
        return Needs(host=zero2_offload_host(params, procs_per_node=world), gpu=2 * params)
    host = params * 4 * procs_per_node * BUFFER_FACTOR
    return Needs(host=int(host), gpu=2 * params + int(18 * params / world))


def zero2_offload_host(params: int, *, procs_per_node: int) -> int:
    """Estimate a node's host memory for ZeRO-2 with offload, as DeepSpeed's documents have it."""
    return int(params * max(4 * procs_per_node, 16) * BUFFER_FACTOR)


def zero3(
    params: int,
    largest_layer: int,
    *,
    procs_per_node: int,
    nodes: int,
    offload_optimizer: bool,
    offload_params: bool,
    zero_init: bool = True,
) -> Needs:
    """Estimate ZeRO-3 in half precision with Adam; `zero_init` says that weights load in shards."""
    gpu = 4 * largest_layer
    loading = 4 * procs_per_node  # a whole model in each process
    if offload_optimizer:
        kept, share = 18 if offload_params else 16, 1 / nodes
        host = (params * kept * share if zero_init else params * max(loading, kept * share)) * (
            BUFFER_FACTOR
        )
        gpu += 0 if offload_params else int(2 * params / (procs_per_node * nodes))
    else:
        host = (largest_layer if zero_init else params) * loading * BUFFER_FACTOR
        gpu += int(18 * params / (procs_per_node * nodes))
    return Needs(host=int(host), gpu=gpu)


def zero_paper(params: float, *, gpus: int, stage: int) -> float:
    """Return a GPU's bytes by the formulas of the ZeRO paper (arXiv:1910.02054); stage 0 is DDP.

    With 2 bytes a parameter for the weight, 2 for its gradient, and 12 for the master weight and
    Adam's states.
    """
    weights = 2 / (gpus if stage >= 3 else 1)
    gradients = 2 / (gpus if stage >= 2 else 1)
    optimizer = 12 / (gpus if stage >= 1 else 1)
    return params * (weights + gradients + optimizer)
