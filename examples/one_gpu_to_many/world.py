"""Who the ranks are, and whether they all mean the same training."""

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
    """Print one line in one piece, so that lines of several ranks never mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def join(accelerator: Accelerator, facts: Mapping[str, Any]) -> None:
    """Print where each rank is, and stop unless all ranks have the same facts."""
    if accelerator.distributed_type not in PLAIN:
        raise SystemExit(
            "error: this example is for one process and DDP\n"
            "  hint: --strategy ddp; ../train_lm.py has FSDP and DeepSpeed, too"
        )
    if (started := os.environ.get("WORLD_SIZE", "1")) != str(accelerator.num_processes):
        raise SystemExit(
            f"error: the launcher has started {started} ranks, and accelerate did not join them\n"
            "  hint: without GPUs it needs ACCELERATE_USE_CPU=true"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise SystemExit("error: fp16 needs a GPU: accelerate would train in fp32, and not say so")
    host = os.environ.get("CLUSTERRUN_NODE") or socket.gethostname()
    say(f"rank {accelerator.process_index}/{accelerator.num_processes} on {host}")
    if reason := disagreement(gather_object([dict(facts)])):
        raise SystemExit(f"error: the ranks do not agree: {reason}")
    hosts = len(set(gather_object([host])))
    if accelerator.is_main_process:
        say(f"world {accelerator.num_processes} ranks on {hosts} host(s), agreed on data and flags")


def disagreement(facts: Sequence[Mapping[str, Any]]) -> str:
    """Return what a rank has otherwise than rank 0, or ""; `facts` are the ranks' own, in order."""
    for rank, own in enumerate(facts):
        for name, value in own.items():
            if value != facts[0][name]:
                return f"{name} is {facts[0][name]} on rank 0 and {value} on rank {rank}"
    return ""
