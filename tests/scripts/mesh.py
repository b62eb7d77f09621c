"""Tensor parallel by torch alone, over a mesh of the size that the launch gives."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

size = int(os.environ["PARALLELISM_CONFIG_TP_SIZE"])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 16)).square().mean()
    loss.backward()
    optimizer.step()
print(f"rank {dist.get_rank()} of tensor {size} loss {loss.item():.6f}")
dist.destroy_process_group()
