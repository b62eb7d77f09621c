"""Find the part of the model and of each sample that one GPU works on, by the parallel sizes.

Tensor parallel follows transformers' plans, after Megatron (arXiv 1909.08053): it divides the
matrices of the blocks and what they save (arXiv 2205.05198), but no norms, residuals or weights
outside the blocks. Context parallel and Ulysses (arXiv 2309.14509) divide the tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from clusterrun.config.choices import Device
from clusterrun.errors import UsageError
from clusterrun.estimates.inputs import Model, Setup
from clusterrun.launch.parallel import check_sizes
from clusterrun.launch.world_shape import World


def part_of_gpu(setup: Setup) -> Setup:
    """Return the setup with the part of model and sample that one GPU works on.

    If the size of a block is unknown, all parameters are assumed to be divided.
    """
    sizes = setup.parallel
    if sizes.model == 1:
        return setup
    tokens = -(-setup.seq_len // (sizes.context * sizes.sequence))
    return replace(setup, model=_divided(setup.model, sizes.tensor), seq_len=tokens)


def _divided(model: Model, tensor: int) -> Model:
    blocks = model.layers * model.block or model.params
    return replace(
        model,
        params=model.params - blocks + blocks // tensor,
        block=model.block // tensor,
        head_dim=model.query_width // max(1, model.heads),
        heads=max(1, model.heads // tensor) if model.heads else 0,
        kv_heads=max(1, model.kv_heads // tensor) if model.kv_heads else 0,
        ffn=model.ffn // tensor,
        expert_ffn=model.expert_ffn // tensor,
        linear_params=model.linear_params // tensor,
    )


def mistake(setup: Setup) -> str:
    """Return why the sizes can't divide ranks or model; "" if no reason is known."""
    sizes, model, procs = setup.parallel, setup.model, setup.procs_per_node
    world = World(nodes=setup.nodes, procs_per_node=procs, gpus_per_node=procs, device=Device.CUDA)
    try:
        check_sizes(sizes, setup.strategy, world)
    except UsageError as error:
        return error.message
    heads = {"heads": model.heads, "key-value heads": model.kv_heads}
    for name, size in (("tensor", sizes.tensor), ("sequence", sizes.sequence)):
        for what, number in heads.items():
            # Ulysses copies key-value heads if there are fewer than ranks.
            is_copied = name == "sequence" and what != "heads" and size % (number or 1) == 0
            if number % size and not is_copied:
                named = model.name or "the model"
                return (
                    f"launch.{name}_parallel {size} does not divide the {number} {what} of {named}"
                )
    for name, divisor in (("context", 2 * sizes.context), ("sequence", sizes.sequence)):
        if getattr(sizes, name) > 1 and setup.seq_len % divisor:
            return (
                f"samples of {setup.seq_len:,} tokens are not divisible by {divisor}, as "
                f"launch.{name}_parallel {getattr(sizes, name)} requires"
            )
    return ""


def notes(setup: Setup) -> Iterator[str]:
    """Yield notes on the meaning of the numbers and on what they leave out."""
    sizes = setup.parallel
    if sizes.tensor > 1:
        yield (
            f"P and U are a GPU's part with launch.tensor_parallel {sizes.tensor}: the matrices of "
            "the blocks are divided, embeddings and norms are whole"
        )
    if sizes.model > 1:
        yield (
            "times leave out the traffic of tensor, context and sequence parallelism: measure a "
            "step and pass --step-time"
        )
