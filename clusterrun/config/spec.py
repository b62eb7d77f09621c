"""The request of the user: one frozen record that declares each field once.

The YAML loader, the environment reader and the command line are made from the metadata of the
fields (`FIELDS`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from clusterrun.config.fields import Field, Kind, check_type, check_value, declared
from clusterrun.config.training import Training


class Cluster(str, Enum):
    """Where a job runs."""

    AUTO = "auto"
    SLURM = "slurm"
    LOCAL = "local"


class Device(str, Enum):
    """What the ranks compute on."""

    AUTO = "auto"
    CUDA = "cuda"
    MPS = "mps"
    CPU = "cpu"


class MixedPrecision(str, Enum):
    """The arithmetic of the forward pass, in accelerate's words, or `auto`."""

    AUTO = "auto"
    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"


class Strategy(str, Enum):
    """How the model's state is spread over the ranks."""

    NONE = "none"
    DDP = "ddp"
    FSDP = "fsdp"
    FSDP_HYBRID = "fsdp-hybrid"
    FSDP_OFFLOAD = "fsdp-offload"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    ZERO2_OFFLOAD = "zero2-offload"
    ZERO3_OFFLOAD = "zero3-offload"

    @property
    def is_fsdp(self) -> bool:
        """Whether torch's fully sharded data parallel does the work."""
        return self.value.startswith("fsdp")

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed's ZeRO does the work."""
        return self.value.startswith("zero")

    @property
    def engine(self) -> str:
        """What does the work: `none`, `ddp`, `fsdp` or `deepspeed`."""
        return "deepspeed" if self.is_deepspeed else self.value.split("-")[0]


class GpuRequest(str, Enum):
    """The options by which a site wants GPUs to be requested."""

    GPUS_PER_NODE = "gpus-per-node"
    GRES = "gres"
    NONE = "none"


class OnInterrupt(str, Enum):
    """How a run continues after it lost its nodes: by a requeue, in a new job, or not at all."""

    REQUEUE = "requeue"
    SUCCESSOR = "successor"
    STOP = "stop"


class Network(str, Enum):
    """A preset of network environment variables."""

    AUTO = "auto"
    ETHERNET = "ethernet"
    INFINIBAND = "infiniband"
    EFA = "efa"


