"""Decide the world of a job: its processes, their device, their GPUs, and how they are divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from clusterrun.config.choices import Device, GpuRequest, Strategy
from clusterrun.config.hosts import slots_per_host
from clusterrun.config.spec import JobSpec
from clusterrun.errors import UsageError
from clusterrun.launch.facts import Facts
from clusterrun.launch.inputs import values_of
from clusterrun.launch.passed_on import asks_for_gpus
from clusterrun.launch.plan import SIZE_FIELDS, SIZES, Parallel
from clusterrun.launch.user_files import OwnFiles, yaml_error
from clusterrun.shared.wording import count


class World(NamedTuple):
    """The nodes, the processes and GPUs of each node, and the device."""

    nodes: int
    procs_per_node: int
    gpus_per_node: int
    device: Device
    gpu_ids: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of ranks of the whole job."""
        return self.nodes * self.procs_per_node


def decide_world(spec: JobSpec, facts: Facts, *, yaml_wants_cpu: bool = False) -> World:
    """Count processes, choose their device; `yaml_wants_cpu`: the user's file has `use_cpu: true`.

    Raises UsageError if the request contradicts itself or this machine.
    """
    scheduler = facts.cluster.scheduler
    if spec.gpu_ids is not None and not scheduler.is_this_machine:
        hint = "pass --gpus-per-node: Slurm, or each host, chooses the GPUs; or use --cluster local"
        raise UsageError("--gpu-ids works only for a job on this machine", hint=hint)
    if spec.device is Device.MPS and not (scheduler.is_this_machine and facts.platform == "darwin"):
        raise UsageError("--device mps works only locally on a Mac", hint="leave out --device")
    if scheduler.has_queue:
        world = _on_slurm(spec, yaml_wants_cpu=yaml_wants_cpu)
    elif scheduler.has_hosts:
        world = _on_hosts(spec, facts, yaml_wants_cpu=yaml_wants_cpu)
    else:
        world = _on_this_machine(spec, facts, yaml_wants_cpu=yaml_wants_cpu)
    check_sharing(world)
    if world.device is Device.MPS and world.size > 1:
        text = f"{world.size} ranks cannot share an Apple GPU"
        raise UsageError(text, hint="run one rank, or pass --device cpu")
    return world


def check_sharing(world: World) -> None:
    """Refuse more ranks than GPUs; with 0 GPUs, the site adds them. Raises UsageError."""
    if world.device is Device.CUDA and 0 < world.gpus_per_node < world.procs_per_node:
        gpus = count(world.gpus_per_node, "GPU")
        hint = "lower --nproc-per-node or raise --gpus-per-node: NCCL needs a GPU for each rank"
        raise UsageError(f"{world.procs_per_node} ranks per node cannot share {gpus}", hint=hint)


def _on_slurm(spec: JobSpec, *, yaml_wants_cpu: bool) -> World:
    """Decide on a rank for each requested GPU, else one on the CPU, or as many as options say.

    `yaml_wants_cpu`: the user's accelerate YAML has `use_cpu: true`. Raises UsageError.
    """
    gpus = spec.gpus_per_node or 0
    procs = spec.nproc_per_node or gpus or 1
    device = spec.device
    if device is Device.AUTO:
        device = Device.CUDA if gpus and not yaml_wants_cpu else Device.CPU
    if device is Device.CUDA and not gpus and spec.gpu_request is not GpuRequest.NONE:
        hint = "pass --gpus-per-node COUNT, or --set slurm.gpu_request=none if the site adds GPUs"
        raise UsageError("--device cuda is given, but no GPU is requested", hint=hint)
    return World(nodes=spec.nodes or 1, procs_per_node=procs, gpus_per_node=gpus, device=device)


def _on_hosts(spec: JobSpec, facts: Facts, *, yaml_wants_cpu: bool) -> World:
    """Take the GPUs of each host from the options or the hostfile; no host is reached yet."""
    wants_cpu = yaml_wants_cpu or spec.gpus_per_node == 0  # use_cpu: true, or no GPU wanted
    is_cpu = spec.device is Device.CPU or (spec.device is Device.AUTO and wants_cpu)
    slots = spec.gpus_per_node or 0  # of each host: its GPUs, or its ranks on CPUs
    is_stated = spec.gpus_per_node is not None or (is_cpu and spec.nproc_per_node is not None)
    if not is_stated:
        slots = slots_per_host(facts.hosts)
    if not slots and not is_cpu:
        text = f"the number of GPUs per host is unknown ({facts.hosts.source} does not state it)"
        raise UsageError(text, hint="pass --gpus-per-node COUNT, or --device cpu")
    nodes = spec.nodes or len(facts.hosts.hosts) - spec.spare_nodes
    procs = spec.nproc_per_node or slots or 1
    gpus, device = (0, Device.CPU) if is_cpu else (slots, Device.CUDA)
    return World(nodes=nodes, procs_per_node=procs, gpus_per_node=gpus, device=device)


