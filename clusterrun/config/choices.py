"""The settings that are a choice of words, without the rest of the configuration."""

from __future__ import annotations

from enum import Enum


class Cluster(str, Enum):
    """Where a job runs."""

    AUTO = "auto"
    SLURM = "slurm"
    LOCAL = "local"
    SSH = "ssh"
    ALLOCATION = "allocation"

    @property
    def is_hosts(self) -> bool:
        """Return whether the nodes are hosts that clusterrun itself starts processes on."""
        return self in (Cluster.SSH, Cluster.ALLOCATION)


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


class Strategy(str, Enum):
    """The distribution of the model's state over the ranks."""

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
        """Return whether torch's FSDP is used."""
        return self.value.startswith("fsdp")

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages that every node of a job with this strategy needs."""
        return ("clusterrun", "torch", "accelerate", *(["deepspeed"] * self.is_deepspeed))

    @property
    def is_deepspeed(self) -> bool:
        """Return whether DeepSpeed is used."""
        return self.value.startswith("zero")

    @property
    def engine(self) -> str:
        """Return `none`, `ddp`, `fsdp` or `deepspeed`."""
        return "deepspeed" if self.is_deepspeed else self.value.split("-")[0]


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
    PBSDSH = "pbsdsh"
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
