"""Join by the variables of Slurm alone, as scripts for `srun python` do."""

import os

import torch
import torch.distributed as dist

rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", rank=rank, world_size=world)
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {rank} local {os.environ['SLURM_LOCALID']} of {int(total)}", flush=True)
dist.destroy_process_group()
