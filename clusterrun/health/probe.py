"""A process that computes on one device, then with the other nodes: `doctor --nodes` starts it.

`python -m clusterrun.health.probe cuda:0`. It prints a JSON line with the rate of a matrix product,
reads a line with its place in a group, and prints the time of an all-reduce. Only torch is needed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any, Final

MIB: Final = 4  # of the all-reduce
TIMES: Final = 5
TIMEOUT_S: Final = 10.0


def main(device: str) -> None:
    """Compute, then wait for the group; an error ends up in the line that is printed."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # NCCL prints to stdout
    answers.write(json.dumps(_computed(device)) + "\n")
    if line := sys.stdin.readline():
        answers.write(json.dumps(_reduced(device, json.loads(line))) + "\n")


def _computed(device: str) -> dict[str, Any]:
    try:
        from clusterrun.health.gemm import matmul_rate

        return {"tflops": matmul_rate(device)}
    except Exception as error:  # noqa: BLE001 - whatever torch and the driver raise is the answer
        return {"error": f"{type(error).__name__}: {error}"}


def _reduced(device: str, group: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"seconds": _all_reduce(device, group)}
    except Exception as error:  # noqa: BLE001 - as above
        return {"error": f"{type(error).__name__}: {error}"}


def _all_reduce(device: str, group: dict[str, Any]) -> float:
    """Return the median time of an all-reduce. Raises RuntimeError for a wrong sum."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if group["interface"]:
            os.environ.setdefault(name, group["interface"])
    import torch
    import torch.distributed as dist

    is_cuda = device.startswith("cuda")
    if is_cuda:
        torch.cuda.set_device(device)  # that synchronize() waits for
    rank, world = int(group["rank"]), int(group["world"])
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        init_method=f"tcp://{group['address']}:{group['port']}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    times = []
    for _ in range(TIMES):
        values = torch.full((MIB << 18,), float(rank + 1), device=device)
        started = time.perf_counter()
        dist.all_reduce(values)
        if is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        if (
            float(values.min()) != float(values.max())
            or float(values[0]) != world * (world + 1) / 2
        ):
            raise RuntimeError("the sum of an all-reduce is wrong")
    dist.destroy_process_group()
    return sorted(times)[TIMES // 2]


if __name__ == "__main__":
    if sys.argv[1].startswith("cuda"):
        os.environ.setdefault("NCCL_DEBUG", "WARN")
    main(sys.argv[1])
