"""Let one rank end in the way that is asked for; the others would go on.

The ranks have joined their world before, unless ALONE is set: then they need no torch.
"""

import os
import signal
import sys
import time


def join() -> int:
    """Join the world and return the rank."""
    import torch.distributed as dist
    from accelerate import PartialState

    state = PartialState()
    if state.num_processes > 1:
        dist.barrier()
    return state.process_index


how, victim = sys.argv[1], int(sys.argv[2])
rank = int(os.environ["RANK"]) if os.environ.get("ALONE") else join()
print(f"rank {rank} ready", flush=True)
if rank == victim:
    if how == "exit":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ValueError("no such tokenizer: 'gpt9'")
time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 120)
