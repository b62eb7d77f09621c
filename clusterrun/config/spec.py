"""The settings of a job: one frozen record, and one table with a row for each of its fields.

The YAML loader, the environment reader, the command line, its help and completion, and the
reference read the rows (`FIELDS`).
"""

from __future__ import annotations

import dataclasses
import functools
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
from clusterrun.shared.wording import nearest

# Each group of the help and its settings; of a group with a dot, all keys begin with its name:
# key [= field of JobSpec] | kind [METAVAR] | options | common: in the short help | meaning
_TABLE: Final = """\
[job]
script | path | | | run this training script
module | text | -m --module | common | run a module, as python -m does
args | texts | | | pass these arguments to the script
name | text | -J --job-name | common | name the job  [default: the script's name]
cluster | enum | --cluster | common |
  run on Slurm, on this machine, on hosts over ssh, or in an allocation that you are in
  [default: auto (slurm if sbatch is found, else local)]
run_dir | path | --run-dir | |
  keep runs in this directory; on Slurm, all nodes must share it  [default: runs]
[hosts]
hosts | texts HOST,... | --hosts | |
  run on these hosts, e.g. gpu1,user@gpu2:2222 or gpu[1-4] (ssh, allocation)
hostfile | path FILE | --hostfile | |
  read the hosts from a file with one host per line, e.g. gpu1 or gpu1 slots=4
wait_for_hosts = wait_for_hosts_s | duration | | |
  wait this long for a lost host to return; 0 stops the run at once  [default: 10m]
hosts_dir | text DIR | | |
  keep runs in this directory on hosts that do not share the run directory  [default: ~/clusterrun]
starter | enum | | | start processes in an allocation with this program  [default: auto]
[slurm.]
nodes | count | -N --nodes | common | run on this many nodes  [default: 1]
gpus_per_node | number | --gpus-per-node | common |
  request this many GPUs on each node, each for one rank; a100:4 also sets the type
gpu_type | text | | | request GPUs of this type, e.g. a100
gpu_request | enum | | | request GPUs with this sbatch option  [default: gpus-per-node]
cpus_per_task | count | -c --cpus-per-task | common | request this many CPUs on each node
cpus_per_gpu | count | | | request this many CPUs for each GPU
mem | text | --mem | common | request this much memory on each node, e.g. 200G
mem_per_gpu | text | | | request this much memory for each GPU, e.g. 60G
mem_per_cpu | text | | | request this much memory for each CPU, e.g. 4G
exclusive | flag | | | do not share the nodes with other jobs
time = time_minutes | minutes | -t --time | common |
  limit the run time, e.g. 90 (minutes), 12h, 1:30:00 or 2-00:00:00
time_min = time_min_minutes | minutes | | |
  let Slurm lower the time limit, but not below this, to start the job earlier
partition | text | -p --partition | common | submit to this partition
account | text | -A --account | common | charge this account
qos | text | -q --qos | common | request this quality of service
constraint | text | -C --constraint | common | require these node features, e.g. a100|h100
nodelist | text | -w --nodelist | | use these nodes, e.g. node[01-04]
exclude | text | -x --exclude | | avoid these nodes, e.g. node[07,12]
reservation | text | | | run in this reservation
dependency | text | | | start after other jobs, e.g. afterok:4711
begin | text | | | start no earlier than this, e.g. 20:00 or now+2hours
deadline | text | | | remove the job if it cannot end by this time, e.g. 2026-08-01T06:00
hold | flag | | | submit the job in a held state
requeue | flag | | | let Slurm requeue the job after a preemption or a node failure  [default: yes]
signal | text | | | send USR1 or USR2 before the time limit, e.g. B:USR2@300
spare_nodes | number | | | allocate extra nodes that replace lost ones  [default: 0]
switches | text | | | limit the number of leaf switches, e.g. 1@60 (wait up to 60 minutes)
clusters | text | | | submit to this Slurm cluster, if the site has several
comment | text | | | attach a comment to the job
mail_type | text | | | send mail on these events, e.g. END,FAIL
mail_user | text | | | send mail to this address
extra = sbatch_args | texts OPTION | --sbatch-arg | |
  pass any other option to sbatch, e.g. --sbatch-arg=--nice=100 (repeatable)
srun_extra = srun_args | texts OPTION | --srun-arg | |
  pass any other option to srun, e.g. --srun-arg=--container-image=IMAGE (repeatable)
[launch.]
nproc_per_node | count | --nproc-per-node | |
  start this many ranks on each node  [default: one per GPU, else 1]
device | enum | --device | common | compute on this device  [default: auto]
gpu_ids | text | --gpu-ids | | use these GPUs of this machine, e.g. 0,2 (local runs)
strategy | enum | --strategy | common | distribute the model with this strategy  [default: ddp]
tensor_parallel | count | | | split each layer over this many ranks (fsdp; ddp: only over all ranks)
context_parallel | count | | | split each sample over this many ranks with ring attention (fsdp)
sequence_parallel | count | | | split each sample over this many ranks with Ulysses (zero2, zero3)
data_parallel_shard | count | | |
  shard each copy of the state over this many ranks (fsdp)  [default: all; fsdp-hybrid: those of a
  node]
data_parallel_replicate | count | | |
  keep this many copies of the state (fsdp)  [default: 1; fsdp-hybrid: one per node]
mixed_precision | enum | --mixed-precision | common |
  compute in this precision; auto: bf16 if supported, else fp16; without CUDA: no
accelerate_config | path FILE | --accelerate-config | |
  use your own accelerate YAML; options still override its nodes and ranks
deepspeed_config | path FILE | --deepspeed-config | | use your own DeepSpeed JSON, unchanged
timeout = timeout_s | seconds | --timeout | |
  set the process-group timeout, e.g. 30m or 1800 (seconds)
rendezvous_timeout = rendezvous_timeout_s | seconds | | |
  wait this long for all nodes to join  [default: 10m]
main_process_port | count | | | use this port for the rendezvous  [default: derived from the job id]
threads_per_process | count | | | set OMP_NUM_THREADS  [default: allocated CPUs / ranks]
max_restarts | number | --max-restarts | |
  restart at most this many times  [default: while attempts save new checkpoints]
on_interrupt | enum | --on-interrupt | |
  choose how the run continues after the time limit, a preemption or the loss of a node  [default:
  requeue; stop if slurm.requeue is false]
preflight | enum | | |
  check each node before the ranks start; warn about a node that fails, or leave it out (enforce)
  [default: warn]
launcher | enum | | |
  start the ranks as forks of a process that has imported torch (forge), as new interpreters
  (direct) or with accelerate launch  [default: auto]
hang_timeout = hang_timeout_s | duration | --hang-timeout | |
  restart if no step ends for this long, or for ten usual steps if longer; 0: never  [default: 15m]
world_contract | flag | | | fail the job if its ranks do not form one world  [default: yes]
trainer_resume | flag | | |
  make Trainer.train() continue from the newest checkpoint of this run  [default: yes]
python | text | --python | |
  run this interpreter on the nodes  [default: that of the environment in setup, else clusterrun's]
setup | texts LINE | --setup | common |
  run this on each node before the ranks start: a line of bash, conda:NAME or venv:DIR (repeatable)
stage | enum | | |
  copy the Python environment to each node's disk before the ranks start (Slurm); auto: only from a
  shared file system and for several nodes  [default: off]
stage_dir | text DIR | | |
  keep the copies of the environment in this directory of each node  [default: $TMPDIR, or /tmp]
[network.]
preset = network | enum | | | apply the NCCL settings for this network  [default: auto]
interface = network_interface | text | | |
  use this network interface  [default: the one that leads to the other nodes]
port_range | text LOW-HIGH | | | listen on ports in this range  [default: 20000-29999]
env = network_env | mapping | | | set additional NCCL or fabric variables
[logs.]
spool = log_spool_bytes | bytes | | |
  buffer this much output per node while the node cannot write to the run directory
max_lines_per_s = log_lines_per_s | count | | |
  keep up to this many lines of each rank per second  [default: all; 2000 above 64 nodes]
[env]
env | mapping NAME=VALUE | --env | common | set a variable for the ranks (repeatable)
pass_env | texts NAME | --pass-env | common |
  pass a variable of your shell by name; its value is not stored (repeatable)
[training.]
model | text | --model | common |
  estimate this model: a known name (qwen3-8b), a config.json or its directory
params | real | --params | common | set the number of parameters, e.g. 8.03B
active_params | real | --active-params | |
  set the number of parameters active per token (mixture of experts)
hidden | count | --hidden | | set the hidden size
layers | count | --layers | | set the number of layers
heads | count | --heads | | set the number of attention heads
kv_heads | count | --kv-heads | | set the number of key-value heads
ffn | count | --ffn | | set the feed-forward size
vocab | count | --vocab | | set the vocabulary size
samples | count | --samples | common | set the number of samples in the dataset, e.g. 1.2M
tokens | real | --tokens | | set the number of tokens in the dataset, instead of --samples
seq_len | count | --seq-len | common | set the number of tokens per sample, e.g. 4096 (4k is 4000)
micro_batch | count | --micro-batch | common | set the number of samples per rank and forward pass
accumulation | count | --accumulation --accum | common |
  accumulate gradients over this many passes  [default: 1, or set by --effective-batch]
effective_batch | count | --effective-batch | common |
  set the number of samples per optimizer step, over all ranks
epochs | real | --epochs | common | assume that the script trains for this many epochs
max_steps | count | --max-steps | common | assume that the script takes this many optimizer steps
optimizer | enum | --optimizer | common | use this optimizer  [default: adamw]
lora | number | --lora | common | train LoRA adapters of this rank; 0 trains all weights
load_in_4bit | flag | --load-in-4bit/--no-load-in-4bit | |
  keep the frozen weights in 4 bits, with --lora (QLoRA)
grad_ckpt | flag | --grad-ckpt/--no-grad-ckpt | common |
  recompute activations instead of keeping them (gradient checkpointing)
lr | real | --lr | common | scale this learning rate to the effective batch
base_batch | count | --base-batch | | set the effective batch for which --lr was chosen
lr_rule | enum | --lr-rule | | scale the learning rate by this rule  [default: linear]
gpu | text | --gpu | common | estimate for this GPU, e.g. h100-80g or rtx4090
gpu_price | texts GPU=PRICE | --gpu-price | |
  set the price of a GPU-hour, e.g. h100-80g=2.5 (repeatable)
gpu_mem = gpu_mem_bytes | bytes | --gpu-mem | | set the memory of each GPU, e.g. 24GiB
host_mem = host_mem_bytes | bytes | --host-mem | | set the memory of each node  [default: --mem]
intra_node_bandwidth | real GB/s | --intra-node-bandwidth | |
  set the bandwidth between GPUs of a node (busbw of nccl-tests)  [default: by GPU]
inter_node_bandwidth | real GB/s | --inter-node-bandwidth | |
  set the total bandwidth of a node's network cards, e.g. 400 for 8 x 400 Gb/s  [default: by GPU and
  network.preset]
mfu | real | --mfu | | set the MFU (share of peak FLOPS) of passes that fill the GPU  [default: 0.4]
step_time = step_time_s | real | --step-time | |
  set the measured time of an optimizer step, e.g. 4.5s
save_every | count | --save-every | | assume a checkpoint every N steps
keep | count | --keep | | assume that this many checkpoints are kept
keep_best | count | --keep-best | | assume that the N best checkpoints are kept too, weights only
planned | flag | | |
  pass micro-batch, accumulation and gradient checkpointing to the ranks (set by submit --plan)
"""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The settings of a job; None means not set. The fields from `model` on describe the training.

    Only estimates, notes and `planned` use these. Raises UsageError for an invalid value.
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
            if field.kind is Kind.MAPPING:  # a copy, which the caller cannot change
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
    """Yield a Field for each row of `_TABLE`: `nodes | count | -N --nodes | common | ...`."""
    defaults = {field.name: field.default for field in dataclasses.fields(JobSpec)}
    group = dot = ""
    for line in re.sub(r"\n +", " ", _TABLE).splitlines():  # joins the lines of a row
        if line.startswith("["):  # a group; after `[slurm.]`, keys begin with `slurm.`
            group, dot, _ = line[1:-1].partition(".")
            continue
        names, kind, flags, marks, text = map(str.strip, line.split("|", 4))
        leaf, _, name = names.partition(" = ")  # `time = time_minutes`: key, then field
        name = name or leaf
        default: Any = {} if kind.startswith("mapping") else defaults[name]
        yield Field(
            name=name,
            key=f"{group}.{leaf}" if dot else leaf,
            kind=Kind(kind.split()[0]),
            flags=tuple(flags.split()),
            group=group,
            help=re.sub(r" +\[default", "  [default", text),  # two spaces, as in a row of one line
            default=default,
            choices=type(default) if isinstance(default, Enum) else _CHOICES.get(name),
            metavar=kind.partition(" ")[2] or None,
            is_common=marks == "common",
        )


