"""Print the ranks, and check that they agree on the training."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object

PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def say(line: str) -> None:
    """Print a line with a single write, so that lines of several ranks never mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def join(accelerator: Accelerator, facts: Mapping[str, Any]) -> None:
    """Print where each rank is, and stop unless all ranks have the same facts."""
    if accelerator.distributed_type not in PLAIN:
        raise SystemExit(
            "error: this example is for one process and DDP\n"
            "  hint: use --strategy ddp, or ../train_lm.py for FSDP and DeepSpeed"
        )
    if (started := os.environ.get("WORLD_SIZE", "1")) != str(accelerator.num_processes):
        raise SystemExit(
            f"error: the launcher started {started} ranks, but accelerate did not join them\n"
            "  hint: without GPUs, set ACCELERATE_USE_CPU=true"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise SystemExit("error: fp16 needs a GPU: accelerate would silently train in fp32")
    host = os.environ.get("CLUSTERRUN_NODE") or socket.gethostname()
    say(f"rank {accelerator.process_index}/{accelerator.num_processes} on {host}")
    if reason := disagreement(gather_object([dict(facts)])):
        raise SystemExit(f"error: the ranks do not agree: {reason}")
    hosts = len(set(gather_object([host])))
    if accelerator.is_main_process:
        say(f"world {accelerator.num_processes} ranks on {hosts} host(s), agreed on data and flags")


def disagreement(facts: Sequence[Mapping[str, Any]]) -> str:
    """Return the first difference from rank 0, or ""; `facts` are those of the ranks, in order."""
    for rank, own in enumerate(facts):
        for name, value in own.items():
            if value != facts[0][name]:
                return f"{name} is {facts[0][name]} on rank 0 and {value} on rank {rank}"
    return ""
