"""Divide the CPUs of a node among its ranks."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping


def allocated_cpus(env: Mapping[str, str]) -> int:
    """Count the CPUs that this node's task may use."""
    text = env.get("SLURM_CPUS_PER_TASK", "")
    allowed = len(os.sched_getaffinity(0))
    return min(int(text), allowed) if text.isdigit() and int(text) else allowed


def openmp(
    names: Collection[str], cpus: int, *, ranks: int, simulated_nodes: int = 1
) -> dict[str, str]:
    """Return the number of threads as OpenMP reads it; {} if it is among the job's variables."""
    if "OMP_NUM_THREADS" in names:
        return {}
    # The nodes that are simulated share one machine.
    return {"OMP_NUM_THREADS": str(max(1, cpus // (ranks * simulated_nodes)))}
