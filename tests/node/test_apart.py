"""Agents whose run directories are in different places, and what the home has of both."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterrun.backends.hosts.mirror import Receiver, Sender, bundle, sizes, write_bundle
from clusterrun.node.link.handshake import Realm
from clusterrun.rundir.paths import RunPaths
from tests.node.jobs import AgentJob
from tests.patience import patience

pytestmark = [pytest.mark.agents, pytest.mark.timeout(120)]

HELLO = """
import os, sys, time
for step in range(30):
    where = os.environ["CLUSTERRUN_RUN_DIR"]
    print("rank", os.environ["RANK"], "step", step, "in", where, flush=True)
    time.sleep(0.02)
if os.environ["RANK"] == os.environ.get("FAILS"):
    raise SystemExit(3)
"""


@pytest.mark.parametrize("fails", ["", "3"])
def test_a_node_with_a_run_directory_of_its_own_takes_part(
    stub_job: Callable[..., AgentJob], tmp_path: Path, fails: str
) -> None:
    job, said = stub_job(HELLO), []
    host = RunPaths(root=tmp_path / "gpu2" / "runs" / "job" / "run1")
    Realm(paths=job.paths, attempt=1).create_secret()
    write_bundle(host.root, bundle(job.paths))
    job.start_node(0, FAILS=fails)
    home, job.paths = job.paths, host
    job.paths.slurm_dir.mkdir()
    member = job.start_node(1, FAILS=fails, TMPDIR=str(tmp_path))
    job.paths = home
    receiver = Receiver(root=home.root, nodes=("local1",), say=said.append)
    sender = Sender(host.root, "local1", {})
    deadline = time.monotonic() + 60 * patience()
    while member.poll() is None and time.monotonic() < deadline:
        for chunk in sender.chunks(200):
            receiver.take(chunk)
        if job.text().count("rank 3 step") == 7:
            sender = Sender(host.root, "local1", sizes(home.root, "local1"))
        time.sleep(0.02)
    for chunk in sender.drain(deadline):
        receiver.take(chunk)
    assert (receiver.again(), said) == ({}, [])
    assert [bool(code) for code in job.wait()] == [bool(fails)] * 2
    assert home.log(1, "local1").read_bytes() == host.log(1, "local1").read_bytes()
    lines = [text for _, rank, _, text in job.log("local1") if rank == "3"]
    assert lines[:30] == [f"rank 3 step {n} in {host.root}" for n in range(30)]
    assert [event["code"] for event in job.events("ended")] == [3 if fails else 0] * 2
    assert {event["node"] for event in job.events("failed")} == ({"local1"} if fails else set())
    job.assert_clean()
