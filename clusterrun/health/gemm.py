"""Multiply matrices for a moment, and reduce a tensor with other ranks; both may hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

GPU_S, CPU_S = 0.5, 0.3  # how long
_OF_GPU, _OF_CPU = 2048, 512  # rows of a matrix: 24 MiB of a GPU's memory, beside CUDA's own
_BATCH: Final = 32  # products between two looks at the clock
_WARM_UP: Final = 0.25  # of the time, for the clocks to rise
MIB: Final = 4  # of the all-reduce
TIMES: Final = 5
TIMEOUT_S: Final = 10.0
_BF16: Final = (8, 0)  # the first compute capability with bf16


def result(device: str) -> dict[str, Any]:
    """Return a device's rate, or its error."""
    try:
        return {"tflops": matmul_rate(_of_torch(device))}
    except Exception as error:  # noqa: BLE001 - whatever torch and the driver raise is the answer
        return {"error": f"{type(error).__name__}: {error}"}


def all_reduced(device: str, store: Any, rank: int, world: int) -> dict[str, Any]:
    """Reduce with other ranks; return the time as a field of a share, or the error."""
    try:
        return {"reduced_s": _all_reduce(_of_torch(device), store, rank, world)}
    except Exception as error:  # noqa: BLE001 - as above
        return {"reduce_error": f"{type(error).__name__}: {error}"}


def _of_torch(device: str) -> str:
    return "cpu" if device.startswith("cpu") else device


def _all_reduce(device: str, store: Any, rank: int, world: int) -> float:
    """Return the median time of an all-reduce. Raises RuntimeError for a wrong sum."""
    import torch
    import torch.distributed as dist

    if is_cuda := device.startswith("cuda"):
        torch.cuda.set_device(device)  # that synchronize() waits for
    backend, wait = "nccl" if is_cuda else "gloo", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
    times = []
    for _ in range(TIMES):
        values = torch.full((MIB << 18,), float(rank + 1), device=device)
        started = time.perf_counter()
        dist.all_reduce(values)
        if is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        if set(map(float, values.aminmax())) != {world * (world + 1) / 2}:
            raise RuntimeError("the sum of an all-reduce is wrong")
    dist.destroy_process_group()
    return sorted(times)[TIMES // 2]


def matmul_rate(device: str) -> float:
    """Return the rate of a device, as torch names it, in TFLOPS.

    Raises RuntimeError for a wrong product, and torch's errors.
    """
    import torch

    on_gpu = torch.device(device).type == "cuda"
    size, batch = (_OF_GPU, _BATCH) if on_gpu else (_OF_CPU, 1)
    is_new = on_gpu and torch.cuda.get_device_capability(device) >= _BF16
    dtype = torch.bfloat16 if is_new else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)

    def multiply() -> None:
        for _ in range(batch):
            torch.matmul(left, right, out=product)
        if on_gpu:
            torch.cuda.synchronize(device)

    for_s = GPU_S if on_gpu else CPU_S
    _repeat(multiply, _WARM_UP * for_s)
    times, seconds = _repeat(multiply, (1 - _WARM_UP) * for_s)
    if not torch.isfinite(product).all():
        raise RuntimeError("the product of two matrices is not finite")
    return times * batch * 2.0 * float(size) ** 3 / seconds / 1e12


def _repeat(act: Callable[[], None], for_s: float) -> tuple[int, float]:
    """Return how often it was done, and in how many seconds."""
    begin, times = time.perf_counter(), 0
    while not times or time.perf_counter() - begin < for_s:
        act()
        times += 1
    return times, time.perf_counter() - begin
