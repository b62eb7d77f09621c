"""Agents whose run directories are in different places, and what the home has of both."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterrun.backends.hosts.mirror import Receiver, bundle, news, write_bundle
from clusterrun.backends.hosts.start import Frame
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
    receiver = Receiver(root=home.root, node="local1", say=said.append)
    deadline = time.monotonic() + 60 * patience()
    is_whole = False
    while not is_whole and time.monotonic() < deadline:
        has_ended, wanted = member.poll() is not None, receiver.wants()
        assert wanted
        parts = list(news(host.root, **wanted, shifts={}))
        for path, at, data in parts[:1] if not has_ended else parts:
            receiver.take(Frame(kind="file", fields={"path": path, "at": at}, data=data))
        is_whole = has_ended and not parts
        time.sleep(0.02)
    assert said == []
    assert [bool(code) for code in job.wait()] == [bool(fails)] * 2
    assert home.log(1, "local1").read_bytes() == host.log(1, "local1").read_bytes()
    lines = [text for _, rank, _, text in job.log("local1") if rank == "3"]
    assert lines[:30] == [f"rank 3 step {n} in {host.root}" for n in range(30)]
    assert [event["code"] for event in job.events("ended")] == [3 if fails else 0] * 2
    assert {event["node"] for event in job.events("failed")} == ({"local1"} if fails else set())
    job.assert_clean()
