"""The settings of a job: one frozen record, and one table with a row for each of its fields.

The YAML loader, the environment reader, the command line, its help and completion, and the
reference read the rows (`FIELDS`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from clusterrun.config.choices import (
    Cluster,
    Device,
    GpuRequest,
    Launcher,
    LrRule,
    MixedPrecision,
    Network,
    OnInterrupt,
    Optimizer,
    Preflight,
    Stage,
    Starter,
    Strategy,
)
from clusterrun.config.fields import Field, Kind, check_type, check_value

# Each group of the help and its settings:
# key [= field of JobSpec] | kind [METAVAR] | options | common: in the short help | meaning
# Options in parentheses were removed: the error names the --set that replaces them.
_TABLE: Final = """\
[job]
script | path | | | run this training script
module | text | -m --module | common | run a module, as python -m does
args | texts | | | pass these arguments to the script
name | text | -J --job-name | common | name the job  [default: the script]
cluster | enum | --cluster | common |
  run on Slurm, on this machine, on hosts over ssh, or in an allocation that you are in; auto uses
  Slurm if sbatch is found, else this machine
run_dir | path | --run-dir | |
  keep runs in this directory; on Slurm the nodes must share it  [default: runs]
[hosts]
hosts | texts HOST,... | --hosts | |
  run on these hosts, e.g. gpu1,user@gpu2:2222 or gpu[1-4] (ssh, allocation)
hostfile | path FILE | --hostfile | |
  read the hosts from a file: one on each line, as gpu1 or gpu1 slots=4
wait_for_hosts = wait_for_hosts_s | duration | (--wait-for-hosts) | |
  wait this long for a lost host to return; 0 stops the run at once  [default: 10m]
hosts_dir | text DIR | (--hosts-dir) | |
  keep runs in this directory on hosts that do not share the run directory  [default: ~/clusterrun]
starter | enum | (--starter) | | start processes in an allocation with this program  [default: auto]
[slurm]
slurm.nodes | count | -N --nodes | common | run on this many nodes  [default: 1]
slurm.gpus_per_node | number | --gpus-per-node | common |
  request this many GPUs on each node, one rank each; a100:4 also sets the type
slurm.gpu_type | text | (--gpu-type) | | request GPUs of this type, e.g. a100
slurm.gpu_request | enum | (--gpu-request) | |
  request GPUs with this sbatch option  [default: gpus-per-node]
slurm.cpus_per_task | count | -c --cpus-per-task | common | request this many CPUs on each node
slurm.cpus_per_gpu | count | (--cpus-per-gpu) | | request this many CPUs for each GPU
slurm.mem | text | --mem | common | request this much memory on each node, e.g. 200G
slurm.mem_per_gpu | text | (--mem-per-gpu) | | request this much memory for each GPU, e.g. 60G
slurm.mem_per_cpu | text | (--mem-per-cpu) | | request this much memory for each CPU, e.g. 4G
slurm.exclusive | flag | (--exclusive) | | do not share the nodes with other jobs
slurm.time = time_minutes | minutes | -t --time | common |
  limit the run time, e.g. 90 (minutes), 12h, 1:30:00 or 2-00:00:00
slurm.time_min = time_min_minutes | minutes | (--time-min) | |
  accept a shorter time limit, down to this, to start earlier
slurm.partition | text | -p --partition | common | submit to this partition
slurm.account | text | -A --account | common | charge this account
slurm.qos | text | -q --qos | common | request this quality of service
slurm.constraint | text | -C --constraint | common | require these node features, e.g. a100|h100
slurm.nodelist | text | -w --nodelist | | use these nodes, e.g. node[01-04]
slurm.exclude | text | -x --exclude | | avoid these nodes, e.g. node[07,12]
slurm.reservation | text | (--reservation) | | run in this reservation
slurm.dependency | text | (-d --dependency) | | start after other jobs, e.g. afterok:4711
slurm.begin | text | (-b --begin) | | start no earlier than this, e.g. 20:00 or now+2hours
slurm.deadline | text | (--deadline) | |
  remove the job if it cannot end by this time, e.g. 2026-08-01T06:00
slurm.hold | flag | (-H --hold) | | submit the job in held state
slurm.requeue | flag | (--requeue/--no-requeue) | |
  let Slurm requeue the job after a preemption or a node failure  [default: yes]
slurm.signal | text | (--signal) | | send USR1 or USR2 before the time limit, e.g. B:USR2@300
slurm.spare_nodes | number | (--spare-nodes) | |
  allocate extra nodes that replace lost ones  [default: 0]
slurm.switches | text | (--switches) | |
  limit the number of leaf switches, e.g. 1@60 (wait up to 60 minutes)
