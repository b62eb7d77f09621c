"""What becomes of trainings that Slurm preempts, with a grace time, in favour of another job.

From 24.05 on Slurm itself requeues what ends within the grace time; before, such a job is over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

import pytest

from tests.cluster.cluster import OVER, Cluster
from tests.patience import wait_for
from tests.road import LIGHT, Project, project

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

SMALL = ("-N1", "--gpus-per-node", "1", "--cpus-per-task", "1", *LIGHT, "-p", "low")
WAYS = {
    "requeue": ("--on-interrupt", "requeue"),
    "successor": ("--on-interrupt", "successor"),
    "stop": ("--on-interrupt", "stop"),
    "no requeue": ("--set", "slurm.requeue=false"),
    "deaf": (),
    "be killed": ("-p", "abrupt"),
}
INTERRUPTED = 125
DONE = frozenset({*OVER, "PREEMPTED"})
SYSTEM = pytest.param("cluster", id="the system's Slurm", marks=pytest.mark.long)
NEWER = pytest.param("newer_slurm_cluster", id="a newer Slurm")


@dataclass(kw_only=True)
class Run:
    """A run that was preempted once."""

    here: Project
    cluster: Cluster
    first_job: str

    @property
    def jobs(self) -> list[str]:
        """Every job of the run, the newest last."""
        record = json.loads((self.here.run_dir(self.first_job) / "job.json").read_text())
        return [*record.get("earlier_job_ids", []), record["job_id"]]

    @property
    def attempts(self) -> int:
        return len(list((self.here.run_dir(self.first_job) / "attempts").glob("[0-9]*")))

    @property
    def state(self) -> str:
        return str(self.here.json("status", self.first_job)["state"])

    def slurm(self, number: int = 0) -> dict[str, str]:
        """Return what Slurm knows of a job of the run."""
        return told(self.cluster, self.jobs[number])

    def begins_again(self) -> bool:
        """Release the job, if it is held by now; say whether its second attempt has begun."""
        self.cluster.start_requeued(self.first_job)
        return self.attempts == 2

    def rests(self) -> bool:
        """Say whether the run has had its last word, and Slurm none that is still to come."""
        if not (self.here.run_dir(self.first_job) / "end.json").exists():
            return False
        return all(told(self.cluster, job)["JobState"] in {*DONE, "PENDING"} for job in self.jobs)


@dataclass(frozen=True, kw_only=True)
class Preempted:
    """One run of each way to be interrupted, and a job that waits for the success of the first."""

    runs: dict[str, Run]
    dependent: str


def told(cluster: Cluster, job_id: str) -> dict[str, str]:
    shown = cluster.run(["scontrol", "-o", "show", "job", job_id]).stdout
    return dict(word.partition("=")[::2] for word in shown.split())


@pytest.fixture(scope="module", params=[SYSTEM, NEWER], name="preempted")
def _preempted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Preempted]:
    """Preempt all runs at once, and release what is then requeued, once."""
    cluster: Cluster = request.getfixturevalue(request.param)
    directory = tmp_path_factory.mktemp("preempted")
    here = project(directory / "project", directory / "state")
    here.extra.update(cluster.env)
    enough = here.path / "enough"
    runs = {}
    try:
        for way, options in WAYS.items():
            until = [str(enough)] if way == "deaf" else []
            job = here.submit(*SMALL, *options, "preempted.py", *until)
            runs[way] = Run(here=here, cluster=cluster, first_job=job)
        for run in runs.values():
            here.wait_for_line(run.first_job, "attempt 1 begins at step 0")
        dependent = cluster.sbatch(
            f"-dafterok:{runs['requeue'].first_job}", "-o", "/dev/null", "--wrap=true"
        )
        preempt(cluster, runs["deaf"].first_job)
        # A Python that ends has no handlers left: SIGTERM must reach the rank before that.
        here.wait_for_event(runs["deaf"].first_job, "interrupted")
        enough.touch()
        for way in ("requeue", "be killed"):
            wait_for(runs[way].begins_again, f"the second attempt of the run that was to {way}")
        with suppress(AssertionError):  # the tests tell what is wrong with which run
            wait_for(lambda: all(run.rests() for run in runs.values()), "the end of all", 60)
        yield Preempted(runs=runs, dependent=dependent)
    finally:
        cluster.run(["scancel", "--me"])
        cluster.wait_no_processes(30)


def preempt(cluster: Cluster, job_id: str) -> None:
    """Have a job of a higher partition take all nodes, and wait until Slurm has warned this one."""
    everything = ("-p", "high", f"-N{len(cluster.nodes)}", "--exclusive", "-o", "/dev/null")
    cluster.sbatch(*everything, "--wrap=sleep 2")
    wait_for(lambda: told(cluster, job_id).get("PreemptTime", "None") != "None", "a preemption")


@pytest.mark.parametrize("way", ["requeue", "be killed"])
def test_a_requeued_training_goes_on_once_and_is_over(preempted: Preempted, way: str) -> None:
    run = preempted.runs[way]
    assert (run.state, run.attempts) == ("COMPLETED", 2)
    assert (run.slurm()["JobState"], run.slurm()["Restarts"]) == ("COMPLETED", "1")
    # What waits for the success of a requeued training starts.
    assert run.cluster.wait_job(preempted.dependent) == "COMPLETED"


def test_a_successor_does_not_wait_for_a_requeue(preempted: Preempted) -> None:
    run = preempted.runs["successor"]
    assert (run.state, run.attempts, len(run.jobs)) == ("COMPLETED", 2, 2)
    first, second = run.slurm(0), run.slurm(1)
    assert (first["JobState"] in DONE, first["Restarts"]) == (True, "0")
    waited = datetime.fromisoformat(second["StartTime"]) - datetime.fromisoformat(first["EndTime"])
    assert waited < timedelta(minutes=2)  # as long as a requeued job waits


@pytest.mark.parametrize("way", ["stop", "no requeue"])
def test_a_training_that_is_to_stop_stays_down(preempted: Preempted, way: str) -> None:
    run = preempted.runs[way]
    assert (run.attempts, len(run.jobs)) == (1, 1)
    assert (run.slurm()["JobState"] in DONE, run.slurm()["Restarts"]) == (True, "0")
    end = json.loads((run.here.run_dir(run.first_job) / "end.json").read_text())
    assert end["exit_code"] == INTERRUPTED


def test_a_training_that_ends_within_the_grace_time_is_not_trained_again(
    preempted: Preempted,
) -> None:
    run = preempted.runs["deaf"]
    assert (run.state, run.attempts) == ("COMPLETED", 1)
    assert (run.slurm()["JobState"] in DONE, run.slurm()["Restarts"]) == (True, "0")
