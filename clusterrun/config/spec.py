"""The settings of a job: one frozen record that declares each field once.

The YAML loader, the environment reader and the command line read the metadata of the fields
(`FIELDS`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from clusterrun.config.choices import (
    Cluster,
    Device,
    GpuRequest,
    Launcher,
    MixedPrecision,
    Network,
    OnInterrupt,
    Preflight,
    Stage,
    Starter,
    Strategy,
)
from clusterrun.config.fields import Field, Kind, check_type, check_value, declared
from clusterrun.config.training import Training

__all__ = [
    "FIELDS",
    "Cluster",
    "Device",
    "GpuRequest",
    "JobSpec",
    "Launcher",
    "MixedPrecision",
    "Network",
    "OnInterrupt",
    "Preflight",
    "Stage",
    "Starter",
    "Strategy",
]


@dataclass(frozen=True, kw_only=True)
class JobSpec(Training):
    """The settings of a job; None means not set.

    Raises UsageError on construction for an invalid value.
    """

    script: str | None = declared("script", Kind.PATH, "", "run this training script", group="job")
    module: str | None = declared(
        "module",
        Kind.TEXT,
        "-m --module",
        "run a module, as python -m does",
        group="job",
        common=True,
    )
    args: tuple[str, ...] = declared(
        "args", Kind.TEXTS, "", "pass these arguments to the script", default=(), group="job"
    )
    name: str | None = declared(
        "name",
        Kind.TEXT,
        "-J --job-name",
        "name the job  [default: the script]",
        group="job",
        common=True,
    )
    cluster: Cluster = declared(
        "cluster",
        Kind.ENUM,
        "--cluster",
        "run on Slurm, on this machine, on hosts over ssh, or in an allocation that you are in; "
        "auto uses Slurm if sbatch is found, else this machine",
        default=Cluster.AUTO,
        group="job",
        common=True,
    )
    run_dir: str = declared(
        "run_dir",
        Kind.PATH,
        "--run-dir",
        "keep runs in this directory; on Slurm the nodes must share it  [default: runs]",
        default="runs",
        group="job",
        estimated=True,
    )

    hosts: tuple[str, ...] = declared(
        "hosts",
        Kind.TEXTS,
        "--hosts",
        "run on these hosts, e.g. gpu1,user@gpu2:2222 or gpu[1-4] (ssh, allocation)",
        default=(),
        group="hosts",
        metavar="HOST,...",
    )
    hostfile: str | None = declared(
        "hostfile",
        Kind.PATH,
        "--hostfile",
        "read the hosts from a file: one on each line, as gpu1 or gpu1 slots=4",
        group="hosts",
        metavar="FILE",
    )
    wait_for_hosts_s: int = declared(
        "wait_for_hosts",
        Kind.DURATION,
        "--wait-for-hosts",
        "wait this long for a lost host to return; 0 stops the run at once  [default: 10m]",
        default=600,
        group="hosts",
    )
    hosts_dir: str = declared(
        "hosts_dir",
        Kind.TEXT,
        "--hosts-dir",
        "keep runs in this directory on hosts that do not share the run directory  "
        "[default: ~/clusterrun]",
        default="~/clusterrun",
        group="hosts",
        metavar="DIR",
    )
    starter: Starter = declared(
        "starter",
        Kind.ENUM,
        "--starter",
        "start processes in an allocation with this program  [default: auto]",
        default=Starter.AUTO,
        group="hosts",
    )

    nodes: int | None = declared(
        "slurm.nodes",
        Kind.COUNT,
        "-N --nodes",
        "run on this many nodes  [default: 1]",
        common=True,
        estimated=True,
    )
    gpus_per_node: int | None = declared(
        "slurm.gpus_per_node",
        Kind.NUMBER,
        "--gpus-per-node",
        "request this many GPUs on each node, one rank each; a100:4 also sets the type",
        common=True,
        estimated=True,
    )
    gpu_type: str | None = declared(
        "slurm.gpu_type",
        Kind.TEXT,
        "--gpu-type",
        "request GPUs of this type, e.g. a100",
        estimated=True,
    )
    gpu_request: GpuRequest = declared(
        "slurm.gpu_request",
        Kind.ENUM,
        "--gpu-request",
        "request GPUs with this sbatch option  [default: gpus-per-node]",
        default=GpuRequest.GPUS_PER_NODE,
    )
    cpus_per_task: int | None = declared(
        "slurm.cpus_per_task",
        Kind.COUNT,
        "-c --cpus-per-task",
        "request this many CPUs on each node",
        common=True,
        estimated=True,
    )
    cpus_per_gpu: int | None = declared(
        "slurm.cpus_per_gpu",
        Kind.COUNT,
        "--cpus-per-gpu",
        "request this many CPUs for each GPU",
        estimated=True,
    )
    mem: str | None = declared(
        "slurm.mem",
        Kind.TEXT,
        "--mem",
        "request this much memory on each node, e.g. 200G",
        common=True,
        estimated=True,
    )
    mem_per_gpu: str | None = declared(
        "slurm.mem_per_gpu",
        Kind.TEXT,
        "--mem-per-gpu",
        "request this much memory for each GPU, e.g. 60G",
        estimated=True,
    )
    mem_per_cpu: str | None = declared(
        "slurm.mem_per_cpu",
        Kind.TEXT,
        "--mem-per-cpu",
        "request this much memory for each CPU, e.g. 4G",
        estimated=True,
    )
    exclusive: bool = declared(
        "slurm.exclusive",
        Kind.FLAG,
        "--exclusive",
        "do not share the nodes with other jobs",
        default=False,
    )
    time_minutes: int | None = declared(
        "slurm.time",
        Kind.MINUTES,
        "-t --time",
        "limit the run time, e.g. 90 (minutes), 12h, 1:30:00 or 2-00:00:00",
        common=True,
        estimated=True,
    )
    time_min_minutes: int | None = declared(
        "slurm.time_min",
        Kind.MINUTES,
        "--time-min",
        "accept a shorter time limit, down to this, to start earlier",
    )
    partition: str | None = declared(
        "slurm.partition", Kind.TEXT, "-p --partition", "submit to this partition", common=True
    )
    account: str | None = declared(
        "slurm.account", Kind.TEXT, "-A --account", "charge this account", common=True
    )
    qos: str | None = declared(
        "slurm.qos", Kind.TEXT, "-q --qos", "request this quality of service", common=True
    )
    constraint: str | None = declared(
        "slurm.constraint",
        Kind.TEXT,
        "-C --constraint",
        "require these node features, e.g. a100|h100",
        common=True,
    )
    nodelist: str | None = declared(
        "slurm.nodelist", Kind.TEXT, "-w --nodelist", "use these nodes, e.g. node[01-04]"
    )
    exclude: str | None = declared(
        "slurm.exclude", Kind.TEXT, "-x --exclude", "avoid these nodes, e.g. node[07,12]"
    )
    reservation: str | None = declared(
        "slurm.reservation", Kind.TEXT, "--reservation", "run in this reservation"
    )
    dependency: str | None = declared(
        "slurm.dependency",
        Kind.TEXT,
        "-d --dependency",
        "start after other jobs, e.g. afterok:4711",
    )
    begin: str | None = declared(
        "slurm.begin",
        Kind.TEXT,
        "-b --begin",
        "start no earlier than this, e.g. 20:00 or now+2hours",
    )
    deadline: str | None = declared(
        "slurm.deadline",
        Kind.TEXT,
        "--deadline",
        "remove the job if it cannot end by this time, e.g. 2026-08-01T06:00",
    )
    hold: bool = declared(
        "slurm.hold", Kind.FLAG, "-H --hold", "submit the job in held state", default=False
    )
    requeue: bool = declared(
        "slurm.requeue",
        Kind.FLAG,
        "--requeue/--no-requeue",
        "let Slurm requeue the job after a preemption or a node failure  [default: yes]",
        default=True,
    )
    signal: str | None = declared(
        "slurm.signal",
        Kind.TEXT,
        "--signal",
        "send USR1 or USR2 before the time limit, e.g. B:USR2@300",
    )
    spare_nodes: int = declared(
        "slurm.spare_nodes",
        Kind.NUMBER,
        "--spare-nodes",
        "allocate extra nodes that replace lost ones  [default: 0]",
        default=0,
    )
    switches: str | None = declared(
        "slurm.switches",
        Kind.TEXT,
        "--switches",
        "limit the number of leaf switches, e.g. 1@60 (wait up to 60 minutes)",
    )
    clusters: str | None = declared(
        "slurm.clusters",
        Kind.TEXT,
        "-M --clusters",
        "submit to this Slurm cluster, if there are several",
    )
    comment: str | None = declared(
        "slurm.comment", Kind.TEXT, "--comment", "attach a comment to the job"
    )
    mail_type: str | None = declared(
        "slurm.mail_type", Kind.TEXT, "--mail-type", "send mail on these events, e.g. END,FAIL"
    )
    mail_user: str | None = declared(
        "slurm.mail_user", Kind.TEXT, "--mail-user", "send mail to this address"
    )
    sbatch_args: tuple[str, ...] = declared(
        "slurm.extra",
        Kind.TEXTS,
        "--sbatch-arg",
        "pass any other option to sbatch, e.g. --sbatch-arg=--nice=100 (repeatable)",
        default=(),
        metavar="OPTION",
    )
    srun_args: tuple[str, ...] = declared(
        "slurm.srun_extra",
        Kind.TEXTS,
        "--srun-arg",
        "pass any other option to srun, e.g. --srun-arg=--container-image=IMAGE (repeatable)",
        default=(),
        metavar="OPTION",
    )

    nproc_per_node: int | None = declared(
        "launch.nproc_per_node",
        Kind.COUNT,
        "--nproc-per-node",
        "start this many ranks on each node  [default: one per GPU, else 1]",
        estimated=True,
    )
    device: Device = declared(
        "launch.device",
        Kind.ENUM,
        "--device",
        "compute on this device  [default: auto]",
        default=Device.AUTO,
        common=True,
    )
    gpu_ids: str | None = declared(
        "launch.gpu_ids",
        Kind.TEXT,
        "--gpu-ids",
        "use these GPUs of this machine, e.g. 0,2 (local runs)",
    )
    strategy: Strategy = declared(
        "launch.strategy",
        Kind.ENUM,
        "--strategy",
        "distribute the model with this strategy  [default: ddp]",
        default=Strategy.DDP,
        common=True,
        estimated=True,
    )
    tensor_parallel: int | None = declared(
        "launch.tensor_parallel",
        Kind.COUNT,
        "--tensor-parallel",
        "split each layer over this many ranks (fsdp; with ddp, all ranks)",
        estimated=True,
    )
    context_parallel: int | None = declared(
        "launch.context_parallel",
        Kind.COUNT,
        "--context-parallel",
        "split each sample over this many ranks with ring attention (fsdp)",
        estimated=True,
    )
    sequence_parallel: int | None = declared(
        "launch.sequence_parallel",
        Kind.COUNT,
        "--sequence-parallel",
        "split each sample over this many ranks with Ulysses (zero2, zero3)",
        estimated=True,
    )
    data_parallel_shard: int | None = declared(
        "launch.data_parallel_shard",
        Kind.COUNT,
        "--data-parallel-shard",
        "shard each copy of the state over this many ranks (fsdp)  "
        "[default: all; fsdp-hybrid: those of a node]",
        estimated=True,
    )
    data_parallel_replicate: int | None = declared(
        "launch.data_parallel_replicate",
        Kind.COUNT,
        "--data-parallel-replicate",
        "keep this many copies of the state (fsdp)  [default: 1; fsdp-hybrid: one per node]",
        estimated=True,
    )
    mixed_precision: MixedPrecision = declared(
        "launch.mixed_precision",
        Kind.ENUM,
        "--mixed-precision",
        "compute in this precision; auto: bf16 if supported, else fp16; no on CPUs",
        default=MixedPrecision.AUTO,
        common=True,
        estimated=True,
    )
    accelerate_config: str | None = declared(
        "launch.accelerate_config",
        Kind.PATH,
        "--accelerate-config",
        "use your own accelerate YAML; options still override its nodes and ranks",
        metavar="FILE",
        estimated=True,
    )
    deepspeed_config: str | None = declared(
        "launch.deepspeed_config",
        Kind.PATH,
        "--deepspeed-config",
        "use your own DeepSpeed JSON, unchanged",
        metavar="FILE",
        estimated=True,
    )
    timeout_s: int | None = declared(
        "launch.timeout",
        Kind.SECONDS,
        "--timeout",
        "set the process-group timeout, e.g. 30m or 1800 (seconds)",
    )
    rendezvous_timeout_s: int = declared(
        "launch.rendezvous_timeout",
        Kind.SECONDS,
        "--rendezvous-timeout",
        "wait this long for all nodes to join  [default: 10m]",
        default=600,
    )
    main_process_port: int | None = declared(
        "launch.main_process_port",
        Kind.COUNT,
        "--main-process-port",
        "use this port for the rendezvous  [default: derived from the job id]",
    )
    threads_per_process: int | None = declared(
        "launch.threads_per_process",
        Kind.COUNT,
        "--threads-per-process",
        "set OMP_NUM_THREADS  [default: allocated CPUs / ranks]",
    )
    max_restarts: int | None = declared(
        "launch.max_restarts",
        Kind.NUMBER,
        "--max-restarts",
        "restart at most this many times  [default: while each attempt saves a new checkpoint]",
    )
    on_interrupt: OnInterrupt | None = declared(
        "launch.on_interrupt",
        Kind.ENUM,
        "--on-interrupt",
        "continue this way after the time limit, a preemption or a lost node  "
        "[default: requeue; stop with --no-requeue]",
        choices=OnInterrupt,
    )
    preflight: Preflight = declared(
        "launch.preflight",
        Kind.ENUM,
        "--preflight",
        "check each node before the ranks start, and warn or start without a node that fails  "
        "[default: warn]",
        default=Preflight.WARN,
        choices=Preflight,
    )
    launcher: Launcher = declared(
        "launch.launcher",
        Kind.ENUM,
        "--launcher",
        "start the ranks as forks of a process that has imported torch (forge), as new "
        "interpreters (direct) or by accelerate launch  [default: auto]",
        default=Launcher.AUTO,
        choices=Launcher,
    )
    preload: tuple[str, ...] = declared(
        "launch.preload",
        Kind.TEXTS,
        "--preload",
        "import this installed module before the ranks are forked; auto stands for the "
        "installed modules that the script imports (repeatable)",
        default=(),
        metavar="MODULE",
    )
    hang_timeout_s: int = declared(
        "launch.hang_timeout",
        Kind.DURATION,
        "--hang-timeout",
        "restart when no step ends for this long or, if longer, for the time of ten steps; 0 "
        "disables it  [default: 15m]",
        default=900,
    )
    silence_timeout_s: int = declared(
        "launch.silence_timeout",
        Kind.DURATION,
        "--silence-timeout",
        "restart when no rank prints anything for this long; 0 disables it  [default: 0]",
        default=0,
    )
    world_contract: bool = declared(
        "launch.world_contract",
        Kind.FLAG,
        "--world-contract/--no-world-contract",
        "fail the job if its ranks do not form one world  [default: yes]",
        default=True,
    )
    trainer_resume: bool = declared(
        "launch.trainer_resume",
        Kind.FLAG,
        "--trainer-resume/--no-trainer-resume",
        "have Trainer.train() continue from the newest checkpoint of this run  [default: yes]",
        default=True,
    )
    health_command: str | None = declared(
        "launch.health_command",
        Kind.TEXT,
        "--health-command",
        "adopt the verdict of this command on a node, by its exit status or JSON",
        metavar="COMMAND",
    )
    python: str | None = declared(
        "launch.python",
        Kind.TEXT,
        "--python",
        "run this interpreter on the nodes  [default: this one]",
    )
    setup: tuple[str, ...] = declared(
        "launch.setup",
        Kind.TEXTS,
        "--setup",
        "run this first on each node: a line of bash, conda:NAME or venv:DIR (repeatable)",
        default=(),
        metavar="LINE",
        common=True,
    )
    stage: Stage = declared(
        "launch.stage",
        Kind.ENUM,
        "--stage",
        "copy the environment as one file to the disk of each node (Slurm); auto: if it is on a "
        "shared file system and the job has several nodes  [default: off]",
        default=Stage.OFF,
        choices=Stage,
    )
    stage_dir: str | None = declared(
        "launch.stage_dir",
        Kind.TEXT,
        "",
        "keep these copies in this directory of each node  [default: $TMPDIR, or /tmp]",
        metavar="DIR",
    )

    network: Network = declared(
        "network.preset",
        Kind.ENUM,
        "--network",
        "apply the NCCL settings for this network  [default: auto]",
        default=Network.AUTO,
        estimated=True,
    )
    network_interface: str | None = declared(
        "network.interface",
        Kind.TEXT,
        "--network-interface",
        "use this network interface  [default: the one that routes to the other nodes]",
    )
    port_range: str = declared(
        "network.port_range",
        Kind.TEXT,
        "--port-range",
        "listen on ports in this range  [default: 20000-29999]",
        default="20000-29999",
        metavar="LOW-HIGH",
    )
    network_env: Mapping[str, str] = declared(
        "network.env", Kind.MAPPING, "", "set additional NCCL or fabric variables", default=()
    )
    log_spool_bytes: int = declared(
        "logs.spool",
        Kind.BYTES,
        "",
        "buffer this much output per node while the run directory is not writable",
        default=1 << 30,
    )
    log_lines_per_s: int | None = declared(
        "logs.max_lines_per_s",
        Kind.COUNT,
        "",
        "keep up to this many lines per rank and second  [default: all; 2000 above 64 nodes]",
    )
    log_line_bytes: int | None = declared(
        "logs.max_line", Kind.BYTES, "", "keep up to this many bytes of each line  [default: all]"
    )
    env: Mapping[str, str] = declared(
        "env",
        Kind.MAPPING,
        "--env",
        "set a variable for the ranks (repeatable)",
        default=(),
        metavar="NAME=VALUE",
        common=True,
    )
    pass_env: tuple[str, ...] = declared(
        "pass_env",
        Kind.TEXTS,
        "--pass-env",
        "pass a variable of your shell by name; its value is not stored (repeatable)",
        default=(),
        group="env",
        metavar="NAME",
        common=True,
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
