"""Prove that this rank trained in one world, in one line of output."""

import os

import torch
import torch.distributed as dist

STEPS = int(os.environ.get("STEPS", "20000"))


def engine(model):
    """Return what keeps the ranks' models in step."""
    if hasattr(model, "zero_optimization_stage"):
        offload = "-offload" if model.zero_cpu_offload() else ""
        return f"zero{model.zero_optimization_stage()}{offload}"
    return "ddp" if isinstance(model, torch.nn.parallel.DistributedDataParallel) else "alone"


def prove(rank, world, model=None, more=""):
    """Add up a number of each rank, and print who this rank is."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.all_reduce(total := torch.tensor([2.0**rank]))
    proof = f"PROOF {rank}/{world} sum {int(total)} {engine(model)} {more}".strip()
    print(f"{proof}\n", end="", flush=True)  # one write: ranks of mp.spawn share the file
