"""Train in each rank alone, in one of the ways that scripts do."""

import os
import sys
import time

import torch


def train():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    print(f"first step at {time.time():.3f}", flush=True)
    while True:
        optimizer.step()
        time.sleep(0.1)


def without_environment():
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    from accelerate import Accelerator

    print(f"first step at {time.time():.3f}", flush=True)
    Accelerator(cpu=True)
    train()


if __name__ == "__main__":
    if sys.argv[1] == "loop":
        train()
    without_environment()
