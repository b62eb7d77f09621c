"""The Plan: every decision about a job; nodes read it as `plan.json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

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
from clusterrun.config.parallel import Parallel
from clusterrun.shared import typed

SCHEMA = "clusterrun.plan-file/1"
DEFAULT_PORTS = (20000, 29999)
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
    port_range: tuple[int, int] = DEFAULT_PORTS
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
