"""The Plan: every decision about a job; nodes read it as `plan.json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from clusterrun.config.choices import (
    Cluster,
    Device,
    Launcher,
    Network,
    OnInterrupt,
    Preflight,
    Stage,
    Strategy,
)
from clusterrun.shared import typed

if TYPE_CHECKING:
    from clusterrun.config.spec import JobSpec

SCHEMA = "clusterrun.plan-file/1"
LOOPBACK = "127.0.0.1"


class Precision(str, Enum):
    """The mixed precision of the run.

    HEAD: the head node chooses bf16 or fp16 for all. FILE: the user's accelerate
    configuration decides, and the launcher gets no option.
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    HEAD = "head"
    FILE = "file"


@dataclass(frozen=True, kw_only=True)
class EnvVar:
    """One exported variable and the reason for it."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Directive:
    """One `#SBATCH --name=value`; a value of None is a bare flag."""

    name: str
    value: str | None = None


# The sizes of accelerate's ParallelismConfig, in the order of its mesh, except tp, which is
# innermost: our names and accelerate's, and our names and the fields of a JobSpec.
SIZES: Final = {
    **{"replicate": "dp_replicate", "shard": "dp_shard"},
    **{"context": "cp", "sequence": "sp", "tensor": "tp"},
}
SIZE_FIELDS: Final = {
    name: f"data_parallel_{name}" if key.startswith("dp") else f"{name}_parallel"
    for name, key in SIZES.items()
}


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The requested sizes; 0 leaves one to the strategy and the number of ranks."""

    replicate: int = 0
    shard: int = 0
    context: int = 1
    sequence: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, spec: JobSpec) -> Parallel:
        """Read the sizes of a spec."""
        given = {name: getattr(spec, field) for name, field in SIZE_FIELDS.items()}
        return cls(**{name: size for name, size in given.items() if size})

    @property
    def model(self) -> int:
        """Return how many ranks work on the same samples."""
        return self.tensor * self.context * self.sequence

    def data(self, world: int) -> int:
        """Return the data-parallel size: the number of groups of ranks with different samples.

        >>> Parallel(tensor=4, context=2).data(64)
        8
        """
        return max(1, world // self.model)

    def decided(self, strategy: Strategy, *, nodes: int, world: int) -> Parallel:
        """Return all sizes; their product is the world unless they can't multiply to it.

        Nothing is sharded below stage 1. A hybrid has a copy on each node, the others one copy.

        >>> Parallel(tensor=2).decided(Strategy.FSDP_HYBRID, nodes=2, world=16)
        Parallel(replicate=2, shard=4, context=1, sequence=1, tensor=2)
        """
        data, replicate, shard = self.data(world), self.replicate, self.shard
        if not shard and not strategy.stage:
            shard = 1
        if not shard:
            replicate = replicate or (min(nodes, data) if strategy.is_hybrid else 1)
            shard = max(1, data // replicate)
        replicate = replicate or max(1, data // shard)
        return dataclasses.replace(self, replicate=replicate, shard=shard)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All decisions about a job; none is "auto".

    `entry` is the user's script with its arguments, or `-m MODULE` with its arguments.
    `env` is exported on every node in this order; `pass_env` lists variables whose values
    come from the submitting environment and are never written. The template `accelerate_config`
    is rendered with the values in `accelerate`; both are empty if `accelerate_text` is the
    user's own configuration. `deepspeed` is the text of ds_config.json (empty: none). Times are
    in seconds unless the name ends in minutes; 0 means the library's default, for logs no cap.
    `max_restarts` None means no limit while each attempt saves something new. `warning_s` is how
    long before the time limit the ranks are asked to save and exit. `host_bytes` is the estimated
    memory of a node, 0 if the configuration names no model. With `is_smoke`, the ranks check the
    nodes, and start without those that did not join in time. `hosts` are the machines of a job over
    ssh or in an allocation, as given (`user@host:port`), spares last; `starter` is how an
    allocation starts processes on them. A lost host may return within `wait_for_hosts_s`. Hosts
    that do not share the run's directory keep their part in `hosts_dir`. `stage` AUTO: the batch
    host looks whether the environment is on a shared file system. `stage_dir` "" is its TMPDIR.
    """

    name: str
    cluster: Cluster
    nodes: int
    procs_per_node: int
    gpus_per_node: int
    device: Device
    gpu_ids: tuple[str, ...]
    strategy: Strategy
    precision: Precision
    entry: tuple[str, ...]
    workdir: str
    runs_dir: str
    python: str
    setup: tuple[str, ...]
    directives: tuple[Directive, ...]
    sbatch_args: tuple[str, ...]
    srun_args: tuple[str, ...]
    env: tuple[EnvVar, ...]
    pass_env: tuple[str, ...]
    network: Network
    network_interface: str
    accelerate_config: str
    accelerate: Mapping[str, Any]
    deepspeed: str
    threads_per_process: int
    timeout_s: int
    rendezvous_timeout_s: int
    main_process_port: int
    time_minutes: int
    world_contract: bool
    spare_nodes: int
    max_restarts: int | None
    on_interrupt: OnInterrupt
    warning_s: int
    hang_timeout_s: int
    trainer_resume: bool = True
    preflight: Preflight = Preflight.WARN
    launcher: Launcher = Launcher.ACCELERATE
    log_spool_bytes: int
    log_lines_per_s: int
    accelerate_text: str = ""
    parallel: Parallel = field(default_factory=Parallel)
    port_range: tuple[int, int] = (20000, 29999)
    host_bytes: int = 0
    notes: tuple[str, ...] = ()
    is_smoke: bool = False
    hosts: tuple[str, ...] = ()
    wait_for_hosts_s: int = 600
    hosts_dir: str = ""
    starter: str = ""
    stage: Stage = Stage.OFF
    stage_dir: str = ""

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the whole job."""
        return self.nodes * self.procs_per_node

    @property
    def data_parallel(self) -> int:
        """Return the number of groups of ranks that read different samples."""
        return self.parallel.data(self.world_size)

    def directive(self, name: str) -> str | None:
        """Return the value of a directive, the last if there are several; None without one."""
        values = [line.value for line in self.directives if line.name == name]
        return values[-1] if values else None

    def to_json(self) -> str:
        """Return the text of `plan.json`: one line, keys sorted, equal for equal plans."""
        data = {"schema": SCHEMA, **dataclasses.asdict(self)}
        return json.dumps(data, separators=(",", ":"), sort_keys=True, ensure_ascii=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        data = json.loads(text)
        plan = typed.of_schema(cls, data, SCHEMA)
        if unknown := data.keys() - {"schema", *(field.name for field in dataclasses.fields(cls))}:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
        return plan
