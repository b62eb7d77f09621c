"""The script of `doctor --nodes`, which checks the nodes of a run, alone and together; its reports.

Each rank multiplies matrices on its device; the first rank of a node also runs the node's checks.
Then the ranks that are there measure together. Files in the run directory hold what they find.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

from clusterrun.config.choices import Device
from clusterrun.health.examine import differences, examine, side_by_side
from clusterrun.health.gpus import LONG_S, gpu_facts
from clusterrun.health.machine import facts
from clusterrun.health.node import Needs, all_checks
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.reading import read_plan
from clusterrun.shared.files import read_json, write_whole
from clusterrun.shared.finding import Finding, fail, note, ok, skip
from clusterrun.shared.typed import decoded
from clusterrun.shared.wording import count

GPU_S, CPU_S = 0.5, 0.3  # of matrix products
_GPU_ROWS, _CPU_ROWS = 2048, 512  # rows of a matrix: 24 MiB of a GPU's memory, beside CUDA's own
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
    """Check this rank's node and device, then measure with the other ranks.

    The first rank of a node writes its report after each stage: each of them may hang.
    """
    root = Path(os.environ["CLUSTERRUN_RUN_DIR"])
    plan = read_plan(RunPaths(root=root))
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = f"{'cuda' if plan.device is Device.CUDA else 'cpu'}:{local_rank}"
    report = _check_node(plan, rank) if local_rank == 0 else None
    if report:
        write_node(root, report)
    product = partial(matmul_rate, _torch_device(device))
    computed = {device: _number_or_error("tflops", "error", product)}
    if report:
        report = replace(report, computed=computed)
        write_node(root, report)
    with suppress(ImportError, RuntimeError):  # no torch or first rank, or this rank is late
        mine = {"node": report and report.node, "computed": computed}
        found = _measure_together(plan, rank, mine)
        if report:
            report = replace(report, has_measured=True, **found)
            write_node(root, report)
    if report:
        write_node(root, replace(report, is_done=True))


def _check_node(plan: Plan, rank: int) -> NodeReport:
    """Run the checks that need no other node."""
    needs = Needs.of(plan, is_head=rank == 0)
    gpu_answer = needs.gpu_answer(LONG_S)
    checks = tuple(examine(all_checks(needs, gpu_answer), CHECKS_S))
    own = facts(gpu_facts(gpu_answer) if gpu_answer else {})
    return NodeReport(node=os.environ["CLUSTERRUN_NODE"], checks=checks, facts=own)


def _measure_together(plan: Plan, rank: int, mine: Mapping[str, Any]) -> dict[str, Any]:
    """Meet the other ranks, and time an all-reduce; return fields of the node's report.

    The first rank hosts the store, decides who is late and reports which nodes `met`. Only ranks
    whose device computed take part in the all-reduce. Raises ImportError, RuntimeError.
    """
    from torch.distributed import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience, is_first = timedelta(seconds=COMPUTE_S), rank == 0
    store = TCPStore(host, port, is_master=is_first, timeout=patience, wait_for_workers=False)
    store.set(f"ready/{rank}", json.dumps(mine))
    if is_first:
        store.set("ready", json.dumps(_gathered(store, plan)))
    store.wait(["ready"], timedelta(seconds=COMPUTE_S + SPARE_S))
    ready = {int(n): found for n, found in json.loads(store.get("ready")).items()}
    if rank not in ready:
        raise RuntimeError("this rank was late")
    (device,) = mine["computed"]  # each rank has one
    results = {n: next(iter(found["computed"].values())) for n, found in ready.items()}
    members = [n for n, result in results.items() if "tflops" in result]
    reduced = _timed_all_reduce(store, device, rank, members) if rank in members else {}
    store.set(f"done/{rank}", "")
    if is_first:  # the store ends with this process: wait until the others need it no longer
        until = time.monotonic() + 2 * REDUCE_S
        while time.monotonic() < until and not all(store.check([f"done/{n}"]) for n in ready):
            time.sleep(PAUSE_S)
        reduced["met"] = tuple(found["node"] for found in ready.values() if found["node"])
    # The first rank of a node also reports what the node's other ranks computed.
    of_node = [ready[n] for n in range(rank, rank + plan.procs_per_node) if n in ready]
    return {"computed": {k: v for each in of_node for k, v in each["computed"].items()}, **reduced}


def _gathered(store: Any, plan: Plan) -> dict[int, dict[str, Any]]:
    """Wait for the ranks; return what each found, but nothing of late ones: torch may not start."""
    began, ranks = time.monotonic(), range(plan.world_size)
    missing = set(ranks)
    while missing and time.monotonic() - began < COMPUTE_S:
        missing = {rank for rank in missing if not store.check([f"ready/{rank}"])}
        time.sleep(PAUSE_S)
    return {rank: json.loads(store.get(f"ready/{rank}")) for rank in ranks if rank not in missing}


def _timed_all_reduce(store: Any, device: str, rank: int, members: Sequence[int]) -> dict[str, Any]:
    """Time an all-reduce between `members`; return its time or its error as a report has it."""
    from torch.distributed import PrefixStore

    group = PrefixStore("group", store)
    reduce = partial(_all_reduce, _torch_device(device), group, members.index(rank), len(members))
    attempt = partial(_number_or_error, "reduced_s", "reduce_error", reduce)
    # In a thread: it may wait without a time limit for a member that never enters it.
    found = side_by_side({"reduced": attempt}, REDUCE_S)
    return found.get("reduced") or {"reduce_error": f"no answer within {REDUCE_S:g} s"}


def _number_or_error(name: str, error_name: str, measure: Callable[[], float]) -> dict[str, Any]:
    """Return {name: the number that `measure` returns}; if it raises, {error_name: the error}."""
    try:
        return {name: measure()}
    except Exception as error:  # noqa: BLE001 - whatever torch and the driver raise is the answer
        return {error_name: f"{type(error).__name__}: {error}"}


def _torch_device(device: str) -> str:
    """Return a device as torch names it: the number of a CPU is only that of its rank."""
    return "cpu" if device.startswith("cpu") else device


def _all_reduce(device: str, store: Any, rank: int, world: int) -> float:
    """Return the median time of an all-reduce. Raises RuntimeError for a wrong sum."""
    import torch
    import torch.distributed as dist

    if is_cuda := device.startswith("cuda"):
        torch.cuda.set_device(device)  # synchronize() waits for this one
    backend, wait = "nccl" if is_cuda else "gloo", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
    times = []
    for _ in range(TIMES):
        values = torch.full((MIB << 18,), float(rank + 1), device=device)  # of 4 bytes each
        started = time.perf_counter()
        dist.all_reduce(values)
        if is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        if set(map(float, values.aminmax())) != {world * (world + 1) / 2}:  # 1 + ... + world
            raise RuntimeError("the sum of an all-reduce is wrong")
    dist.destroy_process_group()
    return sorted(times)[TIMES // 2]


def matmul_rate(device: str) -> float:
    """Return the TFLOPS of a device. Raises RuntimeError for a wrong product, or torch's errors."""
    import torch

    on_gpu = torch.device(device).type == "cuda"
    size, batch = (_GPU_ROWS, _BATCH) if on_gpu else (_CPU_ROWS, 1)  # batch: products per wait
    has_bf16 = on_gpu and torch.cuda.get_device_capability(device) >= _BF16
    dtype = torch.bfloat16 if has_bf16 else torch.float32
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
    return times * batch * 2.0 * float(size) ** 3 / seconds / 1e12  # each: multiply and add


