"""Decide the world of a job: its processes, their device, and their GPUs."""

from __future__ import annotations

from typing import NamedTuple

from clusterrun.config.choices import Device, GpuRequest
from clusterrun.config.hosts import one_count
from clusterrun.config.spec import JobSpec
from clusterrun.errors import UsageError
from clusterrun.launch.facts import Facts
from clusterrun.launch.passed_on import asks_for_gpus
from clusterrun.shared.wording import count


class World(NamedTuple):
    """The nodes, the processes and GPUs of each node, and the device."""

    nodes: int
    procs_per_node: int
    gpus_per_node: int
    device: Device
    gpu_ids: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of ranks of the whole job."""
        return self.nodes * self.procs_per_node


def decide_world(spec: JobSpec, facts: Facts, *, cpu_by_file: bool = False) -> World:
    """Count processes and choose their device; `cpu_by_file` is `use_cpu: true` in the user's file.

    Raises UsageError if the request contradicts itself or this machine.
    """
    scheduler = facts.cluster.scheduler
    if spec.gpu_ids is not None and not scheduler.is_this_machine:
        raise UsageError(
            "--gpu-ids chooses among the GPUs of this machine",
            hint="pass --gpus-per-node: Slurm, or each host, chooses; or pass --cluster local",
        )
    if spec.device is Device.MPS and not scheduler.is_this_machine:
        raise UsageError("--device mps is Apple's GPU; nodes have none", hint="drop --device")
    if scheduler.has_queue:
        world = _on_slurm(spec, cpu_by_file=cpu_by_file)
    elif scheduler.has_hosts:
        world = _on_hosts(spec, facts, cpu_by_file=cpu_by_file)
    else:
        world = _on_this_machine(spec, facts, cpu_by_file=cpu_by_file)
    check_sharing(world)
    if world.device is Device.MPS and world.size > 1:
        raise UsageError(
            f"{world.size} ranks cannot share Apple's GPU",
            hint="run one rank, or pass --device cpu",
        )
    return world


def check_sharing(world: World) -> None:
    """Refuse more ranks than GPUs. Raises UsageError."""
    if world.device is Device.CUDA and 0 < world.gpus_per_node < world.procs_per_node:
        raise UsageError(
            f"{world.procs_per_node} ranks of a node cannot share "
            f"{count(world.gpus_per_node, 'GPU')}",
            hint="lower --nproc-per-node or raise --gpus-per-node: NCCL needs a GPU for each rank",
        )


def _on_slurm(spec: JobSpec, *, cpu_by_file: bool) -> World:
    gpus = spec.gpus_per_node or 0
    procs = spec.nproc_per_node or gpus or 1
    device = spec.device
    notes: tuple[str, ...] = ()
    if device is Device.AUTO:
        device = Device.CUDA if gpus and not cpu_by_file else Device.CPU
        if not gpus:
            notes = (f"no GPU requested: {_cpu_processes(procs)}",)
    if device is Device.CUDA and not gpus and spec.gpu_request is not GpuRequest.NONE:
        raise UsageError(
            "--device cuda, but no GPU is requested",
            hint="pass --gpus-per-node COUNT (--set slurm.gpu_request=none if the site adds them)",
        )
    return World(
        nodes=spec.nodes or 1, procs_per_node=procs, gpus_per_node=gpus, device=device, notes=notes
    )


def _on_hosts(spec: JobSpec, facts: Facts, *, cpu_by_file: bool) -> World:
    """Take the GPUs of each host from the options or the hostfile; no host is reached yet."""
    given = spec.gpus_per_node
    is_auto = spec.device is Device.AUTO
    is_cpu = spec.device is Device.CPU or (is_auto and (cpu_by_file or given == 0))
    is_enough = is_cpu and spec.nproc_per_node is not None
    gpus = one_count(facts.hosts) if given is None and not is_enough else given or 0
    if not gpus and not is_cpu:
        raise UsageError(
            f"how many GPUs each host has is not known ({facts.hosts.source} does not state it)",
            hint="pass --gpus-per-node COUNT, or --device cpu",
        )
    return World(
        nodes=spec.nodes or len(facts.hosts.hosts) - spec.spare_nodes,
        procs_per_node=spec.nproc_per_node or gpus or 1,
        gpus_per_node=0 if is_cpu else gpus,
        device=Device.CPU if is_cpu else Device.CUDA,
    )


def check_gpu_options(spec: JobSpec) -> None:
    """Refuse options for GPUs that are passed to sbatch and srun. Raises UsageError.

    The exception: slurm.gpu_request is none, and the GPUs of a node are counted or not used.
    """
    is_counted = spec.gpus_per_node is not None or spec.device is not Device.AUTO
    if spec.gpu_request is GpuRequest.NONE and is_counted:
        return
    if asked := next(filter(asks_for_gpus, (*spec.sbatch_args, *spec.srun_args)), ""):
        raise UsageError(
            f"{asked} requests GPUs beside clusterrun, which counts a rank for each",
            hint=(
                "use --gpus-per-node COUNT instead",
                "or, for a site that needs this option, pass --gpus-per-node COUNT "
                "--set slurm.gpu_request=none beside it",
            ),
        )


def _cpu_processes(count: int) -> str:
    return f"{count} CPU process{'' if count == 1 else 'es'} per node over gloo"


def _on_this_machine(spec: JobSpec, facts: Facts, *, cpu_by_file: bool) -> World:
    ids = _usable_gpus(spec, facts)
    device = _local_device(spec, facts, has_gpus=bool(ids), cpu_by_file=cpu_by_file)
    if device is Device.CUDA:
        # Assign the GPUs of this machine to its simulated nodes, in the order of `ids`.
        nodes = spec.nodes or 1
        each = spec.gpus_per_node or spec.nproc_per_node or max(1, len(ids) // nodes)
        wanted = nodes * each
        if wanted > len(ids):
            raise UsageError(
                f"{nodes} x {each} GPUs requested, but only {len(ids)} may be used here",
                hint="request fewer, or pass --device cpu to run the same processes over gloo",
            )
        return World(
            nodes=nodes,
            procs_per_node=spec.nproc_per_node or each,
            gpus_per_node=each,
            device=Device.CUDA,
            gpu_ids=ids[:wanted],
        )
    procs = spec.nproc_per_node or spec.gpus_per_node or 1
    notes: tuple[str, ...] = ()
    if spec.device is Device.AUTO and device is Device.CPU and not cpu_by_file:
        reason = "no GPU requested" if ids else "no GPU here"
        notes = (f"{reason}: {_cpu_processes(procs)}",)
    return World(
        nodes=spec.nodes or 1, procs_per_node=procs, gpus_per_node=0, device=device, notes=notes
    )


def _usable_gpus(spec: JobSpec, facts: Facts) -> tuple[str, ...]:
    if spec.gpu_ids is None:
        return facts.local_gpus
    ids = tuple(part.strip() for part in spec.gpu_ids.split(","))
    if len(set(ids)) < len(ids) or "" in ids:
        raise UsageError(
            f"--gpu-ids {spec.gpu_ids!r} is not a list of distinct GPUs",
            hint="write --gpu-ids 0,2",
        )
    if spec.device is Device.CPU:
        raise UsageError("--gpu-ids names GPUs and --device cpu uses none", hint="drop one of them")
    unknown = [gpu for gpu in ids if gpu not in facts.local_gpus]
    if unknown:
        here = ", ".join(facts.local_gpus) or "none"
        raise UsageError(
            f"GPU {', '.join(unknown)} is not on this machine",
            hint=f"choose from the GPUs that may be used here: {here}",
        )
    return ids


def _local_device(spec: JobSpec, facts: Facts, *, has_gpus: bool, cpu_by_file: bool) -> Device:
    if spec.device is Device.CUDA and not has_gpus:
        raise UsageError(
            "--device cuda, but this machine has no usable GPU",
            hint="pass --device cpu to run the same processes over gloo",
        )
    if spec.device is Device.MPS and facts.platform != "darwin":
        raise UsageError(f"--device mps is Apple's GPU; this machine runs {facts.platform}")
    if spec.device is not Device.AUTO:
        return spec.device
    if cpu_by_file or spec.gpus_per_node == 0:
        return Device.CPU
    if has_gpus:
        return Device.CUDA
    ranks = (spec.nodes or 1) * (spec.nproc_per_node or spec.gpus_per_node or 1)
    return Device.MPS if facts.platform == "darwin" and ranks == 1 else Device.CPU