slurm.clusters | text | (-M --clusters) | | submit to this Slurm cluster, if there are several
slurm.comment | text | (--comment) | | attach a comment to the job
slurm.mail_type | text | (--mail-type) | | send mail on these events, e.g. END,FAIL
slurm.mail_user | text | (--mail-user) | | send mail to this address
slurm.extra = sbatch_args | texts OPTION | --sbatch-arg | |
  pass any other option to sbatch, e.g. --sbatch-arg=--nice=100 (repeatable)
slurm.srun_extra = srun_args | texts OPTION | --srun-arg | |
  pass any other option to srun, e.g. --srun-arg=--container-image=IMAGE (repeatable)
[launch]
launch.nproc_per_node | count | --nproc-per-node | |
  start this many ranks on each node  [default: one per GPU, else 1]
launch.device | enum | --device | common | compute on this device  [default: auto]
launch.gpu_ids | text | --gpu-ids | | use these GPUs of this machine, e.g. 0,2 (local runs)
launch.strategy | enum | --strategy | common |
  distribute the model with this strategy  [default: ddp]
launch.tensor_parallel | count | (--tensor-parallel) | |
  split each layer over this many ranks (fsdp; with ddp, all ranks)
launch.context_parallel | count | (--context-parallel) | |
  split each sample over this many ranks with ring attention (fsdp)
launch.sequence_parallel | count | (--sequence-parallel) | |
  split each sample over this many ranks with Ulysses (zero2, zero3)
launch.data_parallel_shard | count | (--data-parallel-shard) | |
  shard each copy of the state over this many ranks (fsdp)  [default: all; fsdp-hybrid: those of a
  node]
launch.data_parallel_replicate | count | (--data-parallel-replicate) | |
  keep this many copies of the state (fsdp)  [default: 1; fsdp-hybrid: one per node]
launch.mixed_precision | enum | --mixed-precision | common |
  compute in this precision; auto: bf16 if supported, else fp16; no on CPUs
launch.accelerate_config | path FILE | --accelerate-config | |
  use your own accelerate YAML; options still override its nodes and ranks
launch.deepspeed_config | path FILE | --deepspeed-config | |
  use your own DeepSpeed JSON, unchanged
launch.timeout = timeout_s | seconds | --timeout | |
  set the process-group timeout, e.g. 30m or 1800 (seconds)
launch.rendezvous_timeout = rendezvous_timeout_s | seconds | (--rendezvous-timeout) | |
  wait this long for all nodes to join  [default: 10m]
launch.main_process_port | count | (--main-process-port) | |
  use this port for the rendezvous  [default: derived from the job id]
launch.threads_per_process | count | (--threads-per-process) | |
  set OMP_NUM_THREADS  [default: allocated CPUs / ranks]
launch.max_restarts | number | --max-restarts | |
  restart at most this many times  [default: while each attempt saves a new checkpoint]
launch.on_interrupt | enum | --on-interrupt | |
  continue this way after the time limit, a preemption or a lost node  [default: requeue; stop with
  --no-requeue]
launch.preflight | enum | (--preflight) | |
  check each node before the ranks start, and warn or start without a node that fails  [default:
  warn]
launch.launcher | enum | (--launcher) | |
  start the ranks as forks of a process that has imported torch (forge), as new interpreters
  (direct) or by accelerate launch  [default: auto]
launch.hang_timeout = hang_timeout_s | duration | --hang-timeout | |
  restart when no step ends for this long or, if longer, for the time of ten steps; 0 disables it
  [default: 15m]
launch.world_contract | flag | (--world-contract/--no-world-contract) | |
  fail the job if its ranks do not form one world  [default: yes]
launch.trainer_resume | flag | (--trainer-resume/--no-trainer-resume) | |
  have Trainer.train() continue from the newest checkpoint of this run  [default: yes]
launch.python | text | --python | | run this interpreter on the nodes  [default: this one]
launch.setup | texts LINE | --setup | common |
  run this first on each node: a line of bash, conda:NAME or venv:DIR (repeatable)
launch.stage | enum | (--stage) | |
  copy the environment as one file to the disk of each node (Slurm); auto: if it is on a shared file
  system and the job has several nodes  [default: off]
launch.stage_dir | text DIR | | |
  keep these copies in this directory of each node  [default: $TMPDIR, or /tmp]
[network]
network.preset = network | enum | (--network) | |
  apply the NCCL settings for this network  [default: auto]
network.interface = network_interface | text | (--network-interface) | |
  use this network interface  [default: the one that routes to the other nodes]
network.port_range | text LOW-HIGH | (--port-range) | |
  listen on ports in this range  [default: 20000-29999]
