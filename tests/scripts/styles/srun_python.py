"""A script for `srun python`: it reads SLURM_ variables, and has its own address and port."""

import os
import subprocess

import torch
import torch.distributed as dist
from proof import prove

names = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
os.environ["MASTER_ADDR"] = subprocess.check_output(names, text=True).split()[0]
os.environ["MASTER_PORT"] = str(10000 + int(os.environ["SLURM_JOB_ID"]) % 20000)
rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model(torch.randn(4, 8)).square().mean().backward()
optimizer.step()
prove(rank, world, model, f"local {os.environ['SLURM_LOCALID']}")
dist.destroy_process_group()
