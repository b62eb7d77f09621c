"""What `logs` gives on a real Slurm is what the ranks wrote, whatever happens on the way."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.fixtures import another
from tests.namespaces import small_disk
from tests.patience import wait_for
from tests.road import LIGHT, Project, Recorded, Watcher, project
from tests.scripts import chatter

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(400)]

LARGE = 3
LARGE_MEMORY_BYTES = 14 << 30  # 64 launchers with torch and 512 ranks took 14 GB
MIB = 1 << 20


def read(here: Project, job_id: str, rank: int, stream: str = "out", *more: str) -> bytes:
    return here.raw_logs(job_id, "--rank", str(rank), "--stream", stream, *more)


def assert_is_stream(here: Project, job_id: str, rank: int, stream: str, expected: bytes) -> None:
    """Hold the files, and then what the command reads from them, to what a rank wrote."""
    files = b"".join(record.text for record in here.recorded(job_id, rank, stream))
    assert chatter.difference(files, expected) == "", f"files, rank {rank}, {stream}"
    told = read(here, job_id, rank, stream)
    assert chatter.difference(told, expected) == "", f"command, rank {rank}, {stream}"


def assert_whole_lines(together: bytes, ranks: int, amount: int) -> None:
    """Hold lines of all ranks to: each once, whole, and in its rank's order."""
    groups: dict[bytes, list[bytes]] = {}
    for text in together.splitlines(keepends=True):
        groups.setdefault(b" ".join(text.split(b" ", 3)[:3]), []).append(text)
    for rank in range(ranks):
        for stream in ("out", "err"):
            mine = b"".join(groups.get(b"chatter %d %s" % (rank, stream.encode()), []))
            expected = b"".join(chatter.lines(rank, stream, amount))
            assert chatter.difference(mine, expected) == "", (rank, stream)


def assert_beginning(
    here: Project, job_id: str, rank: int, *more: str, torn: bool = False
) -> bytes:
    """Hold a log to what a rank had written when it was ended, without being asked."""
    told = read(here, job_id, rank, "out", *more)
    assert chatter.difference(told, chatter.beginning(rank, len(told), torn=torn)) == "", rank
    # It may have been ended between a line and its account of it.
    assert 0 <= len(told) - here.written_by(rank) <= len(chatter.line(rank, 0) + chatter.FILLER)
    return told


# Everything that was written


def test_every_byte_of_every_rank_and_stream_is_there(cluster: Cluster, here: Project) -> None:
    job_id = here.submit("-N2", "--gpus-per-node", "4", *LIGHT, "chatter.py", "bytes", "7")
    assert cluster.wait_job(job_id) == "COMPLETED"
    for rank in range(8):
        for stream in ("out", "err"):
            assert_is_stream(here, job_id, rank, stream, chatter.written(7, rank, stream))


def test_lines_of_all_ranks_are_whole_and_in_each_ranks_order(
    cluster: Cluster, here: Project
) -> None:
    job_id = here.submit("-N2", "--gpus-per-node", "4", *LIGHT, "chatter.py", "lines", "400")
    assert cluster.wait_job(job_id) == "COMPLETED"
    assert_whole_lines(here.raw_logs(job_id, "-a"), 8, 400)


@pytest.fixture(scope="module")
def large_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """Bring up 64 nodes of 8 GPUs beside the others."""
    if psutil.virtual_memory().available < LARGE_MEMORY_BYTES:
        pytest.skip("64 nodes of 8 ranks need 14 GiB of memory")
    with another(LARGE, nodes=64, gpus_per_node=8, accounting=False) as large:
        yield large