def _repeat(function: Callable[[], None], for_s: float) -> tuple[int, float]:
    """Call a function for `for_s` seconds, at least once; return how often, and the seconds."""
    begin, times = time.perf_counter(), 0
    while times == 0 or time.perf_counter() - begin < for_s:
        function()
        times += 1
    return times, time.perf_counter() - begin


# What the nodes found, a file for each: alone, and together

DIRECTORY: Final = "health"  # of the reports, in the run directory
OF_ALL: Final = "net.reduce"  # one node may make it fail on the others
_MEET: Final = "net.meet"
_CHOOSE_SHARED: Final = "set --run-dir to a directory that all nodes share"
_GLOO_SOURCE: Final = re.compile(r"^\w+: (\[[^]]*\] )?")  # gloo's source file
UNSTARTED: Final = "Slurm could not start the job's script on the node"
_SILENT: Final = (
    "no report within {:.0f} s: the node is stuck or very busy, or the job does not start there"
)
_LEAVE_OUT: Final = "leave the node out with --exclude {}, and tell the administrator"
_TRY: Final = "python -c 'import torch; print((torch.ones(9, 9) @ torch.ones(9, 9)).sum())'"


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What a node found, as far as its script has come."""

    node: str
    checks: tuple[Finding, ...]
    facts: Mapping[str, str]
    computed: Mapping[str, Mapping[str, Any]] | None = None  # by device; None: not yet
    has_measured: bool = False  # with the other nodes
    reduced_s: float | None = None  # the time of an all-reduce
    reduce_error: str = ""
    met: tuple[str, ...] | None = None  # nodes; only the first node knows; None: not yet
    is_done: bool = False  # its script ends


def write_node(run_dir: Path, report: NodeReport) -> None:
    """Write what a node found so far. Raises OSError."""
    directory = run_dir / DIRECTORY
    directory.mkdir(mode=0o700, exist_ok=True)
    write_whole(directory / f"{report.node}.json", json.dumps(dataclasses.asdict(report)))


def read_nodes(run_dir: Path) -> dict[str, NodeReport]:
    """Return the nodes' reports; leave out damaged ones."""
    found: dict[str, NodeReport] = {}
    for path in sorted((run_dir / DIRECTORY).glob("*.json")):
        try:
            found[path.stem] = decoded(NodeReport, {**(read_json(path) or {}), "node": path.stem})
        except ValueError:
            continue
    return found


