"""How jobs stand: files and schedulers put together, each asked as little as possible."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clusterrun.backends import select
from clusterrun.backends.base import SchedulerJob
from clusterrun.backends.evidence import UNHEARD, read_evidence
from clusterrun.backends.local.backend import LocalBackend
from clusterrun.backends.slurm.backend import SlurmBackend
from clusterrun.backends.slurm.reasons import REASONS, explain
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.config.choices import Cluster
from clusterrun.errors import SchedulerUnreachableError
from clusterrun.rundir import create, record
from clusterrun.rundir.attempt import amend_attempt
from clusterrun.rundir.end import Cause, Reason, read_end, write_request
from clusterrun.rundir.events import FIRST_BYTES, LAST_BYTES
from clusterrun.rundir.outcome import Next, Outcome, write_outcome
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.state import JobState
from tests.patience import patience

from .builders import make_bundle, make_plan, make_run

T0 = 1_795_257_574.0


@dataclass(eq=False)
class Scheduler:
    """A scheduler that knows what it was told, and counts how often it was asked."""

    jobs: dict[str, SchedulerJob] = field(default_factory=dict)
    error: SchedulerUnreachableError | None = None
    asked: list[list[str]] = field(default_factory=list)

    def query(
        self,
        job_ids: Sequence[str],
        *,
        since: float | None = None,
        max_age_s: float | None = None,
    ) -> dict[str, SchedulerJob]:
        self.asked.append(list(job_ids))
        if self.error:
            raise self.error
        return {job_id: self.jobs[job_id] for job_id in job_ids if job_id in self.jobs}


@pytest.fixture
def runs(tmp_path: Path) -> RunsDir:
    return RunsDir(root=tmp_path / "runs")


def make(runs: RunsDir, job_id: str = "7", **changes: Any) -> JobRecord:
    plan = make_plan(runs.root.parent, cluster=Cluster.SLURM, time_minutes=60)
    paths = create.create_run(runs, plan.name, f"r{job_id}", make_bundle(plan))
    made = record.new_record(plan, paths, argv=(), now=T0 - 100)
    made = dataclasses.replace(made, job_id=job_id, **changes)
    record.write(made)
    return made


def end(paths: RunPaths, state: str, code: int, at: float = T0 + 60) -> None:
    data = {"schema": "clusterrun.end/1", "state": state, "exit_code": code, "ended_at": at}
    paths.end.write_text(json.dumps(data))


def events(paths: RunPaths, node: str, *rows: dict[str, Any], attempt: int = 1) -> None:
    paths.attempt(attempt).mkdir(parents=True, exist_ok=True)
    paths.events_dir.mkdir(exist_ok=True)
    with paths.events(node).open("a") as file:
        for row in rows:
            file.write(json.dumps({"ts": T0, "attempt": attempt, "node": node, **row}) + "\n")


def said(state: JobState, **values: Any) -> SchedulerJob:
    return SchedulerJob(
        **{"job_id": "7", "source": "squeue", "asked_at": T0 + 1000, **values}, state=state
    )


def status(made: JobRecord, job: SchedulerJob | None) -> JobStatus:
    scheduler = Scheduler({made.job_id: job} if job else {})
    (found,) = statuses([made], lambda _: scheduler)
    return found


# Asking


def test_each_scheduler_is_asked_once_whatever_the_number_of_jobs(runs: RunsDir) -> None:
    made = [make(runs, str(number)) for number in range(10, 20)]
    one, other = Scheduler(), Scheduler()
    found = statuses(made, lambda rec: one if int(rec.job_id) < 15 else other)
    assert [entry.record for entry in found] == made
    assert one.asked == [["10", "11", "12", "13", "14"]]
    assert other.asked == [["15", "16", "17", "18", "19"]]


def test_a_completed_job_costs_no_question(runs: RunsDir) -> None:
    made = make(runs)
    events(made.paths, "n1", {"type": "started", "host": "n1"})
    end(made.paths, "COMPLETED", 0)
    scheduler = Scheduler()
    (found,) = statuses([made], lambda _: scheduler)
    assert (found.state, found.exit_code, found.elapsed_s) == (JobState.COMPLETED, 0, 60)
    assert (found.start, found.end, found.nodelist) == (T0, T0 + 60, "n1")
    assert scheduler.asked == []


def test_the_time_of_a_job_counts_its_restarts_in_place(runs: RunsDir) -> None:
    made = make(runs)
    (made.paths.attempts_dir / "2").mkdir(parents=True)
    made.paths.outcome(1).parent.mkdir()
    events(made.paths, "n1", {"type": "started", "host": "n1", "ts": T0 + 50}, attempt=2)
    for followed, elapsed_s in ((Next.RELAUNCH, 60), (Next.REQUEUE, 10)):
        first = Outcome(
            **{
                "attempt": 1,
                "job_id": "7",
                "started_at": T0,
                "ended_at": T0 + 49,
                "nodes": ("n1",),
            },
            **{"code": 137, "cause": Cause.SIGNAL, "reason": "killed", "next": followed},
        )
        made.paths.outcome(1).write_text(first.to_json())
        end(made.paths, "COMPLETED", 0)
        assert status(made, None).elapsed_s == elapsed_s


def test_a_silent_scheduler_is_told_and_files_still_speak(runs: RunsDir) -> None:
    running, ended = make(runs, "7"), make(runs, "8")
    events(running.paths, "n1", {"type": "step", "step": 5, "total": 10})
    end(ended.paths, "FAILED", 3)
    error = SchedulerUnreachableError("squeue got no answer", cause="Socket timed out")
    scheduler = Scheduler(error=error)
    first, second = statuses([running, ended], lambda _: scheduler)
    assert (first.state, first.error, first.progress.step) == (JobState.UNKNOWN, error, 5)
    assert first.notes == ("squeue got no answer",)
    assert (second.state, second.error, second.exit_code) == (JobState.FAILED, None, 3)


def test_a_job_that_nobody_knows_is_unknown_never_finished(runs: RunsDir) -> None:
    scheduler = Scheduler()
    job, interrupted = statuses([make(runs), make(runs, "")], lambda _: scheduler)
    assert (job.state, job.exit_code) == (JobState.UNKNOWN, None)
    assert job.notes == ("the scheduler no longer knows this job",)
    assert interrupted.state is JobState.UNKNOWN
    assert "submission was interrupted; look for it with 'squeue" in interrupted.notes[0]
    here = dataclasses.replace(interrupted.record, cluster=Cluster.LOCAL)
    assert statuses([here], lambda _: scheduler)[0].notes == ("its submission was interrupted",)
    assert scheduler.asked == [["7"]]


def test_jobs_of_one_scheduler_are_asked_about_together(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    here = record.new_record(plan, make_run(tmp_path, plan, make_bundle(plan)), argv=(), now=1)
    assert select.backend_of(here) == LocalBackend(runs_dir=RunsDir(root=tmp_path / "runs"))
    there = dataclasses.replace(here, cluster=Cluster.SLURM)
    assert select.backend_of(there) == select.backend_of(dataclasses.replace(there, name="other"))
    assert hash(select.backend_of(there)) == hash(SlurmBackend())
    elsewhere = dataclasses.replace(there, slurm_cluster="tuxA")
    assert select.backend_of(elsewhere) == SlurmBackend(slurm_cluster="tuxA")


# Choosing between what files and scheduler say


S = JobState


def test_the_state_is_that_of_who_knows_best(runs: RunsDir) -> None:
    early, late, again = {"asked_at": T0 - 5}, {"asked_at": T0 + 5}, {"start": T0 + 200}
    table: list[tuple[str | None, JobState | None, dict[str, Any], JobState]] = [
        # Slurm knows better how a job failed ...
        ("FAILED", S.OUT_OF_MEMORY, {}, S.OUT_OF_MEMORY),
        ("CANCELLED", S.TIMEOUT, {}, S.TIMEOUT),
        ("CANCELLED", S.PREEMPTED, {}, S.PREEMPTED),
        # ... unless it only sees the script's status
        ("TIMEOUT", S.FAILED, {}, S.TIMEOUT),
        ("FAILED", S.COMPLETED, {}, S.FAILED),
        # the files know sooner
        ("FAILED", S.RUNNING, {}, S.FAILED),
        ("FAILED", S.COMPLETING, {}, S.FAILED),
        ("FAILED", S.PENDING, {"asked_at": T0 + 50}, S.FAILED),
        # a job that Slurm ended may start again
        ("CANCELLED", S.RUNNING, {}, S.COMPLETING),
        ("CANCELLED", S.COMPLETING, {}, S.COMPLETING),
        ("CANCELLED", S.PENDING, {"reason": "BeginTime"}, S.PENDING),
        ("FAILED", S.PENDING, {}, S.PENDING),
        ("CANCELLED", S.RUNNING, again, S.RUNNING),
        # nobody else knows
        ("FAILED", None, {}, S.FAILED),
        ("CANCELLED", S.UNKNOWN, {}, S.CANCELLED),
        # the files know nothing, or the answer is old: the job has started since
        (None, S.NODE_FAIL, {}, S.NODE_FAIL),
        (None, S.COMPLETED, {}, S.COMPLETED),
        (None, S.PENDING, early, S.RUNNING),
        (None, S.PENDING, late, S.PENDING),
    ]
    made = make(runs)
    events(made.paths, "n1", {"type": "started", "host": "n1"})
    for row in table:
        ended, job, about, expected = row
        made.paths.end.unlink(missing_ok=True)
        if ended:
            end(made.paths, ended, 3)
        assert status(made, said(job, **about) if job else None).state is expected, row


def test_an_end_of_an_earlier_attempt_is_no_end(runs: RunsDir) -> None:
    made = make(runs)
    events(made.paths, "n1", {"type": "started"}, attempt=1)
    end(made.paths, "COMPLETED", 0)
    later = made.paths.end.stat().st_mtime_ns + 1_000_000
    made.paths.attempt(2).mkdir()
    os.utime(made.paths.attempts_dir, ns=(later, later))
    assert read_end(made.paths) is None
    assert status(made, said(JobState.RUNNING)).state is JobState.RUNNING
    made.paths.outcome(2).touch()  # it has ended, too: a copied run has other times
    assert read_end(made.paths) is not None


def test_a_code_above_128_is_a_signal_and_without_an_end_slurms_counts(runs: RunsDir) -> None:
    made = make(runs)
    about = {"source": "sacct", "end": T0 + 9, "note": "accounting does not answer: x"}
    found = status(made, said(JobState.FAILED, exit_code=0, exit_signal=9, **about))
    assert found.notes == ("accounting does not answer: x",)
    assert (found.exit_code, found.exit_signal, found.end) == (0, 9, T0 + 9)
    for code, number in ((0, None), (3, None), (137, 9), (124, None)):
        end(made.paths, "FAILED", code)
        found = status(made, None)
        assert (found.exit_code, found.exit_signal) == (code, number)


# Waiting


def test_reasons_are_put_in_plain_words() -> None:
    allows = "allows; it will not start"
    unavailable = "nodes down, drained or reserved: n[1-2]"
    reserved = "nodes may be reserved, e.g. for maintenance; a shorter --time may let it start"
    account = "Job's account not permitted to use this partition (gpu allows ml,nlp not bio)"
    table = [
        ("Priority", "jobs with higher priority are ahead", True),
        ("DependencyNeverSatisfied", "its dependency can never be met; it will not start", False),
        ("QOSMaxGRESPerUser", REASONS["QOSMax"][0], True),
        ("AssocGrpGRES", "the account's limit is reached", True),
        ("AssocGrpGRESMinutes", "the account's budget is used up", None),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", unavailable, None),
        ("PartitionDown", "the partition is down or inactive: it starts no jobs", None),
        ("ReqNodeNotAvail, UnavailableNodes:", reserved, True),
        ("ReqNodeNotAvail, Reserved for maintenance", reserved, True),
        ("AReasonOf2031", "AReasonOf2031", None),
        ("QOSMaxCpuPerJobLimit", f"requests more CPUs per job than the QOS {allows}", False),
        ("AssocMaxMemPerNode", f"requests more memory per node than the account {allows}", False),
        (account, "this partition rejects the account", False),
        ("JobHeldUser", "held by you; release it: scontrol release 7", False),
        ("", "the scheduler has not considered it yet", True),
    ]
    found = [(explain(row[0], "7"), row) for row in table]
    assert [row for one, row in found if (one.text, one.can_start) != row[1:]] == []


# What the nodes wrote


def test_a_save_that_failed_is_noted_until_one_succeeds(runs: RunsDir) -> None:
    made = make(runs)
    events(made.paths, "n1", {"type": "checkpoint", "path": "/c/20", "step": 20})
    events(made.paths, "n1", {"type": "unsaved", "step": 40, "reason": "no room", "ts": T0 + 1})
    assert status(made, said(JobState.RUNNING)).notes == ("step 40 was not saved: no room",)
    events(made.paths, "n1", {"type": "checkpoint", "path": "/c/60", "step": 60, "ts": T0 + 2})
    assert status(made, said(JobState.RUNNING)).notes == ()


def test_a_script_that_does_not_hear_that_it_is_to_save_is_noted(runs: RunsDir) -> None:
    made = make(runs)
    events(made.paths, "n1", {"type": "interrupted", "reason": "cancel", "heard": True})
    assert status(made, said(JobState.RUNNING)).notes == ()
    events(made.paths, "n1", {"type": "interrupted", "reason": "cancel", "heard": False})
    (note,) = status(made, said(JobState.RUNNING)).notes
    assert note == UNHEARD
    assert status(made, said(JobState.TIMEOUT)).notes == (note,)
    assert status(made, said(JobState.COMPLETED)).notes == ()


def ends(made: JobRecord, attempt: int = 1, **values: Any) -> Outcome:
    """Write how an attempt ended."""
    about = {"attempt": attempt, "job_id": "7", "started_at": T0, "ended_at": T0 + 9}
    values = {"nodes": ("n1", "n2"), "code": 123, "cause": Cause.NODE_LOST, "reason": "x", **values}
    made.paths.attempt(attempt).mkdir(parents=True, exist_ok=True)
    outcome = Outcome(**about, **values)
    write_outcome(made.paths, outcome)
    return outcome


def test_being_cancelled_or_interrupted_is_no_failure(runs: RunsDir) -> None:
    made = make(runs)
    for cause in (Cause.CANCELLED, Cause.INTERRUPTED, Cause.EXIT):
        ends(made, code=124, cause=cause)
        assert (status(made, None).failure is None) is (cause is not Cause.EXIT)


def test_a_job_that_died_before_it_could_write_shows_what_was_printed(runs: RunsDir) -> None:
    made = make(runs)
    made.paths.batch_output.parent.mkdir(exist_ok=True)
    for text in ("slurmstepd: error: no\nsrun: error: x\n", "hi\nml: no\n\n"):
        made.paths.batch_output.write_text(text)
        failure = status(made, said(JobState.FAILED, exit_code=7)).failure
        assert failure is not None
        assert (failure.code, failure.reason) == (7, "ml: no" if "ml" in text else text[:21])
    made.paths.attempt(1).mkdir(parents=True)  # it is not known whether these lines are of it
    assert status(made, said(JobState.FAILED, exit_code=7)).failure is None


def test_a_job_that_is_being_ended_is_shown_at_once(runs: RunsDir) -> None:
    made = make(runs)
    request = made.paths.request(1)
    request.parent.mkdir(parents=True)
    running = said(JobState.RUNNING, start=request.parent.stat().st_mtime - 60)
    write_request(request, Reason.CANCEL)  # the ranks train until they have saved
    assert status(made, running).state is JobState.RUNNING
    write_request(request, Reason.END)
    found = status(made, running)
    assert (found.state, found.reason) == (JobState.COMPLETING, "its processes are being stopped")
    again = said(JobState.RUNNING, start=request.stat().st_mtime + 60)  # Slurm started it again
    assert status(made, again).state is JobState.RUNNING
    assert status(made, said(JobState.CANCELLED)).state is JobState.CANCELLED


def test_a_running_job_whose_disk_is_full_says_what_waits(
    runs: RunsDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, running = make(runs), said(JobState.RUNNING)
    assert status(made, running).reason == ""
    full = f"the disk of {made.paths.root} is full"
    for blocks, inodes in ((3, 1000), (1 << 20, 0)):
        disk = (4096, 4096, 1 << 30, blocks, blocks, 2000, inodes, inodes, 0, 255)
        monkeypatch.setattr(os, "statvfs", lambda _, disk=disk: os.statvfs_result(disk))
        lacks = "has no room for checkpoints, logs and the record of its end"
        assert status(made, running).reason == f"{lacks}: {full}"


def test_what_the_time_limit_ended_is_not_called_cancelled(runs: RunsDir) -> None:
    made = make(runs)
    own = ends(made, code=124, cause=Cause.CANCELLED, reason="cancelled")
    for outcome, state, reason in (
        (own, JobState.TIMEOUT, "the time limit"),
        (own, JobState.CANCELLED, "cancelled"),
        (dataclasses.replace(own, job_id="6"), JobState.TIMEOUT, "cancelled"),  # of the job before
    ):
        write_outcome(made.paths, outcome)
        (attempt,) = status(made, said(state)).attempts
        assert attempt.outcome is not None
        assert attempt.outcome.reason == reason


def test_only_the_heads_events_are_read(runs: RunsDir) -> None:
    made = make(runs)
    for node in ("n1", "n2"):
        events(made.paths, node, {"type": "started", "host": node})
    amend_attempt(made.paths, 1, nodes=("n2", "n1"), procs_per_node=1)
    with noted_opens() as opened:
        found = read_evidence(made.paths)
    assert found.nodes == ("n2", "n1")
    assert [path.name for path in opened if path.suffix == ".jsonl"] == ["n2.jsonl"]


@contextlib.contextmanager
def noted_opens() -> Iterator[list[Path]]:
    """Note which files are opened by their paths."""
    opened: list[Path] = []
    real = os.open

    def noting(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(Path(path))
        return real(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", noting)
        yield opened


def test_the_world_of_a_restarted_run_is_found_far_into_a_long_file(runs: RunsDir) -> None:
    made = make(runs)
    many = (FIRST_BYTES + LAST_BYTES) // 40
    rows = [{"type": "step", "step": step, "ts": T0 + step} for step in range(many)]
    events(made.paths, "n1", {"type": "world_ready", "world_size": 4}, *rows)
    again = [{**row, "ts": row["ts"] + many} for row in rows]
    begin = {"type": "world_ready", "world_size": 8, "ts": T0 + many}
    events(made.paths, "n1", begin, *again, attempt=2)
    found = read_evidence(made.paths)
    assert (found.world_size, found.progress.step) == (8, many - 1)
    assert found.progress.rate_per_s == pytest.approx(1.0)


def test_the_world_of_a_thousand_nodes_is_still_seen_after_many_steps(runs: RunsDir) -> None:
    made, steps = make(runs), 10_000
    nodes = [f"gpu-h100-rack{number // 32:02}-{number:04}" for number in range(1000)]
    made.paths.attempt(1).mkdir(parents=True)
    amend_attempt(made.paths, 1, nodes=tuple(nodes), procs_per_node=8)
    begin: list[dict[str, Any]] = [
        {"type": "started", "node_rank": 0, "nodes": nodes, "host": nodes[0]},
        *({"type": "rank_start", "rank": rank, "host": nodes[0]} for rank in range(8)),
        {"type": "world_ready", "world_size": 8000, "hosts": nodes},
    ]
    rows = ({"type": "step", "step": n, "total": 9999, "ts": T0 + n} for n in range(steps))
    events(made.paths, nodes[0], *begin, *rows)
    for node in nodes[1:]:
        events(made.paths, node, {"type": "started", "host": node})
    since = time.monotonic()
    seen = read_evidence(made.paths)
    assert (seen.world_size, len(seen.nodes), seen.progress.step) == (8000, 1000, steps - 1)
    assert time.monotonic() - since < 5 * patience()
