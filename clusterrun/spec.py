"""What the user asked for: one frozen record, each field of which is declared once.

A field's metadata is its only declaration: the YAML loader, the environment reader and the
command line are made from it (`FIELDS`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from clusterrun.errors import UsageError


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
        """Say whether torch's fully sharded data parallel does the work."""
        return self.value.startswith("fsdp")

    @property
    def is_deepspeed(self) -> bool:
        """Say whether DeepSpeed's ZeRO does the work."""
        return self.value.startswith("zero")


class GpuRequest(str, Enum):
    """The dialect in which a site wants GPUs to be asked for."""

    GPUS_PER_NODE = "gpus-per-node"
    GRES = "gres"
    NONE = "none"


class Network(str, Enum):
    """A preset of network environment variables."""

    AUTO = "auto"
    ETHERNET = "ethernet"
    INFINIBAND = "infiniband"
    EFA = "efa"


class Kind(str, Enum):
    """How the text of a value is read."""

    TEXT = "text"
    PATH = "path"
    COUNT = "count"  # an integer >= 1
    NUMBER = "number"  # an integer >= 0
    FLAG = "flag"
    ENUM = "enum"
    TEXTS = "texts"  # a list; a repeatable option
    MAPPING = "mapping"  # NAME: value; a repeatable NAME=VALUE option
    MINUTES = "minutes"  # Slurm's time formats, kept as whole minutes
    SECONDS = "seconds"  # 90, 90s, 30m, 2h; kept as whole seconds


@dataclass(frozen=True, kw_only=True)
class Field:
    """The declaration of one setting: its YAML key, options, kind and meaning."""

    name: str
    key: str
    kind: Kind
    flags: tuple[str, ...]
    group: str
    help: str
    default: Any
    choices: type[Enum] | None
    metavar: str | None

    @property
    def env(self) -> str:
        """Name the environment variable that sets this field."""
        return "CLUSTERRUN_" + self.key.replace(".", "_").upper()


