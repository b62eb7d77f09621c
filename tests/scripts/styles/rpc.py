"""torch.distributed.rpc alone: no process group is made before the proof."""

import os

import torch
from proof import prove
from torch.distributed import rpc

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world)
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
(rpc.rpc_sync(f"worker{world - 1}", torch.add, args=(torch.ones(1), 1)) * weight).backward()
optimizer.step()
prove(rank, world, more=f"gradient {int(weight.grad)}")
rpc.shutdown()
