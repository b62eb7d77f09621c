"""Finish the step, save and leave when SIGTERM comes: a handler of the script's own."""

import os
import signal

import torch
import torch.distributed as dist
from proof import prove

came = []
signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
dist.init_process_group()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    stops = torch.tensor(float(len(came)))
    dist.all_reduce(stops)
    if stops:
        break
prove(dist.get_rank(), dist.get_world_size(), model, "handled")
