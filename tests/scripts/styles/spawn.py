"""Start two processes in the script, as tutorials for one machine do."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from proof import prove


def train(rank, world):
    """Train one rank; the processes of a rank meet at a file of their own."""
    meeting = (Path() / f"meeting-{os.environ['RANK']}").absolute()
    dist.init_process_group("gloo", meeting.as_uri(), rank=rank, world_size=world)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    prove(rank, world, model)


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, args=(2,), nprocs=2)
