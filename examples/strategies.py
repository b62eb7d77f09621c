"""The differences between one process, DDP, FSDP and DeepSpeed, outside the training loop."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    DummyOptim,
    DummyScheduler,
)
from torch import nn

BETAS, EPS = (0.9, 0.95), 1e-8  # of AdamW


def is_deepspeed(accelerator: Accelerator) -> bool:
    """Return whether DeepSpeed runs the steps."""
    return bool(accelerator.distributed_type == DistributedType.DEEPSPEED)


def start_accelerator(args: argparse.Namespace) -> Accelerator:
    """Join the world; its size and precision come from the environment."""
    handlers = []
    if args.exact:
        make_deterministic()
        # DDP regroups its gradient buckets after the first step, so a resumed run would sum in a
        # different order than the original run. With this switch it doesn't regroup.
        handlers.append(DistributedDataParallelKwargs(find_unused_parameters=True))
    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulation, kwargs_handlers=handlers
    )
    if (started := os.environ.get("WORLD_SIZE", "1")) != str(accelerator.num_processes):
        raise SystemExit(
            f"error: the launcher started {started} ranks, but accelerate did not join them\n"
            "  hint: without GPUs, set ACCELERATE_USE_CPU=true"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise SystemExit("error: fp16 needs a GPU: accelerate would silently train in fp32")
    if is_deepspeed(accelerator):
        follow_deepspeed(accelerator, args)
    args.accumulation = accelerator.gradient_accumulation_steps  # the environment may decide it
    return accelerator


def make_deterministic() -> None:
    """Make torch compute the same bits each time, at the cost of speed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    for switch in ("flash", "mem_efficient", "cudnn"):  # keep only the plain attention
        getattr(torch.backends.cuda, f"enable_{switch}_sdp")(False)


def follow_deepspeed(accelerator: Accelerator, args: argparse.Namespace) -> None:
    """Take the batch numbers from a DeepSpeed config that fixes them; fill in what is "auto".

    A user's config wins in everything that it sets; `batch` is printed.
    accelerate fills in rate, weight decay and schedule, but neither clipping nor betas and eps.
    """
    config = accelerator.deepspeed_plugin.deepspeed_config
    accumulation = config.get("gradient_accumulation_steps")
    if isinstance(accumulation, int):
        accelerator.gradient_accumulation_steps = accumulation
    batch_size = config.get("train_micro_batch_size_per_gpu")
    if isinstance(batch_size, int):
        args.batch_size = batch_size
    if config.get("gradient_clipping") == "auto":
        config["gradient_clipping"] = args.clip
    choices = config.get("optimizer", {}).get("params", {})
    for name, ours in (("betas", list(BETAS)), ("eps", EPS)):
        if choices.get(name) == "auto":
            choices[name] = ours


def optimizer_and_schedule(
    accelerator: Accelerator, model: nn.Module, args: argparse.Namespace
) -> tuple[Any, Any]:
    """Return AdamW and None, or stand-ins for those that a DeepSpeed config defines.

    There is no scheduler: the loop sets the rate, which depends only on the step. accelerate steps
    a scheduler once per process. Under DeepSpeed, a resume disconnects a torch scheduler from the
    optimizer in use: the rate then silently stays constant.
    """
    config = accelerator.deepspeed_plugin.deepspeed_config if is_deepspeed(accelerator) else {}
    optimizer: Any
    if "optimizer" in config:
        optimizer = DummyOptim(list(model.parameters()), lr=args.lr, weight_decay=args.weight_decay)
    else:
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=args.lr,
            weight_decay=args.weight_decay,
            betas=BETAS,
            eps=EPS,
        )
    if "scheduler" not in config:
        return optimizer, None
    # accelerate divides the total by the number of processes, as if it counted a loader's batches;
    # DeepSpeed counts optimizer steps: pass the value that gives max_steps again.
    total = args.max_steps * accelerator.num_processes
    return optimizer, DummyScheduler(optimizer, total_num_steps=total, warmup_num_steps=args.warmup)


def checkpoint_format(accelerator: Accelerator) -> str:
    """Return the format of a checkpoint: `whole` files, or shards of one strategy."""
    if is_deepspeed(accelerator):
        return f"deepspeed zero-{accelerator.deepspeed_plugin.zero_stage}"
    return "fsdp" if accelerator.distributed_type == DistributedType.FSDP else "whole"


def deepspeed_choices(accelerator: Accelerator) -> str | None:
    """Return a DeepSpeed config's optimizer settings, as text that `prepare` can't change."""
    if not is_deepspeed(accelerator):
        return None
    config = accelerator.deepspeed_plugin.deepspeed_config
    names = ("optimizer", "scheduler", "gradient_clipping")
    return json.dumps({name: config.get(name) for name in names}, sort_keys=True)
