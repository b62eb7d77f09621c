"""Join the world, add up the ranks, say who is where."""

import os
import socket
import sys

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

state = PartialState()
total = torch.tensor([float(state.process_index)])
if state.num_processes > 1:
    torch.distributed.all_reduce(total)
hosts = gather_object([socket.gethostname()])
print(f"rank {state.process_index}/{state.num_processes} on {socket.gethostname()}", flush=True)
if state.is_main_process:
    print(f"sum {int(total.item())} hosts {len(set(hosts))} args {sys.argv[1:]}", flush=True)
    if state.num_processes > 1:
        group = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
        print(f"timeout {group.options._timeout.total_seconds():.0f} s", flush=True)
    print(f"threads {os.environ['OMP_NUM_THREADS']}", flush=True)
