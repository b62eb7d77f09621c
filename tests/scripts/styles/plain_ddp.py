"""A plain training loop with DDP and a progress bar for each epoch."""

import time

import torch
import torch.distributed as dist
from proof import STEPS, prove
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    bar = tqdm(range(STEPS), desc=f"Epoch {epoch}", disable=dist.get_rank() != 0)
    for _ in bar:
        time.sleep(0.02)
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
prove(dist.get_rank(), dist.get_world_size(), model)
dist.destroy_process_group()