@dataclass(frozen=True, kw_only=True)
class JobSpec(Training):
    """The request of the user; a value of None is not set.

    Raises UsageError on construction for a value that can't be meant.
    """

    script: str | None = declared("script", Kind.PATH, "", "training script", group="job")
    module: str | None = declared(
        "module", Kind.TEXT, "-m --module", "run a module, as python -m does", group="job"
    )
    args: tuple[str, ...] = declared(
        "args", Kind.TEXTS, "", "arguments of the script", default=(), group="job"
    )
    name: str | None = declared(
        "name", Kind.TEXT, "-J --job-name", "name of the job and of its runs", group="job"
    )
    cluster: Cluster = declared(
        "cluster",
        Kind.ENUM,
        "--cluster",
        "auto takes Slurm where sbatch is found, else this machine",
        default=Cluster.AUTO,
        group="job",
    )
    run_dir: str = declared(
        "run_dir",
        Kind.PATH,
        "--run-dir",
        "directory of all runs; on Slurm a file system that the nodes share",
        default="runs",
        group="job",
    )

    nodes: int | None = declared(
        "slurm.nodes", Kind.COUNT, "-N --nodes", "number of nodes; default: 1"
    )
    gpus_per_node: int | None = declared(
        "slurm.gpus_per_node", Kind.NUMBER, "--gpus-per-node", "GPUs, hence ranks, of each node"
    )
    gpu_type: str | None = declared(
        "slurm.gpu_type", Kind.TEXT, "--gpu-type", "type in the request, as in gpu:a100:4"
    )
    gpu_request: GpuRequest = declared(
        "slurm.gpu_request",
        Kind.ENUM,
        "--gpu-request",
        "how this site wants GPUs to be asked for",
        default=GpuRequest.GPUS_PER_NODE,
    )
    cpus_per_task: int | None = declared(
        "slurm.cpus_per_task", Kind.COUNT, "-c --cpus-per-task", "CPUs of each node's task"
    )
    cpus_per_gpu: int | None = declared(
        "slurm.cpus_per_gpu", Kind.COUNT, "--cpus-per-gpu", "CPUs for each GPU"
    )
    mem: str | None = declared("slurm.mem", Kind.TEXT, "--mem", "memory of each node, as 200G")
    mem_per_gpu: str | None = declared(
        "slurm.mem_per_gpu", Kind.TEXT, "--mem-per-gpu", "memory for each GPU"
    )
    mem_per_cpu: str | None = declared(
        "slurm.mem_per_cpu", Kind.TEXT, "--mem-per-cpu", "memory for each CPU"
    )
    exclusive: bool = declared(
        "slurm.exclusive", Kind.FLAG, "--exclusive", "whole nodes", default=False
    )
    time_minutes: int | None = declared(
        "slurm.time", Kind.MINUTES, "-t --time", "time limit in Slurm's formats, as 1-12:00:00"
    )
    time_min_minutes: int | None = declared(
        "slurm.time_min", Kind.MINUTES, "--time-min", "least time limit that would do"
    )
    partition: str | None = declared("slurm.partition", Kind.TEXT, "-p --partition", "partition")
    account: str | None = declared("slurm.account", Kind.TEXT, "-A --account", "account to charge")
    qos: str | None = declared("slurm.qos", Kind.TEXT, "-q --qos", "quality of service")
    constraint: str | None = declared(
        "slurm.constraint", Kind.TEXT, "-C --constraint", "features that nodes must have"
    )
    nodelist: str | None = declared(
        "slurm.nodelist", Kind.TEXT, "-w --nodelist", "nodes that must be among them"
    )
    exclude: str | None = declared("slurm.exclude", Kind.TEXT, "-x --exclude", "nodes to avoid")
    reservation: str | None = declared(
        "slurm.reservation", Kind.TEXT, "--reservation", "reservation"
    )
    dependency: str | None = declared(
        "slurm.dependency", Kind.TEXT, "-d --dependency", "jobs to wait for, as afterok:4711"
    )
    begin: str | None = declared("slurm.begin", Kind.TEXT, "-b --begin", "earliest start")
    deadline: str | None = declared("slurm.deadline", Kind.TEXT, "--deadline", "latest end")
    hold: bool = declared("slurm.hold", Kind.FLAG, "-H --hold", "submit held", default=False)
    requeue: bool = declared(
        "slurm.requeue",
        Kind.FLAG,
        "--requeue/--no-requeue",
        "let Slurm start the job again after a preemption or a lost node",
        default=True,
    )
    signal: str | None = declared(
        "slurm.signal", Kind.TEXT, "--signal", "USR1 or USR2 before the time limit, as B:USR2@300"
    )
    spare_nodes: int = declared(
        "slurm.spare_nodes",
        Kind.NUMBER,
        "--spare-nodes",
        "nodes beyond --nodes that wait to replace one that is lost",
        default=0,
    )
    switches: str | None = declared("slurm.switches", Kind.TEXT, "--switches", "leaf switches")
    clusters: str | None = declared("slurm.clusters", Kind.TEXT, "-M --clusters", "Slurm cluster")
    comment: str | None = declared("slurm.comment", Kind.TEXT, "--comment", "comment")
    mail_type: str | None = declared("slurm.mail_type", Kind.TEXT, "--mail-type", "events to mail")
    mail_user: str | None = declared("slurm.mail_user", Kind.TEXT, "--mail-user", "mail address")
    sbatch_args: tuple[str, ...] = declared(
        "slurm.extra",
        Kind.TEXTS,
        "--sbatch-arg",
        "any other option of sbatch, as --sbatch-arg=--nice=100",
        default=(),
        metavar="OPTION",
    )
    srun_args: tuple[str, ...] = declared(
        "slurm.srun_extra",
        Kind.TEXTS,
        "--srun-arg",
        "any other option of srun, as --srun-arg=--container-image=IMAGE",
        default=(),
        metavar="OPTION",
    )

    nproc_per_node: int | None = declared(
        "launch.nproc_per_node",
        Kind.COUNT,
        "--nproc-per-node",
        "ranks of each node; default: its GPUs, or 1",
    )
    device: Device = declared(
        "launch.device",
        Kind.ENUM,
        "--device",
        "what the ranks compute on",
        default=Device.AUTO,
    )
    gpu_ids: str | None = declared(
        "launch.gpu_ids", Kind.TEXT, "--gpu-ids", "GPUs of this machine to use, as 0,2 (local)"
    )
    strategy: Strategy = declared(
        "launch.strategy",
        Kind.ENUM,
        "--strategy",
        "how the model's state is spread over the ranks",
        default=Strategy.DDP,
    )
    tensor_parallel: int | None = declared(
        "launch.tensor_parallel",
        Kind.COUNT,
        "--tensor-parallel",
        "ranks that split each layer (fsdp; ddp if that is all ranks)",
    )
    context_parallel: int | None = declared(
        "launch.context_parallel",
        Kind.COUNT,
        "--context-parallel",
        "ranks that split each sample by ring attention (fsdp)",
    )
    sequence_parallel: int | None = declared(
        "launch.sequence_parallel",
        Kind.COUNT,
        "--sequence-parallel",
        "ranks that split each sample as Ulysses does (zero2, zero3)",
    )
    data_parallel_shard: int | None = declared(
        "launch.data_parallel_shard",
        Kind.COUNT,
        "--data-parallel-shard",
        "ranks that share one copy of the state (fsdp); default: all, or those of a node",
    )
    data_parallel_replicate: int | None = declared(
        "launch.data_parallel_replicate",
        Kind.COUNT,
        "--data-parallel-replicate",
        "copies of the state (fsdp); default: 1, or one on each node with fsdp-hybrid",
    )
    mixed_precision: MixedPrecision = declared(
        "launch.mixed_precision",
        Kind.ENUM,
        "--mixed-precision",
        "auto: bf16 from compute capability 8.0, else fp16; no on a CPU",
        default=MixedPrecision.AUTO,
    )
    accelerate_config: str | None = declared(
        "launch.accelerate_config",
        Kind.PATH,
        "--accelerate-config",
        "accelerate YAML of your own; it gives nodes and ranks too, where nothing else does",
        metavar="FILE",
    )
    deepspeed_config: str | None = declared(
        "launch.deepspeed_config",
        Kind.PATH,
        "--deepspeed-config",
        "DeepSpeed JSON of your own, taken as it is",
        metavar="FILE",
    )
    timeout_s: int | None = declared(
        "launch.timeout", Kind.SECONDS, "--timeout", "process-group timeout, as 30m"
    )
    rendezvous_timeout_s: int = declared(
        "launch.rendezvous_timeout",
        Kind.SECONDS,
        "--rendezvous-timeout",
        "how long nodes wait for each other at the start",
        default=600,
    )
    main_process_port: int | None = declared(
        "launch.main_process_port",
        Kind.COUNT,
        "--main-process-port",
        "port of the rendezvous; default: derived from the job",
    )
    threads_per_process: int | None = declared(
        "launch.threads_per_process",
        Kind.COUNT,
        "--threads-per-process",
        "OMP_NUM_THREADS; default: allocated CPUs by ranks",
    )
    max_restarts: int | None = declared(
        "launch.max_restarts",
        Kind.NUMBER,
        "--max-restarts",
        "restarts after failures; default: as long as each attempt saves a new checkpoint",
    )
    on_interrupt: OnInterrupt | None = declared(
        "launch.on_interrupt",
        Kind.ENUM,
        "--on-interrupt",
        "how to go on after the time limit, a preemption or a lost node; default: requeue, or stop "
        "with --no-requeue",
        choices=OnInterrupt,
    )
    hang_timeout_s: int = declared(
        "launch.hang_timeout",
        Kind.DURATION,
        "--hang-timeout",
        "restart when no step ends for so long, and 10 usual steps; 0: never",
        default=900,
    )
    silence_timeout_s: int = declared(
        "launch.silence_timeout",
        Kind.DURATION,
        "--silence-timeout",
        "restart when no rank has printed anything for so long; 0, the default: never",
        default=0,
    )
    world_contract: bool = declared(
        "launch.world_contract",
        Kind.FLAG,
        "--world-contract/--no-world-contract",
        "end the job when the ranks did not become one world",
        default=True,
    )
    python: str | None = declared(
        "launch.python", Kind.TEXT, "--python", "interpreter on the nodes; default: this one"
    )
    setup: tuple[str, ...] = declared(
        "launch.setup",
        Kind.TEXTS,
        "--setup",
        "run first on each node: a line of bash, or an environment as conda:NAME, venv:DIR",
        default=(),
        metavar="LINE",
    )

    network: Network = declared(
        "network.preset",
        Kind.ENUM,
        "--network",
        "preset of the network environment",
        default=Network.AUTO,
    )
    network_interface: str | None = declared(
        "network.interface",
        Kind.TEXT,
        "--network-interface",
        "socket interface; default: the one that routes to the other nodes",
    )
    port_range: str = declared(
        "network.port_range",
        Kind.TEXT,
        "--port-range",
        "ports on which the first node listens, for the agents and for the rendezvous",
        default="20000-29999",
        metavar="LOW-HIGH",
    )
    network_env: Mapping[str, str] = declared(
        "network.env", Kind.MAPPING, "", "further NCCL or fabric variables", default=()
    )
    log_spool_bytes: int = declared(
        "logs.spool",
        Kind.BYTES,
        "",
        "what a node keeps of its logs while the run directory can't be written",
        default=1 << 30,
    )
    log_lines_per_s: int | None = declared(
        "logs.max_lines_per_s",
        Kind.COUNT,
        "",
        "lines a second kept of each rank; default: all, above 64 nodes 2000",
    )
    log_line_bytes: int | None = declared(
        "logs.max_line", Kind.BYTES, "", "bytes kept of each line; default: all"
    )
    env: Mapping[str, str] = declared(
        "env", Kind.MAPPING, "--env", "variable for the ranks", default=(), metavar="NAME=VALUE"
    )
    pass_env: tuple[str, ...] = declared(
        "pass_env",
        Kind.TEXTS,
        "--pass-env",
        "variable to hand on by name, never written down (for tokens and keys)",
        default=(),
        group="env",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        for field in FIELDS:
            value = getattr(self, field.name)
            check_type(field, value)
            if field.kind is Kind.MAPPING:
                object.__setattr__(self, field.name, dict(value))
            elif field.kind is Kind.TEXTS:
                object.__setattr__(self, field.name, tuple(value))
            check_value(field, getattr(self, field.name), label=field.name)


def _declared() -> tuple[Field, ...]:
    facts = dataclasses.fields(Training)
    own = dataclasses.fields(JobSpec)[len(facts) :]
    return tuple(
        Field(name=field.name, default=field.default, **field.metadata) for field in (*own, *facts)
    )


FIELDS: tuple[Field, ...] = _declared()