@pytest.mark.long
@pytest.mark.timeout(900)
def test_lines_of_64_nodes_of_8_ranks_are_all_there(
    large_cluster: Cluster, here: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.extra = dict(large_cluster.env)
    job_id = here.submit("-N64", "--gpus-per-node", "8", *LIGHT, "chatter.py", "lines", "50")
    assert large_cluster.wait_job(job_id, timeout_s=800) == "COMPLETED"
    assert_whole_lines(here.raw_logs(job_id, "-a"), 512, 50)


# Ends that nobody asked for


@dataclass(frozen=True)
class Requeued:
    """A job that was followed from before its start, requeued, and failed in its second attempt."""

    here: Project
    job_id: str
    watcher: Watcher


@pytest.fixture(scope="module")
def requeued(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Requeued]:
    directory = tmp_path_factory.mktemp("requeued")
    here = project(directory / "project", directory / "state")
    held = ("-N2", "--gpus-per-node", "2", "--set", "slurm.hold=true")
    job_id = here.submit(*held, *LIGHT, "chatter.py", "endless", "3")
    watcher = here.start("logs", job_id, "-f", "-a", "-n", "all", "-o", "raw", "--exit-status")
    try:
        watcher.wait_for("is pending")
        cluster.run(["scontrol", "release", job_id])
        for rank in range(4):
            wait_for(lambda: here.written_by(rank) > 20_000, f"output of rank {rank}")  # noqa: B023
        cluster.run(["scontrol", "requeue", job_id])
        cluster.wait_job(job_id, "PENDING")
        cluster.start_requeued(job_id)
        assert cluster.wait_job(job_id) == "FAILED"
        watcher.end()
        yield Requeued(here, job_id, watcher)
    finally:
        watcher.process.kill()


def test_a_requeue_loses_nothing_and_its_attempts_are_read_apart_or_in_order(
    requeued: Requeued,
) -> None:
    here, job_id = requeued.here, requeued.job_id
    for rank in range(4):
        first = assert_beginning(here, job_id, rank, "--attempt", "1")
        second = read(here, job_id, rank, "out", "--attempt", "2")
        size = here.written_by(rank, attempt=2)
        assert chatter.difference(second, chatter.beginning(rank, size)) == "", rank
        told = read(here, job_id, rank, "out", "--attempt", "all")
        assert chatter.difference(told, first + second) == "", rank


def test_follow_goes_from_the_pending_job_to_its_end(requeued: Requeued) -> None:
    said = requeued.watcher.err.splitlines()
    marks = ("is pending", "== attempt 2 ==", f"job {requeued.job_id} FAILED after")
    at = [next((n for n, text in enumerate(said) if mark in text), -1) for mark in marks]
    assert -1 not in at, said
    assert at == sorted(at), said
    assert requeued.watcher.process.returncode == 3


def test_follow_shows_each_line_of_both_attempts_once_and_in_order(requeued: Requeued) -> None:
    shown = requeued.watcher.out.splitlines(keepends=True)
    for rank in range(4):
        written = b"".join(
            record.text
            for attempt in (1, 2)
            for record in requeued.here.recorded(requeued.job_id, rank, "out", attempt)
        )
        mine = b"".join(text for text in shown if chatter.is_of(text, rank))
        assert chatter.difference(mine, written) == "", rank


def test_a_rank_killed_in_mid_line_leaves_all_that_it_wrote(
    cluster: Cluster, here: Project
) -> None:
    job_id = here.submit("-N2", "--gpus-per-node", "2", *LIGHT, "chatter.py", "torn", "3")
    for rank in range(4):
        wait_for(lambda: here.written_by(rank) > 20_000, f"output of rank {rank}")  # noqa: B023
    started = {event["rank"]: event for event in wait_for_ranks(here, job_id, 4)}
    os.kill(started[3]["pid"], signal.SIGKILL)
    assert cluster.wait_job(job_id) == "FAILED"
    for rank in range(3):
        assert_beginning(here, job_id, rank)
    assert not assert_beginning(here, job_id, 3, torn=True).endswith(b"\n")
    told = here.json_lines("logs", job_id, "--rank", "3", "-n", "all")
    assert [line["partial"] for line in told if line["type"] == "line"][-1] is True


def test_ranks_go_on_while_their_agent_is_stopped_and_nothing_is_lost(
    cluster: Cluster, here: Project
) -> None:
    amount = 250_000  # 20 MB
    argv = ("-N2", "--gpus-per-node", "1", *LIGHT, "chatter.py", "burst", str(amount))
    job_id = here.submit(*argv)
    started = {event["rank"]: event for event in wait_for_ranks(here, job_id, 2)}
    node = started[1]["node"]
    agents = [p.pid for p in cluster.processes_on(node) if "clusterrun.node agent" in p.cmdline]
    assert len(agents) == 1
    os.kill(agents[0], signal.SIGSTOP)
    try:
        (here.path / "go").touch()
        wait_for((here.path / "said" / "1-1.done").exists, "the end of rank 1's burst")
        assert here.written_by(1) > 20_000_000
        assert here.recorded(job_id, 1, "out") == []  # the agent was really stopped
        time.sleep(3)
    finally:
        os.kill(agents[0], signal.SIGCONT)
    (here.path / "leave").touch()
    assert cluster.wait_job(job_id) == "COMPLETED"
    for rank in range(2):
        assert_is_stream(here, job_id, rank, "out", b"".join(chatter.burst(rank, amount)))


def wait_for_ranks(here: Project, job_id: str, count: int) -> list[dict[str, Any]]:
    def all_started() -> list[dict[str, Any]]:
        started = here.events_of(job_id, "rank_start")
        return started if len(started) == count else []

    found: list[dict[str, Any]] = wait_for(all_started, f"{count} ranks")
    return found


# A run directory without room


@pytest.fixture
def small_runs(here: Project) -> Iterator[Path]:
    """Have the run directories on a file system of 48 MiB."""
    with small_disk(here.path / "runs", 48) as disk:
        yield disk.root


def burst_into_full_directory(cluster: Cluster, here: Project, runs: Path, amount: int) -> str:
    """Let two ranks write while only 3 MiB are free, then make room; return the job's id."""
    node_local = here.path / "node-local"
    node_local.mkdir()
    spool = ("--set", "logs.spool=4MiB", "--env", f"TMPDIR={node_local}")
    argv = (*spool, "chatter.py", "burst", str(amount))
    job_id = here.submit("-N2", "--gpus-per-node", "1", *LIGHT, *argv)
    wait_for_ranks(here, job_id, 2)
    filler = runs / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(runs).free - 3 * MIB))
    (here.path / "go").touch()
    for rank in range(2):
        wait_for((here.path / "said" / f"1-{rank}.done").exists, f"the end of rank {rank}'s burst")
    # The space of what was dropped is given back in steps.
    wait_for(lambda: spooled_bytes(node_local) < 2 * 9 * MIB, "spools within their bounds")
    wait_for(lambda: shutil.disk_usage(runs).free < MIB, "a full disk")
    filler.unlink()
    (here.path / "leave").touch()
    assert cluster.wait_job(job_id) == "COMPLETED"
    return job_id


