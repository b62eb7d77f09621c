"""The settings that are a choice of words, without the rest of the configuration."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal, NamedTuple

from clusterrun.errors import UsageError
from clusterrun.shared.assets import read_strategies


class Lack(str):
    """Why a scheduler lacks a capability: false as an answer, and a text that users are shown."""

    __slots__ = ()

    def __bool__(self) -> bool:
        """Return False: the capability is missing."""
        return False


Capability = Literal[True] | Lack
_ELSEWHERE: Final = Lack("the job runs on other machines")
_NO_HOSTS: Final = Lack("the scheduler chooses the nodes")
_NO_SIGNALS: Final = Lack("only the job's first process is signalled")
_NO_SBATCH: Final = Lack("the job does not run on Slurm")


class Scheduler(NamedTuple):
    """Where jobs run, and what can be done there; decisions ask for these, never for a name."""

    title: str  # in messages
    module: str  # has `backend(where)`, which returns its `backends.base.Backend`
    has_queue: Capability  # jobs wait until nodes are free, and have a time limit
    can_requeue: Capability  # a job can put itself back into the queue
    shares_files: Capability  # its nodes, other machines, see the directory of the runs
    is_this_machine: Capability = _ELSEWHERE  # the nodes are processes here
    can_lose_node: Capability = True  # a node can be lost alone
    has_hosts: Capability = _NO_HOSTS  # its nodes are hosts; clusterrun starts processes there
    outlives_shell: Capability = True  # a run continues after its shell, or its allocation, ended
    signals_ranks: Capability = _NO_SIGNALS  # it signals the processes of a job itself
    reads_sbatch: Capability = _NO_SBATCH  # it is Slurm


class Cluster(str, Enum):
    """Where a job runs; an installed package can add a name (see docs/plugins.md)."""

    AUTO = "auto"
    SLURM = "slurm"
    LOCAL = "local"
    SSH = "ssh"
    ALLOCATION = "allocation"

    @property
    def scheduler(self) -> Scheduler:
        """Return what is known of this place; `auto` has no capability yet."""
        return _SCHEDULERS[self.value]

    @classmethod
    def _missing_(cls, value: object) -> Cluster | None:
        """Return a member for the scheduler that an installed package offers by this name, if any.

        Enum calls this for a value that is not a member. Raises UsageError if the scheduler can't
        be imported.
        """
        from importlib.metadata import entry_points  # slow to import

        if not isinstance(value, str):
            return None
        for entry in entry_points(group=ENTRY_POINTS, name=value):
            named = f"the scheduler '{value}' ({entry.value})"
            try:
                offered = entry.load()
            except Exception as error:
                text, hint = f"{named} cannot be imported", "reinstall the package that offers it"
                raise UsageError(text, cause=repr(error), hint=hint) from error
            if not isinstance(offered, Scheduler):
                text = f"{named} is not a clusterrun Scheduler"
                raise UsageError(text, hint="upgrade the package that offers it")
            member = str.__new__(cls, value)
            member._name_, member._value_ = value.upper(), value
            cls._value2member_map_[value] = member  # the same object the next time
            _SCHEDULERS[value] = offered
            return member
        return None


ENTRY_POINTS: Final = "clusterrun.schedulers"
_UNDECIDED: Final = Lack("it is not decided yet where the job runs")
_HERE: Final = Lack("the job runs on this machine")
_NO_QUEUE: Final = Lack("this machine has no queue")
_HOSTS_QUEUE: Final = Lack("hosts without a scheduler have no queue")
_HOSTS: Final = Scheduler(
    title="over ssh",
    module="clusterrun.backends.hosts.backend",
    has_queue=_HOSTS_QUEUE,
    can_requeue=_HOSTS_QUEUE,
    shares_files=Lack("each host has its own disks"),
    has_hosts=True,
)
_SCHEDULERS: Final = {
    "auto": Scheduler(title="auto", module="", **dict.fromkeys(Scheduler._fields[2:], _UNDECIDED)),
    "slurm": Scheduler(
        title="Slurm",
        module="clusterrun.backends.slurm.backend",
        has_queue=True,
        can_requeue=True,
        shares_files=True,
        signals_ranks=True,
        reads_sbatch=True,
    ),
    "local": Scheduler(
        title="this machine",
        module="clusterrun.backends.local.backend",
        has_queue=_NO_QUEUE,
        can_requeue=_NO_QUEUE,
        shares_files=_HERE,
        is_this_machine=True,
        can_lose_node=_HERE,
        reads_sbatch=_HERE,
    ),
    "ssh": _HOSTS,
    "allocation": _HOSTS._replace(
        title="in this allocation",
        outlives_shell=Lack("a run ends with its allocation"),
        signals_ranks=True,
    ),
}


class Device(str, Enum):
    """The device of the ranks."""

    AUTO = "auto"
    CUDA = "cuda"
    MPS = "mps"
    CPU = "cpu"


class MixedPrecision(str, Enum):
    """The precision of the forward pass, in accelerate's terms, or `auto`."""

    AUTO = "auto"
    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"


