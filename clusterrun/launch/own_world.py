"""Read the machines, ranks and GPUs that the user's accelerate YAML requests."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from clusterrun.config.choices import Device, Strategy
from clusterrun.config.spec import JobSpec
from clusterrun.errors import ConfigError
from clusterrun.launch.facts import Facts
from clusterrun.launch.passed_on import gpu_option
from clusterrun.launch.user_files import OwnFiles
from clusterrun.launch.world_shape import World
from clusterrun.shared.wording import count

_COUNTS: Final = ("num_machines", "num_processes", "gpu_ids", "use_cpu", "mixed_precision")
# Keys that the launcher's arguments replace, with the value that requests nothing else.
_REPLACED: Final = {
    "machine_rank": 0,
    "main_process_ip": None,
    "main_process_port": None,
    "rdzv_backend": "static",
}
# The same in deepspeed_config; the last three are for launchers that clusterrun replaces.
_REPLACED_OF_DEEPSPEED: Final = {
    "deepspeed_multinode_launcher": "standard",
    "deepspeed_hostfile": None,
    "deepspeed_exclusion_filter": None,
    "deepspeed_inclusion_filter": None,
}


def take_world(spec: JobSpec, own: OwnFiles, facts: Facts) -> JobSpec:
    """Return the spec with the nodes, ranks and GPUs that only the YAML sets.

    Raises ConfigError for an impossible count and for a key that accelerate does not know.
    """
    _refuse_unknown(spec, own, facts)
    machines, each = _shape(spec, own)
    taken: dict[str, Any] = {"nodes": spec.nodes or machines}
    if each and not (spec.nproc_per_node or spec.gpus_per_node):
        _refuse_other_kind(spec, own, (spec.nodes or machines or 1) * each)
        taken["nproc_per_node"] = each
    if not _is_cpu(spec, own):
        is_elsewhere = not facts.cluster.scheduler.is_this_machine
        taken |= _gpus_elsewhere(spec, spec.nproc_per_node or each) if is_elsewhere and each else {}
        taken |= {} if is_elsewhere else {"gpu_ids": spec.gpu_ids or _gpu_ids(spec, own)}
    return dataclasses.replace(spec, **taken)


def notes_on_file(asked: JobSpec, own: OwnFiles, facts: Facts, world: World) -> Iterator[str]:
    """Yield notes on replaced settings of the YAML: counts in one, the rest in another.

    `asked` is the spec before `take_world`.
    """
    machines, each = _shape(asked, own)
    others = [count(world.nodes, "node")] if machines not in (None, world.nodes) else []
    if each not in (None, world.procs_per_node):
        others.append(f"{count(world.procs_per_node, 'rank')} per node")
    if others:
        yield f"requested: {', '.join(others)}; {asked.accelerate_config} has {_counts(own)}"
    replaced = [f"{key} {value}" for key, value in _replaced(asked, own, facts)]
    if replaced:
        yield f"clusterrun replaces settings of {asked.accelerate_config}: {', '.join(replaced)}"


def _refuse_unknown(spec: JobSpec, own: OwnFiles, facts: Facts) -> None:
    """Refuse keys that accelerate would refuse only on the nodes, after the queue.

    Sections such as `fsdp_config` are not checked: accelerate accepts any key in them.
    """
    known = facts.accelerate_keys
    unknown = [key for key in map(str, own.accelerate) if key not in (known or _COUNTS)]
    near = {key: difflib.get_close_matches(key, known or _COUNTS, 1, 0.85) for key in unknown}
    refused = unknown if known else [key for key in unknown if near[key]]
    if not refused:
        return
    others = ", ".join(key for key in refused if not near[key])
    more = (f"remove {others}, or install the accelerate that wrote the file",) if others else ()
    program = f"accelerate {facts.versions.get('accelerate', '') if known else ''}".strip()
    raise ConfigError(
        f"{program} has no key {' or '.join(map(repr, refused))}",
        where=spec.accelerate_config,
        hint=(*(f"write {near[key][0]} for {key}" for key in refused if near[key]), *more),
    )


def _shape(spec: JobSpec, own: OwnFiles) -> tuple[int | None, int | None]:
    """Return the number of machines and the ranks of each; None if the file has none."""
    machines, total = _count(spec, own, "num_machines"), _count(spec, own, "num_processes")
    if total is None:
        return machines, None
    over = machines or spec.nodes or 1
    if total % over:
        near = max(over, total - total % over)
        raise ConfigError(
            f"num_processes {total} can't be divided among {count(over, 'machine')}",
            where=spec.accelerate_config,
            hint=f"write {near} or {near + over}: num_processes counts the ranks of all machines",
        )
    return machines, total // over


def _count(spec: JobSpec, own: OwnFiles, key: str) -> int | None:
    value = own.accelerate.get(key)
    if value is None or (type(value) is int and value > 0):  # True is also an int
        return value
    raise ConfigError(
        f"{key} must be a whole number above 0, not {value!r}",
        where=spec.accelerate_config,
        hint=f"write {key}: 2, or omit it",
    )


def _refuse_other_kind(spec: JobSpec, own: OwnFiles, ranks: int) -> None:
    if own.accelerate["distributed_type"] == "MULTI_GPU" and ranks == 1:
        raise ConfigError(
            "distributed_type MULTI_GPU, but num_processes 1",
            where=spec.accelerate_config,
            hint='write num_processes: 2, or distributed_type: "NO" to train on one',
        )


def _is_cpu(spec: JobSpec, own: OwnFiles) -> bool:
    return spec.device is Device.CPU or (spec.device is Device.AUTO and own.use_cpu)


def _gpus_elsewhere(spec: JobSpec, ranks: int | None) -> dict[str, Any]:
    passed_on = spec.gpus_per_node is not None or any(map(gpu_option, spec.sbatch_args))
    return {} if passed_on else {"gpus_per_node": ranks}


def _gpu_ids(spec: JobSpec, own: OwnFiles) -> str | None:
    ids = own.accelerate.get("gpu_ids")
    if ids is None or ids == "all":
        return None
    if isinstance(ids, str) or type(ids) is int:
        return str(ids)
    raise ConfigError(
        f"gpu_ids {ids!r} is not a list of GPUs",
        where=spec.accelerate_config,
        hint="write gpu_ids: 0,2 or gpu_ids: all",
    )


def _counts(own: OwnFiles) -> str:
    machines, total = (own.accelerate.get(key) for key in ("num_machines", "num_processes"))
    if total is None:
        return f"num_machines {machines}"
    return f"num_processes {total} on {count(machines or 1, 'machine')}"


def _replaced(asked: JobSpec, own: OwnFiles, facts: Facts) -> Iterator[tuple[str, Any]]:
    """Yield each key whose value is replaced by a different one."""
    usual = {**_REPLACED, "main_process_port": asked.main_process_port}
    yield from _others(own.accelerate, usual)
    ids = _gpu_ids(asked, own)
    is_used = facts.cluster.scheduler.is_this_machine and not _is_cpu(asked, own)
    if ids and not (is_used and asked.gpu_ids in (None, ids)):
        yield "gpu_ids", ids
    # accelerate's single-process launcher follows the file.
    if own.use_cpu and asked.device is Device.CUDA and own.strategy is not Strategy.NONE:
        yield "use_cpu", "true"
    precision = own.stated.value if own.stated else own.accelerate.get("mixed_precision")
    if precision and asked.mixed_precision.value not in ("auto", precision):
        yield "mixed_precision", precision
    zero = own.accelerate.get("deepspeed_config")
    if own.accelerate.get("distributed_type") == "DEEPSPEED" and isinstance(zero, dict):
        usual = dict(_REPLACED_OF_DEEPSPEED)
        if asked.deepspeed_config:
            usual["deepspeed_config_file"] = asked.deepspeed_config
        yield from _others(zero, usual)


def _others(config: Mapping[str, Any], usual: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in usual.items():
        if config.get(key) not in (None, value):
            yield key, config[key]
