"""Runs with logs on disk, and `clusterrun logs` in this process."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest

from clusterrun.backends.local.backend import identity
from clusterrun.cli.main import main
from clusterrun.config.choices import Cluster
from clusterrun.rundir import record as records
from clusterrun.rundir.attempt import amend_attempt
from clusterrun.rundir.end import write_end
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.state import JobState
from tests.logs.corpus import T0, raw, write_log


def without_times(text: str) -> str:
    return re.sub(r"^[0-9-]{2}:[0-9-]{2}:[0-9-]{2} ", "", text, flags=re.MULTILINE)


def controlled_by(pid: int, paths: RunPaths, seconds_ago: float = 0) -> None:
    """Let a process stand for the controller of a job."""
    controller = {
        "schema": "clusterrun.controller/1",
        "pid": pid,
        "identity": identity(pid),
        "host": socket.gethostname(),
        "started_at": time.time() - seconds_ago,
    }
    paths.controller.write_text(json.dumps(controller))


@dataclass
class LogsCommand:
    """A project with one run of 2 nodes x 8 ranks, and a shell in it."""

    path: Path
    record: JobRecord
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> RunPaths:
        return self.record.paths

    def write(self, node: str, *lines: bytes, attempt: int = 1) -> Path:
        return write_log(self.paths, attempt, node, lines)

    def start(self, *, seconds_ago: float = 5) -> None:
        """Let this process stand for the controller of the job."""
        controlled_by(os.getpid(), self.paths, seconds_ago)

    def end(self, state: str, exit_code: int) -> None:
        write_end(self.paths, JobState(state), exit_code)

    def argv(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "clusterrun", "logs", *args]

    def logs(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run the command line in this process, which is a hundred times faster.

        Leave out the times, which most tests ignore.
        """
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in "oe")
        before = os.getcwd()
        os.chdir(self.path)
        try:
            with (
                mock.patch.dict(os.environ, self.environ, clear=True),
                redirect_stdout(out),
                redirect_stderr(err),
            ):
                code = main(["logs", *args])
        finally:
            os.chdir(before)
        told = [stream.buffer.getvalue().decode() for stream in (out, err)]
        if "-t" not in args:
            told[0] = without_times(told[0])
        return subprocess.CompletedProcess(args, code, *told)

    def lines(self, *args: str) -> list[str]:
        done = self.logs(*args)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


def _record(root: Path, *, job_id: str, cluster: Cluster) -> JobRecord:
    return JobRecord(
        job_id=job_id,
        cluster=cluster,
        slurm_cluster=None,
        name="sft",
        run_id=root.name,
        run_dir=str(root),
        submitted_at=time.time(),
        argv=(),
        nodes=2,
        procs_per_node=8,
        gpus_per_node=8,
        world_size=16,
        strategy="ddp",
        device="cpu",
        workdir=str(root),
        time_minutes=0,
        versions={},
        user="me",
    )


def new_project(tmp_path: Path, *, job_id: str, cluster: Cluster) -> LogsCommand:
    root = tmp_path / "runs" / "sft" / "1121-103252-k3fq"
    root.mkdir(parents=True)
    record = _record(root, job_id=job_id, cluster=cluster)
    records.write(record)
    records.link_job(record.paths, job_id)
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    home = {
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "TERM": "xterm",
    }
    return LogsCommand(path=tmp_path, record=record, environ={**kept, **home})


@pytest.fixture
def here(tmp_path: Path) -> LogsCommand:
    """Return a job on simulated nodes that has not started."""
    return new_project(tmp_path, job_id="L1", cluster=Cluster.LOCAL)


@pytest.fixture
def ended(here: LogsCommand) -> LogsCommand:
    """Return one that has completed, with lines of several kinds."""
    here.start()
    here.write(
        "n1",
        raw(T0, None, "a", "8 ranks start"),
        raw(T0 + 1, 0, "o", "step 1"),
        raw(T0 + 2, 1, "o", "other"),
        raw(T0 + 5, 0, "o", "step 2"),
    )
    here.write("n2", raw(T0 + 3, 9, "e", "OSError: trouble"), raw(T0 + 4, 8, "o", "quiet"))
    here.end("COMPLETED", 0)
    return here


SECOND = 1_000_000


@pytest.fixture
def run(here: LogsCommand) -> LogsCommand:
    """Return a run of 2 nodes x 8 ranks that has ended, with side files and world."""
    here.start()
    here.write(
        "n1",
        raw(T0, None, "a", "8 ranks start"),
        raw(T0 + 1 * SECOND, 0, "o", "step 1 loss 2.5"),
        raw(T0 + 1 * SECOND, 3, "o", "three"),
        raw(T0 + 2 * SECOND, 0, "e", "UserWarning: slow"),
        raw(T0 + 3 * SECOND, 0, "o", "step 2 loss 2.25"),
        raw(T0 + 6 * SECOND, None, "l", "launcher says"),
        raw(T0 + 7 * SECOND, None, "z", "1 rank 9 failed"),
    )
    trouble = [
        raw(T0 + 4 * SECOND, 9, "o", "about to fail"),
        raw(T0 + 5 * SECOND, 9, "e", "ValueError: bad"),
        raw(T0 + 5 * SECOND, 8, "o", "eight"),
        raw(T0 + 5 * SECOND, 9, "o", "after"),
    ]
    here.write("n2", *trouble)
    amend_attempt(here.paths, 1, nodes=("n1", "n2"), procs_per_node=8)
    here.end("FAILED", 1)
    return here