network.env = network_env | mapping | | | set additional NCCL or fabric variables
[logs]
logs.spool = log_spool_bytes | bytes | | |
  buffer this much output per node while the run directory is not writable
logs.max_lines_per_s = log_lines_per_s | count | | |
  keep up to this many lines per rank and second  [default: all; 2000 above 64 nodes]
[env]
env | mapping NAME=VALUE | --env | common | set a variable for the ranks (repeatable)
pass_env | texts NAME | --pass-env | common |
  pass a variable of your shell by name; its value is not stored (repeatable)
[training]
training.model | text | --model | common |
  estimate this model: a known name (qwen3-8b), a config.json or its directory
training.params | real | --params | common | set the number of parameters, e.g. 8.03B
training.active_params | real | --active-params | |
  set the number of parameters active per token (mixture of experts)
training.hidden | count | --hidden | | set the hidden size
training.layers | count | --layers | | set the number of layers
training.heads | count | --heads | | set the number of attention heads
training.kv_heads | count | --kv-heads | | set the number of key-value heads
training.ffn | count | --ffn | | set the feed-forward size
training.vocab | count | --vocab | | set the vocabulary size
training.samples | count | --samples | common | set the number of samples in the dataset, e.g. 1.2M
training.tokens | real | --tokens | | set the number of tokens in the dataset, instead of --samples
training.seq_len | count | --seq-len | common |
  set the number of tokens per sample, e.g. 4096 (4k is 4000)
training.micro_batch | count | --micro-batch | common |
  set the number of samples per rank and forward pass
training.accumulation | count | --accumulation --accum | common |
  accumulate gradients over this many passes  [default: 1, or set by --effective-batch]
training.effective_batch | count | --effective-batch | common |
  set the number of samples per optimizer step, over all ranks
training.epochs | real | --epochs | common | train for this many epochs
training.max_steps | count | --max-steps | common | train for this many optimizer steps
training.optimizer | enum | --optimizer | common | use this optimizer  [default: adamw]
training.lora | number | --lora | common | train LoRA adapters of this rank; 0 trains all weights
training.load_in_4bit | flag | --load-in-4bit/--no-load-in-4bit | |
  keep the frozen weights in 4 bits, with --lora (QLoRA)
training.grad_ckpt | flag | --grad-ckpt/--no-grad-ckpt | common |
  recompute activations instead of keeping them
training.lr | real | --lr | common | scale this learning rate to the batch
training.base_batch | count | --base-batch | | set the effective batch that --lr was chosen for
training.lr_rule | enum | --lr-rule | | scale the learning rate by this rule  [default: linear]
training.gpu | text | --gpu | common | estimate for this GPU, e.g. h100-80g or rtx4090
training.gpu_price | texts GPU=PRICE | --gpu-price | |
  set the price of a GPU-hour, e.g. h100-80g=2.5 (repeatable)
training.gpu_mem = gpu_mem_bytes | bytes | --gpu-mem | | set the memory of each GPU, e.g. 24GiB
training.host_mem = host_mem_bytes | bytes | --host-mem | |
  set the memory of each node  [default: --mem]
training.intra_node_bandwidth | real GB/s | --intra-node-bandwidth | |
  set the bandwidth between GPUs of a node (busbw of nccl-tests)  [default: by GPU]
training.inter_node_bandwidth | real GB/s | --inter-node-bandwidth | |
  set the bandwidth of all network cards of a node, e.g. 400 for 8 x 400 Gb/s  [default: by GPU and
  --network]
training.mfu | real | --mfu | |
  set the share of peak FLOPS that a fully used GPU reaches  [default: 0.4]
training.step_time = step_time_s | real | --step-time | |
  set the measured time of an optimizer step, e.g. 4.5s
training.save_every | count | --save-every | | save a checkpoint every N steps
training.keep | count | --keep | | keep this many checkpoints
training.keep_best | count | --keep-best | | also keep the N best checkpoints, weights only
training.planned | flag | | |
  pass the planned batch and checkpointing to the ranks; submit --plan sets it