def judge_nodes(
    nodes: Sequence[str],
    reports: Mapping[str, NodeReport],
    met: Collection[str] | None,
    unstarted: Collection[str],
    said: Mapping[str, str],
    waited_s: float,
    *,
    has_slurm: bool = True,
) -> dict[str, list[Finding]]:
    """Return the checks of each node.

    `met`: the nodes whose ranks met; None if no ranks could. `unstarted`: those on which Slurm
    could not start the job. `said`: why a node did not take part. `waited_s`: for the reports.
    `has_slurm`: hints may name its commands.
    """
    rates = {node: rate for node, each in reports.items() if (rate := _rate(each, "cuda"))}
    behind = slow(rates)  # their shares of the median rate
    errors = (report.reduce_error for report in reports.values())
    problem = _GLOO_SOURCE.sub("", max(errors, key=len, default=""))  # one fault: take the longest
    checks: dict[str, list[Finding]] = {}
    for node in nodes:
        report = reports.get(node)
        if report is None:
            reason = UNSTARTED if node in unstarted else said.get(node, "")
            about = {"has_joined": node in (met or ()), "has_slurm": has_slurm}
            checks[node] = [unreported(node, reason, waited_s, **about)]
            continue
        own = [ok("node.report", "reported"), *report.checks, _judge_compute(node, report, behind)]
        checks[node] = own if met is None else [*own, *_judge_together(report, met, problem)]
    return checks