def check_gpu_options(spec: JobSpec) -> None:
    """Refuse options for GPUs that are passed to sbatch and srun. Raises UsageError.

    With slurm.gpu_request=none they are allowed beside --gpus-per-node or --device.
    """
    is_stated = spec.gpus_per_node is not None or spec.device is not Device.AUTO
    if spec.gpu_request is GpuRequest.NONE and is_stated:
        return
    if asked := next(filter(asks_for_gpus, (*spec.sbatch_args, *spec.srun_args)), ""):
        text = f"clusterrun starts one rank per GPU, but does not read the number from {asked}"
        with_none = "pass --gpus-per-node COUNT --set slurm.gpu_request=none beside it"
        also = f"or, for a site that needs this option, {with_none}"
        raise UsageError(text, hint=("use --gpus-per-node COUNT instead", also))


def _on_this_machine(spec: JobSpec, facts: Facts, *, yaml_wants_cpu: bool) -> World:
    """Give each simulated node its GPUs of those that may be used here. Raises UsageError."""
    ids = _usable_gpus(spec, facts)
    device = _local_device(spec, facts, has_gpus=bool(ids), yaml_wants_cpu=yaml_wants_cpu)
    nodes = spec.nodes or 1
    if device is not Device.CUDA:
        procs = spec.nproc_per_node or spec.gpus_per_node or 1
        return World(nodes=nodes, procs_per_node=procs, gpus_per_node=0, device=device)
    # Assign the GPUs of this machine to its simulated nodes, in the order of `ids`.
    gpus = spec.gpus_per_node or spec.nproc_per_node or max(1, len(ids) // nodes)
    wanted = nodes * gpus
    if wanted > len(ids):
        text = f"{nodes} x {gpus} GPUs requested, but only {len(ids)} may be used here"
        hint = "request fewer, or pass --device cpu to run the same processes over gloo"
        raise UsageError(text, hint=hint)
    procs = spec.nproc_per_node or gpus
    return World(
        nodes=nodes, procs_per_node=procs, gpus_per_node=gpus, device=device, gpu_ids=ids[:wanted]
    )


def _usable_gpus(spec: JobSpec, facts: Facts) -> tuple[str, ...]:
    """Return the ids of --gpu-ids, else all that may be used here. Raises UsageError."""
    if spec.gpu_ids is None:
        return facts.local_gpus
    ids = tuple(part.strip() for part in spec.gpu_ids.split(","))
    if len(set(ids)) < len(ids):
        raise UsageError(f"--gpu-ids {spec.gpu_ids!r} names a GPU twice", hint="name it once")
    if spec.device is Device.CPU:
        raise UsageError("--gpu-ids names GPUs; --device cpu uses none", hint="keep one of them")
    unknown = [gpu for gpu in ids if gpu not in facts.local_gpus]
    if unknown:
        here = ", ".join(facts.local_gpus) or "none"
        text = f"GPU '{', '.join(unknown)}' is not available on this machine"
        raise UsageError(text, hint=f"choose from the GPUs that may be used here: {here}")
    return ids


def _local_device(spec: JobSpec, facts: Facts, *, has_gpus: bool, yaml_wants_cpu: bool) -> Device:
    """Choose the GPUs if there are any and they are wanted; Apple's only for a single rank."""
    if spec.device is not Device.AUTO:
        return spec.device
    if yaml_wants_cpu or spec.gpus_per_node == 0:  # use_cpu: true, or no GPU wanted
        return Device.CPU
    if has_gpus:
        return Device.CUDA
    ranks = (spec.nodes or 1) * (spec.nproc_per_node or spec.gpus_per_node or 1)
    return Device.MPS if facts.platform == "darwin" and ranks == 1 else Device.CPU


_INSTEAD: Final = {
    "tensor": "use --strategy fsdp; ddp supports it only over all ranks",
    "context": "use --strategy fsdp; with DeepSpeed, use --set launch.sequence_parallel=N",
    "sequence": "use --strategy zero3 or zero2; with FSDP, use --set launch.context_parallel=N",
    "shard": "use --strategy fsdp",
    "replicate": "use --strategy fsdp",
}


def decide_sizes(spec: JobSpec, own: OwnFiles, strategy: Strategy, world: World) -> Parallel:
    """Return the sizes of the kinds of parallelism: from the user's accelerate YAML, or options.

    Raises UsageError for sizes that don't multiply to the world or that the strategy doesn't have,
    ConfigError for those of the YAML.
    """
    if own.accelerate_text:
        return _sizes_of_yaml(spec, own)
    asked = Parallel.of(spec)
    check_sizes(asked, strategy, nodes=world.nodes, world=world.size)
    return asked.decided(strategy, nodes=world.nodes, world=world.size)


def check_sizes(asked: Parallel, strategy: Strategy, *, nodes: int, world: int) -> None:
    """Refuse sizes that this strategy or this number of ranks can't have. Raises UsageError."""
    for name, field in SIZE_FIELDS.items():
        size = getattr(asked, name)
        if size > 1 and not _supports(strategy, name, size, world):
            text = f"launch.{field} {size} does not work with --strategy {strategy.value}"
            raise UsageError(text, hint=_INSTEAD[name])
    if world % asked.model:
        divisor = max(n for n in range(1, min(asked.model, world + 1)) if world % n == 0)
        named = _named(asked, "context", "sequence", "tensor")
        hint = f"choose sizes with product {divisor}, or run on a multiple of {asked.model} ranks"
        raise UsageError(f"{named} does not divide {count(world, 'rank')}", hint=hint)
    sizes = asked.decided(strategy, nodes=nodes, world=world)
    _check_product(asked, sizes, nodes=nodes, world=world)
    if strategy.is_fsdp:
        _check_shards(sizes, strategy, world)


def _supports(strategy: Strategy, name: str, size: int, world: int) -> bool:
    """Return whether a strategy can have this size; DDP only tensor parallel over all ranks."""
    if name == "sequence":  # accelerate's authors have tried Ulysses with stages 2 and 3
        return strategy.is_deepspeed and strategy.stage > 1
    is_plain_tensor = strategy is Strategy.DDP and name == "tensor" and size == world
    return strategy.is_fsdp or is_plain_tensor


def _check_product(asked: Parallel, sizes: Parallel, *, nodes: int, world: int) -> None:
    """Refuse `sizes`, decided from `asked`, if their product is not `world`. Raises UsageError."""
    if sizes.replicate * sizes.shard * sizes.model == world:
        return
    named = _named(asked, "replicate", "shard") or f"a copy on each of {nodes} nodes"
    quotient = f" ({world} / {asked.model})" if asked.model > 1 else ""
    text = f"{named} does not divide {count(asked.data(world), 'data-parallel rank')}{quotient}"
    raise UsageError(text, hint="set only launch.data_parallel_shard, to a divisor of that number")


def _check_shards(sizes: Parallel, strategy: Strategy, world: int) -> None:
    """Refuse what accelerate refuses on the nodes: FSDP without ranks to shard over."""
    # FSDP also shards over context ranks, but accelerate refuses that beside replicas.
    shards_context = sizes.context > 1 and sizes.replicate == 1
    if world == 1 or sizes.shard > 1 or shards_context:
        return
    is_hybrid = strategy.is_hybrid and sizes.model == 1
    what = "shards within a node, and each node has one rank"
    text = f"{strategy.value} {what if is_hybrid else 'has nothing left to shard over'}"
    hint = "use --strategy ddp, or set launch.data_parallel_shard and make other sizes smaller"
    raise UsageError(text, hint=hint)


def check_divided_samples(spec: JobSpec, sizes: Parallel, facts: Facts) -> None:
    """Refuse settings with which samples would silently not be divided. Raises UsageError.

    Context parallel replaces sdpa alone, and accelerate before 1.12 ignores Ulysses.
    """
    named = values_of(spec.args, "--attn_implementation")
    accelerate = facts.interpreter.version_of("accelerate")
    if sizes.context > 1 and set(named) - {"sdpa"}:
        text = f"launch.context_parallel needs sdpa attention, but the script uses {named[0]}"
        raise UsageError(text, hint="use --attn_implementation sdpa")
    if sizes.sequence > 1 and accelerate is not None and accelerate < (1, 12):
        installed = f"{facts.interpreter.packages['accelerate']} is installed"
        text = f"launch.sequence_parallel needs accelerate 1.12 or newer; {installed}"
        raise UsageError(text, hint="upgrade accelerate")


def template_sizes(sizes: Parallel, strategy: Strategy) -> dict[str, int]:
    """Return accelerate's parallelism_config, with both `dp` sizes; {} if its defaults will do."""
    has_replicas = strategy.is_hybrid or (strategy.is_fsdp and sizes.replicate > 1)
    if sizes.model == 1 and not has_replicas:
        return {}
    given = {key: getattr(sizes, name) for name, key in SIZES.items()}
    return {_in_yaml(key): size for key, size in given.items() if size > 1 or key.startswith("dp")}


def _sizes_of_yaml(spec: JobSpec, own: OwnFiles) -> Parallel:
    """Return the sizes in the YAML. Raises UsageError if an option also sets one."""
    for name, key in SIZES.items():
        if getattr(spec, SIZE_FIELDS[name]):
            text = f"launch.{SIZE_FIELDS[name]} cannot be combined with {spec.accelerate_config}"
            hint = f"write it into that file, under parallelism_config, as {_in_yaml(key)}"
            raise UsageError(text, hint=hint)
    given = own.accelerate.get("parallelism_config") or {}
    return Parallel(**{name: _size(spec, given, _in_yaml(key)) for name, key in SIZES.items()})


def _size(spec: JobSpec, given: Mapping[str, Any], key: str) -> int:
    value = given.get(key, 1)
    if type(value) is int and value > 0:
        return value
    raise yaml_error(spec, f"{key} must be a whole number above 0, not {value!r}")


def _in_yaml(name: str) -> str:
    return f"parallelism_config_{name}_size"


def _named(sizes: Parallel, *names: str) -> str:
    """Write the sizes above 1 as a product of options."""
    found = ((f"launch.{SIZE_FIELDS[name]}", getattr(sizes, name)) for name in names)
    return " x ".join(f"{option} {size}" for option, size in found if size > 1)
