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
    """The mixed precision of the run."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    HEAD = "head"  # the head node chooses bf16 or fp16 for all
    FILE = "file"  # the user's accelerate configuration decides; the launcher gets no option


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
        """Return all sizes; their product is `world`, the ranks, unless they can't multiply to it.

        Nothing is sharded below stage 1. A hybrid has a copy on each node, the others one copy.

        >>> Parallel(tensor=2).decided(Strategy.FSDP_HYBRID, nodes=2, world=16)
        Parallel(replicate=2, shard=4, context=1, sequence=1, tensor=2)
        """
        data, replicate, shard = self.data(world), self.replicate, self.shard
        if strategy.stage and not shard:
            replicate = replicate or (min(nodes, data) if strategy.is_hybrid else 1)
            shard = max(1, data // replicate)
        shard = shard or 1
        replicate = replicate or max(1, data // shard)
        return dataclasses.replace(self, replicate=replicate, shard=shard)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All decisions about a job; none is "auto". Times are in seconds except `time_minutes`."""

    name: str
    cluster: Cluster
    nodes: int
    procs_per_node: int
    gpus_per_node: int
    device: Device
    gpu_ids: tuple[str, ...]
    strategy: Strategy
    precision: Precision
    entry: tuple[str, ...]  # the script, or `-m MODULE`, with its arguments
    workdir: str
    runs_dir: str
    python: str
    setup: tuple[str, ...]
    directives: tuple[Directive, ...]
    sbatch_args: tuple[str, ...]
    srun_args: tuple[str, ...]
    env: tuple[EnvVar, ...]  # exported on every node, in this order
    pass_env: tuple[str, ...]  # names; the values of the submitting environment are never written
    network: Network
    network_interface: str
    accelerate_config: str  # a template; "" if `accelerate_text` is the whole configuration
    accelerate: Mapping[str, Any]  # the values that the template is rendered with
    deepspeed: str  # the text of ds_config.json; "": none
    threads_per_process: int  # 0: each node decides
    timeout_s: int  # 0: the library's default
    rendezvous_timeout_s: int
    main_process_port: int  # 0: one of `port_range`, by the job
    time_minutes: int  # 0: no time limit is known
    world_contract: bool
    spare_nodes: int
    max_restarts: int | None  # None: no limit while each attempt saves something new
    on_interrupt: OnInterrupt
    warning_s: int  # before the time limit: when the ranks are asked to save and exit
    hang_timeout_s: int  # 0: hangs are not looked for
    trainer_resume: bool = True
    preflight: Preflight = Preflight.WARN
    launcher: Launcher = Launcher.ACCELERATE
    log_spool_bytes: int
    log_lines_per_s: int  # 0: no cap
    accelerate_text: str = ""  # the user's own configuration
    parallel: Parallel = field(default_factory=Parallel)
    port_range: tuple[int, int] = (20000, 29999)
    host_bytes: int = 0  # the estimated memory of a node; 0: the configuration names no model
    notes: tuple[str, ...] = ()
    is_smoke: bool = False  # ranks check nodes; they start without those that join too late
    hosts: tuple[str, ...] = ()  # of a job over ssh or in an allocation, as given; spares last
    wait_for_hosts_s: int = 600  # in which a lost host may return
    hosts_dir: str = ""  # on hosts that do not share the run's directory, for their part of it
    starter: str = ""  # how an allocation starts processes on its hosts
    stage: Stage = Stage.OFF  # AUTO: the batch host looks whether the environment is shared
    stage_dir: str = ""  # "": the TMPDIR of the batch host

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
