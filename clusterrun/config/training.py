"""Facts of the training itself: estimates and notes depend on them, the launch does not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from clusterrun.config.fields import Kind, declared


class Optimizer(str, Enum):
    """An optimizer, by the states that it keeps for each parameter."""

    ADAMW = "adamw"
    ADAM8BIT = "adam8bit"
    LION = "lion"
    SGD = "sgd"  # with momentum

    @property
    def state_bytes(self) -> int:
        """Return the bytes kept for each fp32 parameter, without the master weight."""
        return {"adamw": 8, "adam8bit": 2, "lion": 4, "sgd": 4}[self.value]


class LrRule(str, Enum):
    """How a learning rate follows the batch."""

    LINEAR = "linear"
    SQRT = "sqrt"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Training:
    """Facts of the training; a value of None is not set."""

    model: str | None = declared(
        "training.model",
        Kind.TEXT,
        "--model",
        "a known name as qwen3-8b, a config.json or its directory",
    )
    params: float | None = declared(
        "training.params", Kind.REAL, "--params", "parameters, as 8.03e9 or 8.03B"
    )
    active_params: float | None = declared(
        "training.active_params",
        Kind.REAL,
        "--active-params",
        "those of them that work on a token, of a model with experts",
    )
    hidden: int | None = declared("training.hidden", Kind.COUNT, "--hidden", "hidden size")
    layers: int | None = declared("training.layers", Kind.COUNT, "--layers", "blocks")
    heads: int | None = declared("training.heads", Kind.COUNT, "--heads", "attention heads")
    kv_heads: int | None = declared(
        "training.kv_heads", Kind.COUNT, "--kv-heads", "heads of keys and values"
    )
    ffn: int | None = declared("training.ffn", Kind.COUNT, "--ffn", "feed-forward size")
    vocab: int | None = declared("training.vocab", Kind.COUNT, "--vocab", "vocabulary")
    samples: int | None = declared(
        "training.samples", Kind.COUNT, "--samples", "samples of the data set"
    )
    tokens: float | None = declared(
        "training.tokens", Kind.REAL, "--tokens", "tokens of the data set, in place of samples"
    )
    seq_len: int | None = declared(
        "training.seq_len", Kind.COUNT, "--seq-len", "tokens of a sample"
    )
    micro_batch: int | None = declared(
        "training.micro_batch", Kind.COUNT, "--micro-batch", "samples of a rank and pass"
    )
    accumulation: int | None = declared(
        "training.accumulation",
        Kind.COUNT,
        "--accumulation --accum",
        "passes to an optimizer step; default: 1, or what --effective-batch takes",
    )
    effective_batch: int | None = declared(
        "training.effective_batch",
        Kind.COUNT,
        "--effective-batch",
        "samples of an optimizer step that are wanted",
    )
    epochs: float | None = declared("training.epochs", Kind.REAL, "--epochs", "passes of the data")
    max_steps: int | None = declared(
        "training.max_steps", Kind.COUNT, "--max-steps", "optimizer steps in all"
    )
    optimizer: Optimizer | None = declared(
        "training.optimizer",
        Kind.ENUM,
        "--optimizer",
        "by what it keeps of each parameter; default: adamw",
        choices=Optimizer,
    )
    lora: int | None = declared(
        "training.lora", Kind.NUMBER, "--lora", "rank of LoRA adapters; 0 trains all weights"
    )
    load_in_4bit: bool | None = declared(
        "training.load_in_4bit",
        Kind.FLAG,
        "--load-in-4bit/--no-load-in-4bit",
        "with --lora: the frozen weights in 4 bits (QLoRA)",
    )
    grad_ckpt: bool | None = declared(
        "training.grad_ckpt",
        Kind.FLAG,
        "--grad-ckpt/--no-grad-ckpt",
        "activations are computed again, not kept",
    )
    lr: float | None = declared("training.lr", Kind.REAL, "--lr", "learning rate at --base-batch")
    base_batch: int | None = declared(
        "training.base_batch", Kind.COUNT, "--base-batch", "effective batch that --lr is for"
    )
    lr_rule: LrRule | None = declared(
        "training.lr_rule",
        Kind.ENUM,
        "--lr-rule",
        "how the learning rate follows the batch; default: linear",
        choices=LrRule,
    )
    gpu: str | None = declared("training.gpu", Kind.TEXT, "--gpu", "GPU, as h100-80g or rtx4090")
    gpu_price: tuple[str, ...] = declared(
        "training.gpu_price",
        Kind.TEXTS,
        "--gpu-price",
        "price of an hour of a GPU, as h100-80g=2.5",
        default=(),
        metavar="GPU=PRICE",
    )
    gpu_mem_bytes: int | None = declared(
        "training.gpu_mem", Kind.BYTES, "--gpu-mem", "memory of a GPU, as 24GiB"
    )
    host_mem_bytes: int | None = declared(
        "training.host_mem", Kind.BYTES, "--host-mem", "memory of a node; default: --mem"
    )
    intra_node_bandwidth: float | None = declared(
        "training.intra_node_bandwidth",
        Kind.REAL,
        "--intra-node-bandwidth",
        "GB/s between the GPUs of a node, as nccl-tests' busbw; default: the card's NVLink or PCIe",
        metavar="GB/s",
    )
    inter_node_bandwidth: float | None = declared(
        "training.inter_node_bandwidth",
        Kind.REAL,
        "--inter-node-bandwidth",
        "GB/s of a node's network cards together (8 x 400 Gb/s are 400); default: by GPU and "
        "--network",
        metavar="GB/s",
    )
    mfu: float | None = declared(
        "training.mfu",
        Kind.REAL,
        "--mfu",
        "share of the peak that passes reach which fill a GPU; default: 0.4",
    )
    step_time_s: float | None = declared(
        "training.step_time",
        Kind.REAL,
        "--step-time",
        "measured time of an optimizer step, as 4.5s",
    )
    save_every: int | None = declared(
        "training.save_every", Kind.COUNT, "--save-every", "steps between checkpoints"
    )
    keep: int | None = declared("training.keep", Kind.COUNT, "--keep", "checkpoints that are kept")
    keep_best: int | None = declared(
        "training.keep_best", Kind.COUNT, "--keep-best", "best ones kept besides, as weights alone"
    )
    planned: bool | None = declared(
        "training.planned",
        Kind.FLAG,
        "",
        "hand micro-batch, accumulation and checkpointing to the ranks; submit --plan sets it",
    )
