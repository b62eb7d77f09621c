"""The same training with accelerate; it also runs under torchrun."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import torch
from accelerate import Accelerator
from low_rank import CONFIGS, make_data, make_model
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    """Train on all ranks; rank 0 prints and saves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", choices=CONFIGS, required=True)
    parser.add_argument("--output", type=Path, default=Path("output"))
    args = parser.parse_args()
    config = CONFIGS[args.config]

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    rank, world = accelerator.process_index, accelerator.num_processes
    print(f"rank {rank}/{world} on {socket.gethostname()}, {accelerator.device}", flush=True)

    model = make_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    loader = DataLoader(
        make_data(),
        batch_size=config.batch,
        shuffle=True,
        generator=torch.Generator().manual_seed(2),
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(config.epochs):
        losses = []
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
        if accelerator.is_main_process:
            print(f"epoch {epoch + 1}/{config.epochs} loss {mean:.6f}", flush=True)

    if accelerator.is_main_process:
        args.output.mkdir(parents=True, exist_ok=True)
        torch.save(accelerator.unwrap_model(model).state_dict(), args.output / f"{args.config}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
