"""What the parts of a node share: who it is, its ports, GPUs and processes, and why it ends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from clusterrun.health.gpus import Answer, GpuAnswer
from clusterrun.health.nvml import NvmlGpu
from clusterrun.node.base import processes
from clusterrun.node.base.causes import Cause, Ending, Failure, NodeError, lost_node
from clusterrun.node.base.identity import identity
from clusterrun.node.base.ports import candidate_ports, free_port, listening_socket
from clusterrun.node.base.tasks import SharedDisk, Tasks, guarded
from clusterrun.node.forward.spool import Spool
from clusterrun.node.watch import preflight
from clusterrun.node.watch.ranks import Ranks
from clusterrun.shared.shell import Completed
from tests.patience import patience, wait_for


def failure(**changes: Any) -> Failure:
    given = {
        "at": 10.0,
        "node": "n1",
        "rank": 3,
        "code": 1,
        "signal": 0,
        "cause": Cause.EXCEPTION,
        "message": "ValueError: x",
    }
    return Failure(**{**given, **changes})


def test_the_first_failure_is_the_earliest_that_is_no_consequence() -> None:
    late, early, lost = failure(at=2.0), failure(at=1.0, rank=7), lost_node("n2", "gone")
    assert Ending.of_first([late, early]).failure is early
    for consequence in (
        failure(at=1.0, signal=15, cause=Cause.SIGNAL),
        failure(at=1.0, rank=None, cause=Cause.LAUNCHER),
        failure(at=1.0, cause=Cause.WORLD_ELSEWHERE),
        failure(at=1.0, has_lost_peer=True),
    ):
        assert Ending.of_first([consequence, late]).failure is late
        assert Ending.of_first([consequence]).failure is consequence
    by_slurm = failure(at=1.0, rank=None, cause=Cause.CANCELLED, code=124)
    assert Ending.of_first([by_slurm, lost]).failure is lost  # Slurm cancels what is left
    assert Ending.of_first([by_slurm, late]).failure is by_slurm


async def test_a_rank_that_has_reported_its_failure_is_not_waited_for_if_one_looks_closely(
    tmp_path: Path,
) -> None:
    found: list[Failure] = []
    spool = Spool(root=tmp_path)
    ranks = Ranks(
        spool=spool, node="n1", launched=dict, happened=lambda event: None, failed=found.append
    )
    now = time.time()
    events = (
        {"ts": now, "type": "rank_start", "pid": os.getpid()},
        {"ts": now, "type": "rank_exit", "code": 3, "cause": "exception", "message": "x"},
    )
    spool.events(0).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    ranks.update()
    assert found == []
    ranks.update(closely=True)
    ranks.close()
    assert [failure.code for failure in found] == [3]


SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "a[01-04]",
    "SLURM_STEP_NODELIST": "a[02-03]",
    "SLURMD_NODENAME": "a03",
}


def test_a_node_knows_who_it_is_and_where_the_conductor_is() -> None:
    who = identity(SLURM, 2)
    assert (who.job_id, who.node, who.node_rank, who.is_first) == ("4711", "a03", 1, False)
    who = identity({**SLURM, "SLURM_NODEID": "0"}, 2)
    assert (who.conductor, who.nodes, who.is_first) == ("a01", ("a02", "a03"), True)
    env = {"CLUSTERRUN_LOCAL_NODE_RANK": "1", "CLUSTERRUN_LOCAL_JOB_ID": "L3"}
    who = identity({**SLURM, **env}, 2)
    assert (who.job_id, who.node, who.nodes) == ("L3", "local1", ("local0", "local1"))
    assert who.conductor == "local0"


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({}, "not a task of a job"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a02"}, "Slurm gave 1 nodes"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a[02"}, "cannot read the node list"),
        ({"SLURM_JOB_ID": "1", "SLURM_NODEID": "0"}, "cannot read the node list"),
    ],
)
def test_an_agent_that_cannot_know_its_place_fails_loudly(env: dict[str, str], text: str) -> None:
    with pytest.raises(NodeError, match=text) as caught:
        identity(env, 2)
    assert caught.value.code == 121


WITHIN = (20000, 29999)


@pytest.mark.parametrize("within", [WITHIN, (40000, 40001), (3000, 3796)])
def test_ports_differ_and_stay_in_their_range(within: tuple[int, int]) -> None:
    for job in range(100):
        ports = candidate_ports(str(job), 1, within)
        assert len({*ports}) == min(16, within[1] - within[0] + 1)
        assert within[0] <= min(ports) < max(ports) <= within[1]


def test_a_port_in_use_is_passed_over() -> None:
    ports = candidate_ports("test of ports", 1, WITHIN)
    first = free_port(ports)
    with listening_socket(first):
        assert free_port(ports) != first
    assert free_port(ports) == first


H100, T4 = ({"capability": capability} for capability in ((9, 0), (7, 5)))


def answer(*gpus: dict[str, Any], **fields: str) -> GpuAnswer:
    found = GpuAnswer()
    listed = [NvmlGpu(name=str(number), **gpu) for number, gpu in enumerate(gpus)]
    found.__dict__["answer"] = Answer(gpus=listed, **fields)
    return found


@pytest.mark.parametrize(
    ("visible", "count"), [("0,1,2,3", 4), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-abc", 1)]
)
def test_visible_devices_are_counted_as_cuda_does(visible: str, count: int) -> None:
    env = {"CUDA_VISIBLE_DEVICES": visible, "SLURM_GPUS_ON_NODE": "8"}
    assert preflight.visible_gpus(env, answer()) == count
    assert count or preflight.gpu_capabilities(env, answer(H100)) == ()


def test_slurms_number_counts_where_no_device_is_named_and_then_the_drivers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert preflight.visible_gpus({"SLURM_GPUS_ON_NODE": "8"}, answer()) == 8
    assert preflight.visible_gpus({}, answer(H100, T4)) == 2
    assert preflight.visible_gpus({}, answer(absent="no driver")) is None
    assert preflight.gpu_capabilities({}, answer(H100, T4)) == ((9, 0), (7, 5))
    done = Completed(rc=0, stdout="a warning\n[[9, 0], [8, 0]]\n", stderr="")  # torch's, apart
    monkeypatch.setattr(preflight.shell, "run_once", lambda *_: done)
    for unknown in (answer(absent="no driver"), answer(H100, {}), answer(H100, problem="it hangs")):
        assert preflight.gpu_capabilities({}, unknown) == ((9, 0), (8, 0))


TREE = "sleep 60 & (sleep 61 & exec sleep 62) & wait"


def test_children_are_found_without_a_look_at_other_processes() -> None:
    with subprocess.Popen(["bash", "-c", TREE]) as tree:
        try:
            found = wait_for(lambda: _two(processes._children(tree.pid)), "two children")
            assert sorted(processes._children_among_all(tree.pid)) == sorted(found)
            (below,) = (pid for child in found for pid in processes._children(child))
            assert {tree.pid, below, *found} <= set(processes.descendants())
        finally:
            assert processes.kill_descendants() == []
    assert processes._children(tree.pid) == []


def _two(found: list[int]) -> list[int]:
    return found if len(found) == 2 and any(map(processes._children, found)) else []


@pytest.mark.parametrize("argv", [(), ("agent", "/x", "one")])
def test_a_wrong_call_shows_the_usage(argv: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "clusterrun.node", *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: python -m clusterrun.node agent RUN_DIR ATTEMPT")


# Beside the main work: a task that fails is noticed, a disk may stall


async def fail(after_s: float = 0.0) -> None:
    await asyncio.sleep(after_s)
    raise ValueError("it broke")


async def test_a_task_that_fails_is_noticed_and_others_run_on() -> None:
    found: list[tuple[str, str]] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: found.append((context["message"], str(context["exception"])))
    )
    tasks = Tasks()
    tasks.start(fail())
    lasting = tasks.start(asyncio.sleep(60))
    await asyncio.sleep(0.05)
    assert list(tasks) == [lasting]
    tasks.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not [*tasks]
    assert found == [("fail failed", "it broke")]


async def test_what_a_guard_raises_ends_the_waiting() -> None:
    with pytest.raises(ValueError, match="it broke"):
        await guarded(asyncio.sleep(60), fail())
    assert await guarded(asyncio.sleep(0.01, "done"), fail(60)) == "done"


async def test_work_on_the_shared_disk_is_done_in_order_while_the_loop_runs() -> None:
    done: list[int] = []

    may_end = threading.Event()

    def slow(number: int) -> int:
        may_end.wait(60 * patience())
        done.append(number)
        return number

    disk = SharedDisk()
    futures = [disk.do(lambda number=number: slow(number)) for number in range(3)]
    await asyncio.sleep(0.05)
    assert done == []
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(futures[0], 0.01)
    may_end.set()
    assert await asyncio.gather(*futures[1:]) == [1, 2]
    assert done == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        await disk.do(lambda: 1 // 0)
    assert await disk.do(lambda: 5) == 5


def test_a_disk_that_hangs_keeps_nobody_from_leaving() -> None:
    async def story() -> Any:
        return SharedDisk().do(threading.Event().wait)

    since = time.monotonic()
    asyncio.run(story())
    assert time.monotonic() - since < 5 * patience()
