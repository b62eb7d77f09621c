"""Train on all ranks, and fail on one of them, or on all, in the way that is asked for."""

import ctypes
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from accelerate import Accelerator

from clusterrun import runtime

STEPS, FAILS_AT, VICTIM = 100, 3, 2


class Slow(torch.utils.data.Dataset):
    """Give samples, but not the last ones."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index >= FAILS_AT:
            time.sleep(1000)
        return torch.zeros(4)


def raised():
    raise ValueError("the tokenizer has no token <|im_end|>")


def imported():
    import flash_attn_9  # noqa: F401


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def filled_memory():
    held = []
    while True:
        held.append(bytearray(1 << 24))


def crashed():
    ctypes.string_at(0)


def looped():
    while True:
        time.sleep(0.1)


def locked():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def filled():
    with open(os.environ["SMALL_DISK"] + "/checkpoint.pt", "wb") as file:
        torch.save(torch.zeros(1 << 22), file)


def bound():
    first = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.TCPStore("127.0.0.1", first.port, is_master=True)


def reshaped():
    dist.all_reduce(torch.ones(1000))


def fail(how):
    """Fail in a way that is the same on every rank that does."""
    {
        "raise": raised,
        "import": imported,
        "kill": killed,
        "memory": filled_memory,
        "segv": crashed,
        "loop": looped,
        "lock": locked,
        "disk": filled,
        "port": bound,
        "shape": reshaped,
        "skip": looped,
        "nothing": list,
    }[how]()


def main(how):
    """Train; rank VICTIM fails at step FAILS_AT."""
    if how == "import":
        imported()
    if how == "host":
        os.environ["MASTER_ADDR"] = "no-such-node.invalid"
    accelerator = Accelerator()
    rank = accelerator.process_index
    samples = iter(torch.utils.data.DataLoader(Slow(), num_workers=1, prefetch_factor=1))
    loss = torch.ones(1)
    for step in range(1, STEPS):
        if step == FAILS_AT and rank == VICTIM and how not in ("loader", "nan", "host", "miss"):
            fail(how)
        if how == "loader" and rank == VICTIM:
            next(samples)
        if how == "miss" and step == FAILS_AT and rank == VICTIM:
            continue
        dist.all_reduce(loss)
        runtime.should_checkpoint()
        shown = float("nan") if how == "nan" and step > FAILS_AT else 2.5 / step
        if rank == 0:
            print(f"step {step} loss {shown:.4f}", flush=True)
        if how == "nan" and step == 2 * FAILS_AT:
            sys.exit(1)
        time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1])
