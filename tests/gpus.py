"""Tests on an NVIDIA GPU: one is enough, since simulated nodes share it."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

from tests.node.jobs import AgentJob


@cache
def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    return b"GPU 0" in subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).stdout


def on_one_gpu(job: AgentJob) -> AgentJob:
    """Start a job's nodes, of one rank each, on the first GPU.

    NCCL refuses two ranks on one GPU unless it takes them for ranks of different hosts.
    """
    for rank in range(job.plan.nodes):
        job.start_node(rank, CUDA_VISIBLE_DEVICES="0", NCCL_HOSTID=f"node{rank}")
    return job
