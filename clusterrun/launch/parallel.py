"""Check the sizes by which ranks are divided, against the world, the strategy and the versions."""

from __future__ import annotations

from typing import Any, Final

from clusterrun.config.choices import Strategy
from clusterrun.config.parallel import FIELDS, SIZES, Parallel
from clusterrun.config.spec import JobSpec
from clusterrun.errors import UsageError
from clusterrun.launch.facts import Facts
from clusterrun.launch.script_args import values_of
from clusterrun.launch.user_files import OwnFiles, yaml_error
from clusterrun.launch.world_shape import World
from clusterrun.shared.wording import count

_INSTEAD: Final = {
    "tensor": "use --strategy fsdp; ddp supports it only over all ranks",
    "context": "use --strategy fsdp; with DeepSpeed, use --set launch.sequence_parallel=N",
    "sequence": "use --strategy zero3 or zero2; with FSDP, use --set launch.context_parallel=N",
    "shard": "use --strategy fsdp",
    "replicate": "use --strategy fsdp",
}


def decide_sizes(spec: JobSpec, own: OwnFiles, strategy: Strategy, world: World) -> Parallel:
    """Return the size of each way to divide the ranks, those of a YAML of the user's own, too.

    Raises UsageError for sizes that don't multiply to the world or that the strategy doesn't have,
    ConfigError for those of the YAML.
    """
    if own.accelerate_text:
        return _sizes_of_yaml(spec, own)
    asked = Parallel.of(spec)
    check_sizes(asked, strategy, world)
    return asked.decided(strategy, nodes=world.nodes, world=world.size)


def check_sizes(asked: Parallel, strategy: Strategy, world: World) -> None:
    """Refuse sizes that this strategy or this number of ranks can't have. Raises UsageError."""
    for name, field in FIELDS.items():
        size = getattr(asked, name)
        has = strategy.is_fsdp or (
            name == "tensor" and strategy is Strategy.DDP and size == world.size
        )
        if name == "sequence":  # accelerate's authors have tried Ulysses with stages 2 and 3
            has = strategy.is_deepspeed and strategy.stage > 1
        if size > 1 and not has:
            raise UsageError(
                f"launch.{field} {size} does not work with --strategy {strategy.value}",
                hint=_INSTEAD[name],
            )
    if world.size % asked.model:
        near = max(n for n in range(1, min(asked.model, world.size + 1)) if world.size % n == 0)
        raise UsageError(
            f"{_named(asked, 'context', 'sequence', 'tensor')} does not divide "
            f"{count(world.size, 'rank')}",
            hint=f"choose sizes with product {near}, or run on a multiple of {asked.model} ranks",
        )
    sizes = asked.decided(strategy, nodes=world.nodes, world=world.size)
    _check_product(asked, sizes, world)
    if strategy.is_fsdp:
        _check_shards(sizes, strategy, world)


def _check_product(asked: Parallel, sizes: Parallel, world: World) -> None:
    if sizes.total == world.size:
        return
    data = asked.data(world.size)
    named = _named(asked, "replicate", "shard") or f"a copy on each of {world.nodes} nodes"
    each = f" ({world.size} / {asked.model})" if asked.model > 1 else ""
    raise UsageError(
        f"{named} does not divide {count(data, 'data-parallel rank')}{each}",
        hint="set only launch.data_parallel_shard, to a divisor of that number",
    )


def _check_shards(sizes: Parallel, strategy: Strategy, world: World) -> None:
    """Refuse what accelerate refuses on the nodes: FSDP without ranks to shard over."""
    if world.size == 1 or sizes.shard > 1 or (sizes.context > 1 and sizes.replicate == 1):
        return
    is_hybrid = strategy.is_hybrid and sizes.model == 1
    what = "shards within a node, and each node has one rank"
    raise UsageError(
        f"{strategy.value} {what if is_hybrid else 'has nothing left to shard over'}",
        hint="use --strategy ddp, or set launch.data_parallel_shard and make other sizes smaller",
    )


def check_parts(spec: JobSpec, sizes: Parallel, facts: Facts) -> None:
    """Refuse what would train as if samples were not divided, without an error. Raises UsageError.

    Context parallel replaces sdpa alone, and accelerate before 1.12 ignores Ulysses.
    """
    named = values_of(spec.args, "--attn_implementation")
    if sizes.context > 1 and set(named) - {"sdpa"}:
        raise UsageError(
            f"launch.context_parallel can't split {named[0]}, which the script's arguments request",
            hint="use --attn_implementation sdpa",
        )
    if sizes.sequence > 1 and (facts.interpreter.version_of("accelerate") or (1, 12)) < (1, 12):
        raise UsageError(
            "launch.sequence_parallel needs accelerate 1.12; "
            f"{facts.interpreter.packages['accelerate']} is installed",
            hint="upgrade accelerate",
        )


def template_sizes(sizes: Parallel, strategy: Strategy) -> dict[str, int]:
    """Return the keys of accelerate's parallelism_config; nothing if its defaults will do."""
    is_divided = strategy.is_hybrid or (strategy.is_fsdp and sizes.replicate > 1)
    if sizes.model == 1 and not is_divided:
        return {}
    given = {key: getattr(sizes, name) for key, name in SIZES.items()}
    return {_key(key): size for key, size in given.items() if size > 1 or key.startswith("dp")}


def _sizes_of_yaml(spec: JobSpec, own: OwnFiles) -> Parallel:
    for key, name in SIZES.items():
        if getattr(spec, FIELDS[name]):
            raise UsageError(
                f"launch.{FIELDS[name]} cannot be combined with {spec.accelerate_config}",
                hint=f"write it there under parallelism_config, as {_key(key)}",
            )
    given = own.accelerate.get("parallelism_config") or {}
    return Parallel(**{name: _size(spec, given, _key(key)) for key, name in SIZES.items()})


def _size(spec: JobSpec, given: Any, key: str) -> int:
    value = given.get(key, 1) if isinstance(given, dict) else given
    if type(value) is int and value > 0:
        return value
    raise yaml_error(spec, f"{key} must be a whole number above 0, not {value!r}")


def _key(name: str) -> str:
    return f"parallelism_config_{name}_size"


def _named(sizes: Parallel, *names: str) -> str:
    """Return the options of sizes that were asked for, as a product."""
    found = ((f"launch.{FIELDS[name]}", getattr(sizes, name)) for name in names)
    return " x ".join(f"{option} {size}" for option, size in found if size > 1)