def unreported(
    node: str,
    reason: str,
    waited_s: float = 0.0,
    *,
    has_joined: bool = False,
    has_slurm: bool = True,
) -> Finding:
    """Return the failure of a node without a report after `waited_s`; `reason`: why, if known."""
    if reason and reason != UNSTARTED:
        hint = f"correct this, or leave the node out with --exclude {node}"
        return fail("node.report", reason, hint)
    if has_joined:
        text = "the node reached the first node, but its report is not visible on this machine"
        return fail("node.report", text, _CHOOSE_SHARED)
    look = f"look at the node: scontrol show node {node}; " if has_slurm else ""
    hint = f"{look}{_LEAVE_OUT.format(node)}"
    return fail("node.report", reason or _SILENT.format(waited_s), hint)


def _rate(report: NodeReport, kind: str = "") -> float | None:
    """Return the rate of a node's slowest device of a kind ("": of any); None without one."""
    found = (report.computed or {}).items()
    rates = (each.get("tflops") for name, each in found if name.startswith(kind))
    return min((float(rate) for rate in rates if rate is not None), default=None)


def _judge_compute(node: str, report: NodeReport, behind: Mapping[str, float]) -> Finding:
    """Judge the matrix products; `behind`: slow nodes, with their share of the others' median."""
    name, found = "node.compute", report.computed
    if found is None:
        return fail(name, "torch did not answer in time", f"try on the node: {_TRY}")
    for device, each in found.items():
        if "error" in each:
            return fail(name, f"{device}: {each['error']}", f"try on the node: {_TRY}")
    rate = _rate(report) or 0.0
    text = f"a matrix product on {count(len(found), 'device')}: {rate:.3g} TFLOP/s"
    if node in behind:
        text = f"{text}, {behind[node]:.0%} of the median of the other nodes"
        return note(name, text, _LEAVE_OUT.format(node))
    return ok(name, text)


def _judge_together(report: NodeReport, met: Collection[str], problem: str) -> list[Finding]:
    """Judge what a node did with the others; `problem`: why their all-reduce failed, if it did."""
    if report.node not in met:
        return [skip(name, "its ranks did not meet the others") for name in (_MEET, OF_ALL)]
    if not report.has_measured:
        hint = "look for a process that hangs on the node, or a broken link"
        lost = fail(_MEET, "the node met the others, then it stopped answering", hint)
        return [lost, skip(OF_ALL, "not measured")]
    meeting = skip(_MEET, "no other node is present")
    if len(met) > 1:
        meeting = ok(_MEET, "met on a port of network.port_range")
    if report.reduce_error:
        hint = "name the interface with --set network.interface=NAME; look for a firewall"
        return [meeting, fail(OF_ALL, f"an all-reduce failed: {problem}", hint)]
    if report.reduced_s is None:
        return [meeting, skip(OF_ALL, "not measured")]
    return [meeting, ok(OF_ALL, f"an all-reduce of 4 MiB took {report.reduced_s * 1000:.0f} ms")]


def compare_nodes(
    nodes: Sequence[str], reports: Mapping[str, NodeReport], met: Collection[str] | None
) -> list[Finding]:
    """Return the checks that compare nodes; without `met`, also why no ranks could meet."""
    checks = differences({node: report.facts for node, report in reports.items()})
    if met is not None:
        return checks
    has_first = any(node in reports for node in nodes[:1])
    why = f"{'torch does not start on' if has_first else 'no report from'} the first node"
    return [*checks, skip(_MEET, why)]


def slow(values: Mapping[str, float], least: float = 0.75) -> dict[str, float]:
    """Return the nodes below `least` of the median of the others, with their share of it.

    The slowest comes first. Values that are not finite are left out.

    >>> slow({"n1": 100.0, "n2": 98.0, "n3": 50.0, "n4": 102.0})
    {'n3': 0.5}
    """
    ordered = sorted((value, node) for node, value in values.items() if math.isfinite(value))
    shares = {}
    for index, (value, node) in enumerate(ordered[: len(ordered) // 2]):  # only these may be slow
        others = [other for other, _ in (*ordered[:index], *ordered[index + 1 :])]
        median = others[(len(others) - 1) // 2]  # the lower one of two
        if median > 0 and value / median < least:
            shares[node] = value / median
    return shares


if __name__ == "__main__":
    main()
