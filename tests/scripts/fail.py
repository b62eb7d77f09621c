"""Join the world, then let one rank end in the way that is asked for; the others would go on."""

import os
import signal
import sys
import time

import torch.distributed as dist
from accelerate import PartialState

how, victim = sys.argv[1], int(sys.argv[2])
state = PartialState()
if state.num_processes > 1:
    dist.barrier()
print(f"rank {state.process_index} ready", flush=True)
if state.process_index == victim:
    if how == "exit":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ValueError("no such tokenizer: 'gpt9'")
time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 120)