_HEADS: Final = read_strategies()
_PARTS: Final = ("nothing", "optimizer", "gradients", "weights")


class Strategy(str, Enum):
    """The distribution of the model's state over the ranks: one for each file with a head.

    The heads are in `accelerate_configs/`; `ZERO2_OFFLOAD` is that of zero2-offload.yaml.j2.
    """

    _ignore_ = "each"
    NONE = "none"
    DDP = "ddp"
    for each in _HEADS:
        if each not in ("none", "ddp"):
            vars()[each.upper().replace("-", "_")] = each

    @classmethod
    def simplest(cls, engine: str, stage: int, *, offloads: bool = False) -> Strategy:
        """Return the simplest non-hybrid strategy of this engine, sharding stage and offloading."""
        wanted = (engine, stage, offloads)
        found = (x for x in cls if (x.engine, x.stage, x.offload > 0) == wanted)
        return min((x for x in found if not x.is_hybrid), key=lambda each: each.order)

    @property
    def order(self) -> int:
        """Return the place among all strategies, the simplest first."""
        return int(_HEADS[self.value]["order"])

    @property
    def engine(self) -> str:
        """Return `none`, `ddp`, `fsdp` or `deepspeed`."""
        return _HEADS[self.value]["engine"]

    @property
    def is_fsdp(self) -> bool:
        """Return whether torch's FSDP is used."""
        return self.engine == "fsdp"

    @property
    def is_deepspeed(self) -> bool:
        """Return whether DeepSpeed is used."""
        return self.engine == "deepspeed"

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages that every node of a job with this strategy needs."""
        always = ("clusterrun", "torch", "accelerate")
        return (*always, "deepspeed") if self.is_deepspeed else always

    @property
    def stage(self) -> int:
        """Return what is sharded: 1 is the optimizer's states, 2 also gradients, 3 all; else 0."""
        return _PARTS.index(_HEADS[self.value]["shards"])

    @property
    def offload(self) -> int:
        """Return what is in the host's memory: 1 is the optimizer's states, 3 all; else 0."""
        return _PARTS.index(_HEADS[self.value]["offloads"])

    @property
    def is_hybrid(self) -> bool:
        """Return whether each node has a copy of the state, unless sizes are given."""
        return "copies" in _HEADS[self.value]


class GpuRequest(str, Enum):
    """The options that a site wants for GPUs."""

    GPUS_PER_NODE = "gpus-per-node"
    GRES = "gres"
    NONE = "none"


class OnInterrupt(str, Enum):
    """How a run continues after losing its nodes: by a requeue, in a new job, or not at all."""

    REQUEUE = "requeue"
    SUCCESSOR = "successor"
    STOP = "stop"


class Preflight(str, Enum):
    """Whether to check the nodes before the ranks start, and what follows if one fails."""

    OFF = "off"
    WARN = "warn"
    ENFORCE = "enforce"


class Stage(str, Enum):
    """Whether the environment is copied to the disk of each node before the ranks start."""

    OFF = "off"
    AUTO = "auto"
    TAR = "tar"


class Launcher(str, Enum):
    """How the ranks of a node are started; AUTO is the fastest that is proven."""

    AUTO = "auto"
    FORGE = "forge"
    DIRECT = "direct"
    ACCELERATE = "accelerate"


class Network(str, Enum):
    """A preset of network environment variables."""

    AUTO = "auto"
    ETHERNET = "ethernet"
    INFINIBAND = "infiniband"
    EFA = "efa"


class Starter(str, Enum):
    """What starts processes on the nodes of an allocation."""

    AUTO = "auto"
    SSH = "ssh"
    BLAUNCH = "blaunch"
    FLUX = "flux"
    SRUN = "srun"


class Optimizer(str, Enum):
    """An optimizer, with the states that it keeps for each parameter."""

    ADAMW = "adamw"
    ADAM8BIT = "adam8bit"
    LION = "lion"
    SGD = "sgd"  # with momentum

    @property
    def state_bytes(self) -> int:
        """Return the bytes kept for each fp32 parameter, without the master weight."""
        return {"adamw": 8, "adam8bit": 2, "lion": 4, "sgd": 4}[self.value]


class LrRule(str, Enum):
    """The scaling of the learning rate with the batch."""

    LINEAR = "linear"
    SQRT = "sqrt"
    NONE = "none"