"""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The settings of a job; None means not set. Those of the training are for estimates and notes.

    Raises UsageError on construction for an invalid value.
    """

    script: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()
    name: str | None = None
    cluster: Cluster = Cluster.AUTO
    run_dir: str = "runs"
    hosts: tuple[str, ...] = ()
    hostfile: str | None = None
    wait_for_hosts_s: int = 600
    hosts_dir: str = "~/clusterrun"
    starter: Starter = Starter.AUTO
    nodes: int | None = None
    gpus_per_node: int | None = None
    gpu_type: str | None = None
    gpu_request: GpuRequest = GpuRequest.GPUS_PER_NODE
    cpus_per_task: int | None = None
    cpus_per_gpu: int | None = None
    mem: str | None = None
    mem_per_gpu: str | None = None
    mem_per_cpu: str | None = None
    exclusive: bool = False
    time_minutes: int | None = None
    time_min_minutes: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    dependency: str | None = None
    begin: str | None = None
    deadline: str | None = None
    hold: bool = False
    requeue: bool = True
    signal: str | None = None
    spare_nodes: int = 0
    switches: str | None = None
    clusters: str | None = None
    comment: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    sbatch_args: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    nproc_per_node: int | None = None
    device: Device = Device.AUTO
    gpu_ids: str | None = None
    strategy: Strategy = Strategy.DDP
    tensor_parallel: int | None = None
    context_parallel: int | None = None
    sequence_parallel: int | None = None
    data_parallel_shard: int | None = None
    data_parallel_replicate: int | None = None
    mixed_precision: MixedPrecision = MixedPrecision.AUTO
    accelerate_config: str | None = None
    deepspeed_config: str | None = None
    timeout_s: int | None = None
    rendezvous_timeout_s: int = 600
    main_process_port: int | None = None
    threads_per_process: int | None = None
    max_restarts: int | None = None
    on_interrupt: OnInterrupt | None = None
    preflight: Preflight = Preflight.WARN
    launcher: Launcher = Launcher.AUTO
    hang_timeout_s: int = 900
    world_contract: bool = True
    trainer_resume: bool = True
    python: str | None = None
    setup: tuple[str, ...] = ()
    stage: Stage = Stage.OFF
    stage_dir: str | None = None
    network: Network = Network.AUTO
    network_interface: str | None = None
    port_range: str = "20000-29999"
    network_env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    log_spool_bytes: int = 1 << 30
    log_lines_per_s: int | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pass_env: tuple[str, ...] = ()
    model: str | None = None
    params: float | None = None
    active_params: float | None = None
    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    samples: int | None = None
    tokens: float | None = None
    seq_len: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    effective_batch: int | None = None
    epochs: float | None = None
    max_steps: int | None = None
    optimizer: Optimizer | None = None
    lora: int | None = None
    load_in_4bit: bool | None = None
    grad_ckpt: bool | None = None
    lr: float | None = None
    base_batch: int | None = None
    lr_rule: LrRule | None = None
    gpu: str | None = None
    gpu_price: tuple[str, ...] = ()
    gpu_mem_bytes: int | None = None
    host_mem_bytes: int | None = None
    intra_node_bandwidth: float | None = None
    inter_node_bandwidth: float | None = None
    mfu: float | None = None
    step_time_s: float | None = None
    save_every: int | None = None
    keep: int | None = None
    keep_best: int | None = None
    planned: bool | None = None

    def __post_init__(self) -> None:
        for field in FIELDS:
            value = getattr(self, field.name)
            check_type(field, value)
            if field.kind is Kind.MAPPING:
                object.__setattr__(self, field.name, dict(value))
            elif field.kind is Kind.TEXTS:
                object.__setattr__(self, field.name, tuple(value))
            check_value(field, getattr(self, field.name), label=field.name)

    @property
    def names_model(self) -> bool:
        """Return whether there is a model to estimate."""
        return self.model is not None or self.params is not None or self.hidden is not None


_CHOICES: Final[Mapping[str, type[Enum]]] = {
    "on_interrupt": OnInterrupt,
    "optimizer": Optimizer,
    "lr_rule": LrRule,
}


def _rows() -> Iterator[Field]:
    """Read the table."""
    defaults = {field.name: field.default for field in dataclasses.fields(JobSpec)}
    group = ""
    for line in re.sub(r"\n +", " ", _TABLE).splitlines():
        if line.startswith("["):
            group = line[1:-1]
            continue
        names, kind, flags, marks, text = map(str.strip, line.split("|", 4))
        key, _, name = names.partition(" = ")
        name = name or key.rpartition(".")[2]
        default: Any = {} if kind.startswith("mapping") else defaults[name]
        yield Field(
            name=name,
            key=key,
            kind=Kind(kind.split()[0]),
            flags=() if flags.startswith("(") else tuple(flags.split()),
            former=tuple(flags[1:-1].split()) if flags.startswith("(") else (),
            group=group,
            help=re.sub(r" +\[default", "  [default", text),
            default=default,
            choices=type(default) if isinstance(default, Enum) else _CHOICES.get(name),
            metavar=kind.partition(" ")[2] or None,
            is_common=marks == "common",
        )


FIELDS: Final = tuple(_rows())
