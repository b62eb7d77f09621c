"""Train in each rank alone: nothing here joins a process group."""

import time

import torch

if __name__ == "__main__":
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    print(f"first step at {time.time():.3f}", flush=True)
    while True:
        optimizer.step()
        time.sleep(0.1)
