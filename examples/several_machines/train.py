"""Plain DDP, as torchrun's documentation shows it: nothing here knows clusterrun."""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from low_rank import CONFIGS, make_data, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    """Train on all ranks; rank 0 prints and saves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", choices=CONFIGS, required=True)
    parser.add_argument("--output", type=Path, default=Path("output"))
    args = parser.parse_args()
    config = CONFIGS[args.config]

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    print(f"rank {rank}/{world} on {socket.gethostname()}, {device}", flush=True)

    model = DistributedDataParallel(make_model(config).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    data = make_data()
    sampler = DistributedSampler(data, seed=2)
    for epoch in range(config.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)
        for inputs, targets in DataLoader(data, batch_size=config.batch, sampler=sampler):
            loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0], device=device)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}/{config.epochs} loss {total[0] / total[1]:.6f}", flush=True)

    if rank == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), args.output / f"{args.config}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
