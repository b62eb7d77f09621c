"""Let one rank end in the way that is asked for; the others would go on.

The ranks have joined their world before. With ALONE they need no torch, and meet by files.
"""

import os
import signal
import sys
import time
from pathlib import Path


def wait_for_all(place: str) -> None:
    """Wait until all ranks have come this far; they share the working directory."""
    Path(f"{place}-{os.environ['RANK']}").touch()
    while len(list(Path().glob(f"{place}-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)


def join() -> int:
    """Join the world and return the rank."""
    import torch.distributed as dist
    from accelerate import PartialState

    state = PartialState()
    if state.num_processes > 1:
        dist.barrier()
    return state.process_index


def meet() -> int:
    """Wait until all ranks are here, without torch, and return the rank."""
    wait_for_all("here")
    return int(os.environ["RANK"])


how, victim = sys.argv[1], int(sys.argv[2])
rank = meet() if os.environ.get("ALONE") else join()
print(f"rank {rank} ready", flush=True)
wait_for_all("ready")
if rank == victim:
    if how == "exit":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ValueError("no such tokenizer: 'gpt9'")
    if how == "memory":
        held = [bytearray(1 << 24) for _ in range(128)]  # 2 GiB
time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 120)
