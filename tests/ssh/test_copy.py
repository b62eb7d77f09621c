"""Hosts that do not have the project get it from the submitting machine."""

from __future__ import annotations

import pytest

from tests.hosts import Hosts

pytestmark = pytest.mark.ssh

RUN = ("--cluster", "ssh", "--hosts", "h1,h2", "--nproc-per-node", "1", "--device", "cpu")
SCRIPT = """\
import os, sys
from torch import distributed
distributed.init_process_group("gloo")
print("of", distributed.get_world_size(), os.getcwd(), sorted(os.listdir()))
sys.exit(3 if os.environ["CLUSTERRUN_ATTEMPT"] == "1" else 0)
"""


def clusterrun(hosts: Hosts, *words: str, timeout_s: float = 60) -> tuple[int, str]:
    """Run a command in the project on the laptop; return its exit status and all its output."""
    argv = ["python", "-m", "clusterrun", *words]
    done = hosts.laptop.run(argv, cwd="/home/ann/proj", timeout_s=timeout_s)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(name="apart")
def _apart(hosts: Hosts) -> Hosts:
    hosts.share()
    hosts.laptop.write("proj/train.py", SCRIPT)
    hosts.laptop.write("proj/lib/a.py", "")
    return hosts


@pytest.mark.long
def test_hosts_get_the_project_and_a_resumed_run_uses_it(apart: Hosts) -> None:
    apart.laptop.write("proj/.env", "")
    words = ("submit", *RUN, "--max-restarts", "0", "train.py")
    code, said = clusterrun(apart, *words, timeout_s=120)
    assert code == 0, said
    assert "note: .env is not copied: it may hold a secret\n" in said
    assert "state      FAILED" in clusterrun(apart, "status", "--wait", timeout_s=120)[1]
    code, said = clusterrun(apart, "resume", "--from", "scratch", "--max-restarts", "1")
    assert code == 0, said
    assert "state      COMPLETED" in clusterrun(apart, "status", "--wait", timeout_s=120)[1]
    lines = [line for line in clusterrun(apart, "logs", "-a")[1].splitlines() if " of 2 " in line]
    assert len(lines) == 2
    for host, line in zip(("h1", "h2"), sorted(lines), strict=True):
        assert f"of 2 {apart[host].accounts['ann'].home}/clusterrun/runs/train/" in line
        assert line.endswith("/project ['lib', 'train.py']")
    assert apart.leftovers(r"file /home/") == []
