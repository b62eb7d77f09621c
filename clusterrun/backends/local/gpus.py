"""Divide this machine's GPUs between the nodes that it simulates."""

from __future__ import annotations

from clusterrun.config.choices import Device
from clusterrun.errors import ClusterrunError
from clusterrun.launch.plan import Plan

VISIBLE = "CUDA_VISIBLE_DEVICES"


def split_gpus(plan: Plan, visible: str | None) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES for each node; [] for a job without GPUs.

    `visible` is the submitting shell's value, for a plan that names no GPUs. Raises
    ClusterrunError if there are too few.
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
            f"{plan.nodes} x {each} GPUs are needed ({needed}), but only {len(ids)} can be used",
            cause=f"GPUs {','.join(ids)}",
            hint="name more with --gpu-ids, or use fewer nodes",
        )
    return [",".join(ids[rank * each : (rank + 1) * each]) for rank in range(plan.nodes)]
