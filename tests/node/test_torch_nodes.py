"""Simulated nodes with the real accelerate and torch: gloo between two nodes of two ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from clusterrun.rundir.startup import Phase, read_start
from tests.node.jobs import ROOT, AgentJob
from tests.patience import patience

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]
Make = Callable[..., AgentJob]

WORLD = ROOT / "tests" / "scripts" / "world.py"
# All ranks are inside collectives when one of them ends.
COLLECTIVES = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from accelerate import Accelerator

accelerator = Accelerator()
dist.barrier()
print("ready", flush=True)
how, victim = sys.argv[1], int(sys.argv[2])
for step in range(100000):
    dist.all_reduce(torch.ones(4))
    time.sleep(0.001)
    if step == 200 and accelerator.process_index == victim:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise ValueError("no such tokenizer")
"""


def test_two_nodes_of_two_ranks_are_one_world(torch_job: Make) -> None:
    job = torch_job(WORLD, "a b", timeout_s=90).start()
    assert job.wait() == [0, 0], job.text() + job.errors()
    text = job.text()
    assert "sum 6 hosts 1 args ['a b']" in text
    assert "timeout 90 s" in text
    for rank in range(4):
        assert f"{rank} o rank {rank}/4 on" in text
    (ready,) = job.events("world_ready")
    assert (ready["world_size"], ready["hosts"]) == (4, ["local0", "local1"])
    assert (ready["backend"], ready["device"]) == ("gloo", "cpu")
    ends = read_start(job.paths, 1)[0]
    # A fork imports nothing: rank 0 may be ready to join before the last rank has started.
    assert max(ends[Phase.LAUNCHER], ends[Phase.IMPORTS]) < ends[Phase.RENDEZVOUS]
    assert ends[Phase.RENDEZVOUS] == round(ready["ts"], 3)
    assert [event["code"] for event in job.events("rank_exit")] == [0] * 4
    assert "terminate called" not in text
    job.assert_clean()
    assert list(job.tmp.iterdir()) == []


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("kill", 137, "killed by SIGKILL"),
        pytest.param("raise", 1, "ValueError: no such tokenizer", marks=pytest.mark.long),
    ],
)
def test_the_rank_that_failed_first_is_named_not_those_that_lost_it(
    torch_job: Make, how: str, code: int, message: str
) -> None:
    job = torch_job(COLLECTIVES, how, "2").start()
    job.wait_for("ready", 4, 90)
    since = time.monotonic()
    assert job.wait() == [code, code], job.text()
    job.assert_clean()
    assert time.monotonic() - since < 12 * patience()
    (failed,) = job.events("failed")
    assert (failed["node"], failed["rank"], failed["message"]) == ("local1", 2, message)


@pytest.mark.long
def test_a_lost_agent_ends_ranks_that_wait_in_a_collective(torch_job: Make) -> None:
    job = torch_job(COLLECTIVES, "none", "0").start()
    job.wait_for("ready", 4, 90)
    since = time.monotonic()
    os.kill(job.agent_pid("local1"), signal.SIGKILL)
    assert job.wait() == [123, -9]
    job.assert_clean()
    assert time.monotonic() - since < 10 * patience()
    (failed,) = job.events("failed")
    assert (failed["node"], failed["cause"]) == ("local1", "node_lost")


@pytest.mark.long
def test_ranks_that_each_make_a_world_of_their_own_are_caught_with_the_reason(
    torch_job: Make,
) -> None:
    job = torch_job(WORLD, env={"ACCELERATE_USE_CPU": "false"}).start()
    assert job.wait() == [120, 120], job.text()
    assert "accelerate has a world of 1, but the job requested 4" in job.errors()
    assert "no GPU is usable here and ACCELERATE_USE_CPU is not true" in job.errors()