FIELDS: Final = tuple(_rows())
BY_KEY: Final[Mapping[str, Field]] = {field.key: field for field in FIELDS}
BY_NAME: Final[Mapping[str, Field]] = {field.name: field for field in FIELDS}
BY_ENV: Final[Mapping[str, Field]] = {field.env: field for field in FIELDS}
# slurm, launch, network, logs, training
SECTIONS: Final = tuple(dict.fromkeys(key.partition(".")[0] for key in BY_KEY if "." in key))
# The names in other tools.
_ALIASES: Final = {
    **dict.fromkeys(("gpus", "gres", "num_gpus", "n_gpus"), "slurm.gpus_per_node"),
    **dict.fromkeys(("num_nodes", "nnodes", "num_machines"), "slurm.nodes"),
    **dict.fromkeys(
        ("ntasks_per_node", "tasks_per_node", "num_processes"), "launch.nproc_per_node"
    ),
    **dict.fromkeys(("precision", "dtype", "amp"), "launch.mixed_precision"),
    **{"memory": "slurm.mem", "walltime": "slurm.time", "features": "slurm.constraint"},
    **{"distributed_type": "launch.strategy", "command": "script"},
}


def hint_for_key(name: str, section: str) -> str:
    """Return a hint for an unknown key of a section ("": the top level).

    It names the key that the word stands for, else a similar key: of this section, then of any.
    """
    plain = name.replace("-", "_").removeprefix(f"{section}.")
    known = [key for key in BY_KEY if "." not in key] + [*SECTIONS, "profile", "profiles"]
    if section:
        known = [key.partition(".")[2] for key in BY_KEY if key.startswith(f"{section}.")]
    if plain in ("conda", "conda_env", "modules", "uv", "venv"):
        return f"write it under 'launch:' as setup: {{{plain.removesuffix('_env')}: ...}}"
    key = keys_by_word().get(plain) if plain not in known else None
    if key is None:
        if near := nearest(plain, known):
            return f"use '{near}'"
        key = keys_by_word().get(nearest(plain, keys_by_word()) or "")
    if key is None:
        return f"use one of: {', '.join(known)}"
    home, _, leaf = key.rpartition(".")
    if home == section:
        return f"use '{leaf}'"
    return f"write '{leaf}' under '{home}:'" if home else f"write '{leaf}' at the top level"


@functools.cache
def keys_by_word() -> dict[str, str]:
    """Map words to the keys that they name: whole keys, their last parts, long options, aliases."""
    keys = dict(_ALIASES)
    for field in FIELDS:
        flags = (flag for flag in field.flags if flag.startswith("--"))
        options = [flag.lstrip("-").replace("-", "_") for flag in flags]
        for word in (*options, field.name, field.key.rpartition(".")[2], field.key):
            keys[word] = field.key
    return keys