def _field(
    key: str,
    kind: Kind,
    flags: str,
    help: str,
    *,
    default: Any = None,
    choices: type[Enum] | None = None,
    group: str | None = None,
    metavar: str | None = None,
) -> Any:
    metadata = {
        "key": key,
        "kind": kind,
        "flags": tuple(flags.split()),
        "group": group or key.split(".", 1)[0],
        "help": help,
        "choices": choices,
        "metavar": metavar,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What the user asked for; `None` means that nothing was said.

    Raises UsageError on construction when a value can't be meant.
    """

    script: str | None = _field("script", Kind.PATH, "", "training script", group="job")
    module: str | None = _field(
        "module", Kind.TEXT, "-m --module", "run a module, as python -m does", group="job"
    )
    args: tuple[str, ...] = _field(
        "args", Kind.TEXTS, "", "arguments of the script", default=(), group="job"
    )
    name: str | None = _field(
        "name", Kind.TEXT, "-J --job-name", "name of the job and of its runs", group="job"
    )
    cluster: Cluster = _field(
        "cluster",
        Kind.ENUM,
        "--cluster",
        "auto takes Slurm where sbatch is found, else this machine",
        default=Cluster.AUTO,
        choices=Cluster,
        group="job",
    )
    run_dir: str = _field(
        "run_dir",
        Kind.PATH,
        "--run-dir",
        "directory of all runs; on Slurm a file system that the nodes share",
        default="runs",
        group="job",
    )

    nodes: int = _field("slurm.nodes", Kind.COUNT, "-N --nodes", "number of nodes", default=1)
    gpus_per_node: int | None = _field(
        "slurm.gpus_per_node", Kind.NUMBER, "--gpus-per-node", "GPUs, hence ranks, of each node"
    )
    gpu_type: str | None = _field(
        "slurm.gpu_type", Kind.TEXT, "--gpu-type", "type in the request, as in gpu:a100:4"
    )
    gpu_request: GpuRequest = _field(
        "slurm.gpu_request",
        Kind.ENUM,
        "--gpu-request",
        "how this site wants GPUs to be asked for",
        default=GpuRequest.GPUS_PER_NODE,
        choices=GpuRequest,
    )
    cpus_per_task: int | None = _field(
        "slurm.cpus_per_task", Kind.COUNT, "-c --cpus-per-task", "CPUs of each node's task"
    )
    cpus_per_gpu: int | None = _field(
        "slurm.cpus_per_gpu", Kind.COUNT, "--cpus-per-gpu", "CPUs for each GPU"
    )
    mem: str | None = _field("slurm.mem", Kind.TEXT, "--mem", "memory of each node, as 200G")
    mem_per_gpu: str | None = _field(
        "slurm.mem_per_gpu", Kind.TEXT, "--mem-per-gpu", "memory for each GPU"
    )
    mem_per_cpu: str | None = _field(
        "slurm.mem_per_cpu", Kind.TEXT, "--mem-per-cpu", "memory for each CPU"
    )
    exclusive: bool = _field(
        "slurm.exclusive", Kind.FLAG, "--exclusive", "whole nodes", default=False
    )
    time_minutes: int | None = _field(
        "slurm.time", Kind.MINUTES, "-t --time", "time limit in Slurm's formats, as 1-12:00:00"
    )
    time_min_minutes: int | None = _field(
        "slurm.time_min", Kind.MINUTES, "--time-min", "least time limit that would do"
    )
    partition: str | None = _field("slurm.partition", Kind.TEXT, "-p --partition", "partition")
    account: str | None = _field("slurm.account", Kind.TEXT, "-A --account", "account to charge")
    qos: str | None = _field("slurm.qos", Kind.TEXT, "-q --qos", "quality of service")
    constraint: str | None = _field(
        "slurm.constraint", Kind.TEXT, "-C --constraint", "features that nodes must have"
    )
    nodelist: str | None = _field(
        "slurm.nodelist", Kind.TEXT, "-w --nodelist", "nodes that must be among them"
    )
    exclude: str | None = _field("slurm.exclude", Kind.TEXT, "-x --exclude", "nodes to avoid")
    reservation: str | None = _field("slurm.reservation", Kind.TEXT, "--reservation", "reservation")
    dependency: str | None = _field(
        "slurm.dependency", Kind.TEXT, "-d --dependency", "jobs to wait for, as afterok:4711"
    )
    begin: str | None = _field("slurm.begin", Kind.TEXT, "-b --begin", "earliest start")
    deadline: str | None = _field("slurm.deadline", Kind.TEXT, "--deadline", "latest end")
    hold: bool = _field("slurm.hold", Kind.FLAG, "-H --hold", "submit held", default=False)
    requeue: bool = _field(
        "slurm.requeue",
        Kind.FLAG,
        "--requeue/--no-requeue",
        "let Slurm start the job again after a preemption or a lost node",
        default=True,
    )
    signal: str | None = _field(
        "slurm.signal", Kind.TEXT, "--signal", "signal before the time limit, as B:USR2@300"
    )
    switches: str | None = _field("slurm.switches", Kind.TEXT, "--switches", "leaf switches")
    clusters: str | None = _field("slurm.clusters", Kind.TEXT, "-M --clusters", "Slurm cluster")
    comment: str | None = _field("slurm.comment", Kind.TEXT, "--comment", "comment")
    mail_type: str | None = _field("slurm.mail_type", Kind.TEXT, "--mail-type", "events to mail")
    mail_user: str | None = _field("slurm.mail_user", Kind.TEXT, "--mail-user", "mail address")
    sbatch_args: tuple[str, ...] = _field(
        "slurm.extra",
        Kind.TEXTS,
        "--sbatch-arg",
        "any other option of sbatch, as --sbatch-arg=--nice=100",
        default=(),
        metavar="OPTION",
    )

    nproc_per_node: int | None = _field(
        "launch.nproc_per_node",
        Kind.COUNT,
        "--nproc-per-node",
        "ranks of each node; default: its GPUs, or 1",
    )
    device: Device = _field(
        "launch.device",
        Kind.ENUM,
        "--device",
        "what the ranks compute on",
        default=Device.AUTO,
        choices=Device,
    )
    gpu_ids: str | None = _field(
        "launch.gpu_ids", Kind.TEXT, "--gpu-ids", "GPUs of this machine to use, as 0,2 (local)"
    )
    strategy: Strategy = _field(
        "launch.strategy",
        Kind.ENUM,
        "--strategy",
        "how the model's state is spread over the ranks",
        default=Strategy.DDP,
        choices=Strategy,
    )
    mixed_precision: MixedPrecision = _field(
        "launch.mixed_precision",
        Kind.ENUM,
        "--mixed-precision",
        "auto: bf16 from compute capability 8.0, else fp16; no on a CPU",
        default=MixedPrecision.AUTO,
        choices=MixedPrecision,
    )
    accelerate_config: str | None = _field(
        "launch.accelerate_config",
        Kind.PATH,
        "--accelerate-config",
        "accelerate YAML of your own; only the machine facts are replaced",
        metavar="FILE",
    )
    deepspeed_config: str | None = _field(
        "launch.deepspeed_config",
        Kind.PATH,
        "--deepspeed-config",
        "DeepSpeed JSON of your own, taken as it is",
        metavar="FILE",
    )
    timeout_s: int | None = _field(
        "launch.timeout", Kind.SECONDS, "--timeout", "process-group timeout, as 30m"
    )
    rendezvous_timeout_s: int = _field(
        "launch.rendezvous_timeout",
        Kind.SECONDS,
        "--rendezvous-timeout",
        "how long nodes wait for each other at the start",
        default=600,
    )
    main_process_port: int | None = _field(
        "launch.main_process_port",
        Kind.COUNT,
        "--main-process-port",
        "port of the rendezvous; default: derived from the job",
    )
    threads_per_process: int | None = _field(
        "launch.threads_per_process",
        Kind.COUNT,
        "--threads-per-process",
        "OMP_NUM_THREADS; default: allocated CPUs by ranks",
    )
    world_contract: bool = _field(
        "launch.world_contract",
        Kind.FLAG,
        "--world-contract/--no-world-contract",
        "end the job when the ranks did not become one world",
        default=True,
    )
    python: str | None = _field(
        "launch.python", Kind.TEXT, "--python", "interpreter on the nodes; default: this one"
    )
    setup: tuple[str, ...] = _field(
        "launch.setup",
        Kind.TEXTS,
        "--setup",
        "a line of bash to run first on each node, as 'module load cuda'",
        default=(),
        metavar="LINE",
    )

    network: Network = _field(
        "network.preset",
        Kind.ENUM,
        "--network",
        "preset of the network environment",
        default=Network.AUTO,
        choices=Network,
    )
    network_interface: str | None = _field(
        "network.interface",
        Kind.TEXT,
        "--network-interface",
        "socket interface; default: the one that routes to the other nodes",
    )
    network_env: Mapping[str, str] = _field(
        "network.env", Kind.MAPPING, "", "further NCCL or fabric variables", default=()
    )
    env: Mapping[str, str] = _field(
        "env", Kind.MAPPING, "--env", "variable for the ranks", default=(), metavar="NAME=VALUE"
    )
    pass_env: tuple[str, ...] = _field(
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
            _check_type(field, value)
            if field.kind is Kind.MAPPING:
                object.__setattr__(self, field.name, dict(value))
            elif field.kind is Kind.TEXTS:
                object.__setattr__(self, field.name, tuple(value))
            _check(field, getattr(self, field.name))


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_TYPES: dict[Kind, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys((Kind.TEXT, Kind.PATH), ((str,), "a str")),
    **dict.fromkeys(
        (Kind.COUNT, Kind.NUMBER, Kind.MINUTES, Kind.SECONDS), ((int,), "a whole number")
    ),
    Kind.FLAG: ((bool,), "True or False"),
    Kind.ENUM: ((str,), "one of its words"),  # a word stands for its member until it is resolved
    Kind.TEXTS: ((tuple, list), "a list of str"),
    Kind.MAPPING: ((Mapping,), "a mapping of str to str"),
}


def _check_type(field: Field, value: Any) -> None:
    """Refuse a value of another type: nobody but Python code can give one."""
    if (value is None and field.default is None) or value == () == field.default:
        return
    types, what = _TYPES[field.kind]
    is_other = not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
    if is_other:
        raise UsageError(f"{field.name} must be {what}, not {_type(value)}")
    if field.kind is Kind.TEXTS:
        _check_text_types(field, value)
    if field.kind is Kind.MAPPING:
        _check_variable_types(field, value)


def _check_text_types(field: Field, values: Iterable[Any]) -> None:
    for text in values:
        if not isinstance(text, str):
            raise UsageError(
                f"{field.name} must hold str only, not {text!r}", hint=f"write it as '{text}'"
            )


def _check_variable_types(field: Field, variables: Mapping[Any, Any]) -> None:
    for name, text in variables.items():
        if not isinstance(name, str):
            raise UsageError(f"{field.name}: {name!r} is not a name for an environment variable")
        if not isinstance(text, str):  # it may be a secret: the message doesn't repeat it
            raise UsageError(
                f"{field.name}: the value of {name} must be a str, not {_type(text)}",
                hint="write it as text",
            )


def _type(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _check(field: Field, value: Any) -> None:
    if value is None:
        return
    option = field.flags[-1].split("/")[0] if field.flags else field.key
    if field.kind is Kind.COUNT and value < 1:
        raise UsageError(f"{option} must be at least 1, not {value}")
    if field.kind is Kind.NUMBER and value < 0:
        raise UsageError(f"{option} must not be negative, but is {value}")
    if field.kind in (Kind.MINUTES, Kind.SECONDS) and value < 1:
        raise UsageError(f"{option} must be a positive time")
    if field.kind in (Kind.TEXT, Kind.PATH):
        _check_text(option, value)
    if field.kind is Kind.TEXTS:
        _check_texts(field, option, value)
    if field.kind is Kind.MAPPING:
        _check_variables(option, value)


def _check_text(option: str, value: str) -> None:
    if not value:
        raise UsageError(f"{option} is empty", hint="leave it out to use the default")
    _refuse_control(option, value)


def _check_texts(field: Field, option: str, values: tuple[str, ...]) -> None:
    for text in values:
        if "\x00" in text:
            raise UsageError(f"{option} holds a NUL byte: {text!r}")
        if field.name == "sbatch_args":
            _refuse_control(option, text)


def _refuse_control(option: str, value: str) -> None:
    if _CONTROL.search(value):
        raise UsageError(
            f"{option} holds a newline or control character: {value!r}",
            hint="remove it; Slurm's directives end at the line",
        )


def _check_variables(option: str, value: Mapping[str, str]) -> None:
    for name, text in value.items():
        if not _VARIABLE.match(name):
            raise UsageError(f"{option}: {name!r} is not a name for an environment variable")
        if "\x00" in text:
            raise UsageError(f"{option}: the value of {name} holds a NUL byte")


def _declared() -> tuple[Field, ...]:
    return tuple(
        Field(name=field.name, default=field.default, **field.metadata)
        for field in dataclasses.fields(JobSpec)
    )


FIELDS: tuple[Field, ...] = _declared()
