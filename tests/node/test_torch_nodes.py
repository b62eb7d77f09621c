"""Simulated nodes with the real accelerate and torch: gloo between two nodes of two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from clusterrun.rundir.events import Phase, read_start
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
for step in range(100000):
    dist.all_reduce(torch.ones(4))
    time.sleep(0.001)
    if step == 200 and accelerator.process_index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
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
    ends = read_start(job.paths, 1)
    # A fork imports nothing: rank 0 may be ready to join before the last rank has started.
    assert max(ends[Phase.LAUNCHER], ends[Phase.IMPORTS]) < ends[Phase.RENDEZVOUS]
    assert ends[Phase.RENDEZVOUS] == ready["ts"]
    assert [event["code"] for event in job.events("rank_exit")] == [0] * 4
    assert "terminate called" not in text
    job.assert_clean()
    assert list(job.tmp.iterdir()) == []


def test_the_rank_that_failed_first_is_named_not_those_that_lost_it(torch_job: Make) -> None:
    job = torch_job(COLLECTIVES).start()
    job.wait_for("ready", 4, 90)
    since = time.monotonic()
    assert job.wait() == [137, 137], job.text()
    job.assert_clean()
    assert time.monotonic() - since < 12 * patience()
    (failed,) = job.events("failed")
    assert (failed["node"], failed["rank"], failed["message"]) == ("local1", 2, "killed by SIGKILL")
