"""A script of DeepSpeed's own kind: `--deepspeed --deepspeed_config FILE`, and no accelerate."""

from __future__ import annotations

import argparse

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
model = torch.nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for step in range(2):
    engine.backward(engine(torch.randn(2, 8)).pow(2).mean())
    engine.step()
    print(f"rank {engine.global_rank} of {engine.world_size} step {step}")
print("stage", engine.zero_optimization_stage(), type(engine).__name__)
