"""The script of `doctor --nodes`: check the nodes of a run, alone and together.

Each rank multiplies matrices on its device; the first rank of a node also runs the node's checks.
Then the ranks that are there measure together. Files in the run directory hold what they find.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

from clusterrun.config.choices import Device
from clusterrun.health import together
from clusterrun.health.examine import examine, side_by_side
from clusterrun.health.gpus import LONG_S, gpu_facts
from clusterrun.health.machine import facts
from clusterrun.health.node import Needs, all_looks
from clusterrun.health.together import NodeReport
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.plan import read_plan

GPU_S, CPU_S = 0.5, 0.3  # of matrix products
_OF_GPU, _OF_CPU = 2048, 512  # rows of a matrix: 24 MiB of a GPU's memory, beside CUDA's own
_BATCH: Final = 32  # products between two looks at the clock
_WARM_UP: Final = 0.25  # of the time, for the clocks to rise
MIB: Final = 4  # of the all-reduce
TIMES: Final = 5
TIMEOUT_S: Final = 10.0
_BF16: Final = (8, 0)  # the first compute capability with bf16

CHECKS_S: Final = 4.0
COMPUTE_S: Final = 40.0  # torch may be imported from a busy file system
REDUCE_S: Final = TIMEOUT_S + 3.0
SPARE_S: Final = 3.0
PAUSE_S: Final = 0.05


def main() -> None:
    """Check this rank's part, and take part in what all do; an error is what is reported."""
    root = Path(os.environ["CLUSTERRUN_RUN_DIR"])
    plan = read_plan(RunPaths(root=root))
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = f"{'cuda' if plan.device is Device.CUDA else 'cpu'}:{local}"
    report = None
    if local == 0:
        report = _alone(plan, rank)
        together.write_node(root, report)
    computed = {device: _answer("tflops", "error", lambda: matmul_rate(_of_torch(device)))}
    if report:
        report = replace(report, computed=computed)
        together.write_node(root, report)
    with suppress(ImportError, RuntimeError):  # without torch, or the first rank: they do not meet
        found = _measure(plan, rank, {"node": report and report.node, "computed": computed})
        if report:
            report = replace(report, has_measured=True, **found)
            together.write_node(root, report)
    if report:
        together.write_node(root, replace(report, is_done=True))


def _alone(plan: Plan, rank: int) -> NodeReport:
    needs = Needs.of(plan, is_head=rank == 0)
    asked = needs.gpu_answer(LONG_S)
    checks = tuple(examine(all_looks(needs, asked), CHECKS_S))
    own = facts(gpu_facts(asked) if asked else {})
    return NodeReport(node=os.environ["CLUSTERRUN_NODE"], checks=checks, facts=own)


def _measure(plan: Plan, rank: int, mine: Mapping[str, Any]) -> dict[str, Any]:
    """Meet the other ranks, and reduce with those that can; return fields of the node's report.

    The first rank hosts their store, and waits for the others; a late one is left out.
    Raises ImportError, RuntimeError.
    """
    from torch.distributed import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience, is_first = timedelta(seconds=COMPUTE_S), rank == 0
    store = TCPStore(host, port, is_master=is_first, timeout=patience, wait_for_workers=False)
    store.set(f"ready/{rank}", json.dumps(mine))
    if is_first:
        store.set("ready", json.dumps(_gathered(store, plan)))
    store.wait(["ready"], timedelta(seconds=COMPUTE_S + SPARE_S))
    known = {int(each): found for each, found in json.loads(store.get("ready")).items()}
    if rank not in known:
        raise RuntimeError("this rank was late")
    fit = [n for n, found in known.items() if "error" not in next(iter(found["computed"].values()))]
    device = next(iter(mine["computed"]))
    reduced = _reduced(store, device, fit.index(rank), len(fit)) if rank in fit else {}
    store.set(f"done/{rank}", "")
    if is_first:  # the store ends with it
        until = time.monotonic() + 2 * REDUCE_S
        while time.monotonic() < until and not all(store.check([f"done/{n}"]) for n in known):
            time.sleep(PAUSE_S)
        reduced["met"] = tuple(found["node"] for found in known.values() if found["node"])
    of_node = [known[n] for n in range(rank, rank + plan.procs_per_node) if n in known]
    return {"computed": {k: v for each in of_node for k, v in each["computed"].items()}, **reduced}


def _gathered(store: Any, plan: Plan) -> dict[int, dict[str, Any]]:
    """Wait for the ranks that may still come: torch may not start on a node."""
    began, ranks = time.monotonic(), range(plan.world_size)
    missing = set(ranks)
    while missing and time.monotonic() - began < COMPUTE_S:
        missing = {rank for rank in missing if not store.check([f"ready/{rank}"])}
        time.sleep(PAUSE_S)
    return {rank: json.loads(store.get(f"ready/{rank}")) for rank in ranks if rank not in missing}


def _reduced(store: Any, device: str, place: int, world: int) -> dict[str, Any]:
    from torch.distributed import PrefixStore

    reduce = partial(_all_reduce, _of_torch(device), PrefixStore("group", store), place, world)
    # A rank that is in the group may wait for others that are not, without a time limit.
    part = partial(_answer, "reduced_s", "reduce_error", reduce)
    found = side_by_side({"reduced": part}, REDUCE_S)
    return found.get("reduced") or {"reduce_error": f"no answer within {REDUCE_S:g} s"}


# What may hang


def _answer(name: str, failed: str, act: Callable[[], float]) -> dict[str, Any]:
    """Return a number by its name, or the error."""
    try:
        return {name: act()}
    except Exception as error:  # noqa: BLE001 - whatever torch and the driver raise is the answer
        return {failed: f"{type(error).__name__}: {error}"}


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


if __name__ == "__main__":
    main()
