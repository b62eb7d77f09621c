"""Facts of the training, for estimates and notes; the launch does not depend on them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from clusterrun.config.fields import Kind, declared


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


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Training:
    """Facts of the training, the part of a JobSpec that estimates need; None means not set."""

    model: str | None = declared(
        "training.model",
        Kind.TEXT,
        "--model",
        "estimate this model: a known name (qwen3-8b), a config.json or its directory",
        common=True,
    )
    params: float | None = declared(
        "training.params",
        Kind.REAL,
        "--params",
        "set the number of parameters, e.g. 8.03B",
        common=True,
    )
    active_params: float | None = declared(
        "training.active_params",
        Kind.REAL,
        "--active-params",
        "set the number of parameters active per token (mixture of experts)",
    )
    hidden: int | None = declared("training.hidden", Kind.COUNT, "--hidden", "set the hidden size")
    layers: int | None = declared(
        "training.layers", Kind.COUNT, "--layers", "set the number of layers"
    )
    heads: int | None = declared(
        "training.heads", Kind.COUNT, "--heads", "set the number of attention heads"
    )
    kv_heads: int | None = declared(
        "training.kv_heads", Kind.COUNT, "--kv-heads", "set the number of key-value heads"
    )
    ffn: int | None = declared("training.ffn", Kind.COUNT, "--ffn", "set the feed-forward size")
    vocab: int | None = declared("training.vocab", Kind.COUNT, "--vocab", "set the vocabulary size")
    samples: int | None = declared(
        "training.samples",
        Kind.COUNT,
        "--samples",
        "set the number of samples in the dataset, e.g. 1.2M",
        common=True,
    )
    tokens: float | None = declared(
        "training.tokens",
        Kind.REAL,
        "--tokens",
        "set the number of tokens in the dataset, instead of --samples",
    )
    seq_len: int | None = declared(
        "training.seq_len",
        Kind.COUNT,
        "--seq-len",
        "set the number of tokens per sample, e.g. 4096 (4k is 4000)",
        common=True,
    )
    micro_batch: int | None = declared(
        "training.micro_batch",
        Kind.COUNT,
        "--micro-batch",
        "set the number of samples per rank and forward pass",
        common=True,
    )
    accumulation: int | None = declared(
        "training.accumulation",
        Kind.COUNT,
        "--accumulation --accum",
        "accumulate gradients over this many passes  [default: 1, or set by --effective-batch]",
        common=True,
    )
    effective_batch: int | None = declared(
        "training.effective_batch",
        Kind.COUNT,
        "--effective-batch",
        "set the number of samples per optimizer step, over all ranks",
        common=True,
    )
    epochs: float | None = declared(
        "training.epochs", Kind.REAL, "--epochs", "train for this many epochs", common=True
    )
    max_steps: int | None = declared(
        "training.max_steps",
        Kind.COUNT,
        "--max-steps",
        "train for this many optimizer steps",
        common=True,
    )
    optimizer: Optimizer | None = declared(
        "training.optimizer",
        Kind.ENUM,
        "--optimizer",
        "use this optimizer  [default: adamw]",
        choices=Optimizer,
        common=True,
    )
    lora: int | None = declared(
        "training.lora",
        Kind.NUMBER,
        "--lora",
        "train LoRA adapters of this rank; 0 trains all weights",
        common=True,
    )
    load_in_4bit: bool | None = declared(
        "training.load_in_4bit",
        Kind.FLAG,
        "--load-in-4bit/--no-load-in-4bit",
        "keep the frozen weights in 4 bits, with --lora (QLoRA)",
    )
    grad_ckpt: bool | None = declared(
        "training.grad_ckpt",
        Kind.FLAG,
        "--grad-ckpt/--no-grad-ckpt",
        "recompute activations instead of keeping them",
        common=True,
    )
    lr: float | None = declared(
        "training.lr", Kind.REAL, "--lr", "scale this learning rate to the batch", common=True
    )
    base_batch: int | None = declared(
        "training.base_batch",
        Kind.COUNT,
        "--base-batch",
        "set the effective batch that --lr was chosen for",
    )
    lr_rule: LrRule | None = declared(
        "training.lr_rule",
        Kind.ENUM,
        "--lr-rule",
        "scale the learning rate by this rule  [default: linear]",
        choices=LrRule,
    )
    gpu: str | None = declared(
        "training.gpu",
        Kind.TEXT,
        "--gpu",
        "estimate for this GPU, e.g. h100-80g or rtx4090",
        common=True,
    )
    gpu_price: tuple[str, ...] = declared(
        "training.gpu_price",
        Kind.TEXTS,
        "--gpu-price",
        "set the price of a GPU-hour, e.g. h100-80g=2.5 (repeatable)",
        default=(),
        metavar="GPU=PRICE",
    )
    gpu_mem_bytes: int | None = declared(
        "training.gpu_mem", Kind.BYTES, "--gpu-mem", "set the memory of each GPU, e.g. 24GiB"
    )
    host_mem_bytes: int | None = declared(
        "training.host_mem",
        Kind.BYTES,
        "--host-mem",
        "set the memory of each node  [default: --mem]",
    )
    intra_node_bandwidth: float | None = declared(
        "training.intra_node_bandwidth",
        Kind.REAL,
        "--intra-node-bandwidth",
        "set the bandwidth between GPUs of a node (busbw of nccl-tests)  [default: by GPU]",
        metavar="GB/s",
    )
    inter_node_bandwidth: float | None = declared(
        "training.inter_node_bandwidth",
        Kind.REAL,
        "--inter-node-bandwidth",
        "set the bandwidth of all network cards of a node, e.g. 400 for 8 x 400 Gb/s  "
        "[default: by GPU and --network]",
        metavar="GB/s",
    )
    mfu: float | None = declared(
        "training.mfu",
        Kind.REAL,
        "--mfu",
        "set the share of peak FLOPS that a fully used GPU reaches  [default: 0.4]",
    )
    step_time_s: float | None = declared(
        "training.step_time",
        Kind.REAL,
        "--step-time",
        "set the measured time of an optimizer step, e.g. 4.5s",
    )
    save_every: int | None = declared(
        "training.save_every", Kind.COUNT, "--save-every", "save a checkpoint every N steps"
    )
    keep: int | None = declared("training.keep", Kind.COUNT, "--keep", "keep this many checkpoints")
    keep_best: int | None = declared(
        "training.keep_best",
        Kind.COUNT,
        "--keep-best",
        "also keep the N best checkpoints, weights only",
    )
    planned: bool | None = declared(
        "training.planned",
        Kind.FLAG,
        "",
        "pass the planned batch and checkpointing to the ranks; submit --plan sets it",
    )

    @property
    def names_model(self) -> bool:
        """Return whether there is a model to estimate."""
        return self.model is not None or self.params is not None or self.hidden is not None
