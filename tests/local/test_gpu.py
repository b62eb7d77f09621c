"""A run on a real GPU, from the command to a restart: its ranks are forks of one process."""

from __future__ import annotations

import os
import signal
import time

import pytest

from clusterrun.node.forge.process import IDLE_S
from tests.patience import wait_for
from tests.road import Project, wait_for_none

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(300)]
ONE = ("--cluster", "local", "--nodes", "1", "--gpus-per-node", "1", "--max-restarts", "2")
WAITS_AT_FIRST = """
import os, time, torch
from accelerate import Accelerator

accelerator = Accelerator()
total = accelerator.reduce(torch.ones(1 << 20, device=accelerator.device)).sum().item()
parent = open(f"/proc/{os.getppid()}/cmdline").read().strip("\\0")
print("sum", int(total), accelerator.device.type, os.getppid(), parent, flush=True)
time.sleep(600 if os.environ["CLUSTERRUN_ATTEMPT"] == "1" else 0)
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_a_restarted_rank_is_a_fork_of_the_same_process(here: Project, strategy: str) -> None:
    (here.path / "waits.py").write_text(WAITS_AT_FIRST)
    job_id = here.submit(*ONE, "--set", "launch.launcher=forge", "--strategy", strategy, "waits.py")
    wait_for(lambda: "sum" in here.logs(job_id), "the first attempt")
    time.sleep(IDLE_S + 8)  # the forge imports what the next attempt needs
    os.kill(here.events_of(job_id, "rank_start")[0]["pid"], signal.SIGKILL)
    assert here.cli("status", job_id, "--wait").returncode == 0, here.logs(job_id)
    lines = [here.raw_logs(job_id, "--attempt", number).decode() for number in ("1", "2")]
    sums = [line for text in lines for line in text.splitlines() if line.startswith("sum")]
    assert len(sums) == 2
    assert sums[0] == sums[1], "the same forge"
    assert sums[0].startswith("sum 1048576 cuda ")
    assert "clusterrun: forge of" in sums[0]
    wait_for_none(here, job_id)
