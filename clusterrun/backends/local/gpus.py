"""Share this machine's GPUs out between the nodes that it simulates."""

from __future__ import annotations

from clusterrun.config.spec import Device
from clusterrun.errors import ClusterrunError
from clusterrun.launch.plan import Plan

VISIBLE = "CUDA_VISIBLE_DEVICES"


def split_gpus(plan: Plan, visible: str | None) -> list[str]:
    """Share the GPUs out: one CUDA_VISIBLE_DEVICES for each node; empty for no GPU job.

    `visible` is what the submitting shell allowed, where the plan names none. Raises
    ClusterrunError when there are too few.
    """
    if plan.device is not Device.CUDA:
        return []
    each = plan.gpus_per_node or plan.procs_per_node
    needed = plan.nodes * each
    ids = list(plan.gpu_ids) or (visible.split(",") if visible else None)
    if ids is None:
        ids = [str(number) for number in range(needed)]
    if len(ids) < needed:
        raise ClusterrunError(
            f"{plan.nodes} nodes of {each} GPUs need {needed} GPUs, but {len(ids)} are given",
            cause=f"GPUs {','.join(ids)}",
            hint="give more with --gpu-ids, or ask for fewer nodes",
        )
    return [",".join(ids[rank * each : (rank + 1) * each]) for rank in range(plan.nodes)]