def spooled_bytes(node_local: Path) -> int:
    """Measure what the output of the ranks takes on the nodes' own disks."""
    return sum(path.stat().st_blocks * 512 for path in node_local.rglob("rank_*.out*"))


def test_a_full_run_directory_and_spool_count_each_byte_that_they_lose(
    cluster: Cluster, here: Project, small_runs: Path
) -> None:
    amount = 250_000  # 20 MB
    job_id = burst_into_full_directory(cluster, here, small_runs, amount)
    for rank in range(2):
        records = here.recorded(job_id, rank, "out")
        assert any(record.lost for record in records), rank
        written = b"".join(chatter.burst(rank, amount))
        assert chatter.difference(with_gaps_filled(records, written), written) == "", rank
        gaps = [
            line
            for line in here.json_lines("logs", job_id, "-a", "-n", "all")
            if line["type"] == "gap" and line["rank"] == rank
        ]
        assert sum(gap["bytes"] for gap in gaps) == sum(record.lost for record in records)


def with_gaps_filled(records: list[Recorded], written: bytes) -> bytes:
    """Put back what is said to be lost, from what was written."""
    whole = bytearray()
    for record in records:
        whole += written[len(whole) : len(whole) + record.lost] if record.lost else record.text
    return bytes(whole)


# Clocks

BEHIND = """
import os, time
if os.environ.get("SLURM_NODEID") == "1":
    def shifted(of, by):
        return lambda: of() - by
    def stat_shifted(of):
        def call(*args, **kwargs):
            found = of(*args, **kwargs)
            named = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
            named |= {name: named[name] - 20 for name in ("st_atime", "st_mtime", "st_ctime")}
            ns = ("st_atime_ns", "st_mtime_ns", "st_ctime_ns")
            named |= {name: named[name] - 20 * 10**9 for name in ns}
            return os.stat_result(tuple(found), named)
        return call
    time.time, time.time_ns = shifted(time.time, 20), shifted(time.time_ns, 20 * 10**9)
    os.stat, os.fstat = stat_shifted(os.stat), stat_shifted(os.fstat)
"""


def test_lines_of_a_node_whose_clock_is_wrong_are_in_the_order_in_which_they_came(
    cluster: Cluster, here: Project
) -> None:
    """The clock of the second node and the times of its files are 20 s behind, for Python."""
    (here.path / "lib").mkdir()
    (here.path / "lib" / "sitecustomize.py").write_text(BEHIND)
    wrong = ("--env", f"PYTHONPATH={here.path / 'lib'}")
    job_id = here.submit("-N2", "--gpus-per-node", "1", *LIGHT, *wrong, "chatter.py", "turns", "6")
    assert cluster.wait_job(job_id) == "COMPLETED"
    told = here.raw_logs(job_id, "-a").splitlines(keepends=True)
    mine = [text for text in told if text.startswith(b"chatter ")]
    assert mine == [chatter.line(number % 2, number) for number in range(6)]
