"""A script of DeepSpeed's own kind: `--deepspeed --deepspeed_config FILE`, and no accelerate."""

import argparse

import deepspeed
import torch
from proof import STEPS, prove

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
model = torch.nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for _ in range(STEPS):
    engine.backward(engine(torch.randn(2, 8)).pow(2).mean())
    engine.step()
prove(engine.global_rank, engine.world_size, engine)
