"""The Slurm backend on a real Slurm: what sbatch, squeue, sacct, scontrol and scancel really do."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clusterrun.backends.base import SchedulerJob
from clusterrun.backends.slurm import query
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.errors import JobNotFoundError, SchedulerUnreachableError, SubmissionError
from clusterrun.rundir.record import JobRecord
from clusterrun.shared import shell
from clusterrun.shared.state import JobState
from tests.cluster.cluster import Cluster
from tests.patience import patience, wait_for
from tests.slurm.jobs import BACKEND, Submit, ask, submitter, until

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("own_memory"), pytest.mark.timeout(300)]


def stand(made: JobRecord) -> JobStatus:
    (found,) = statuses([made], lambda _: BACKEND, max_age_s=0)
    return found


def settled(made: JobRecord) -> SchedulerJob:
    """Wait until a job has ended and somebody knows its exit status."""
    wait_for(lambda: ask(made).exit_code is not None, f"the end of {made.job_id}", 60)
    return ask(made)


def batch_output(made: JobRecord) -> str:
    return made.paths.batch_output.read_text()


def test_the_script_gets_its_run_directory_and_nothing_of_the_shells_slurm(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CPU_BIND", "SLURM_FOO", "PET_NNODES", "WORLD_SIZE", "SRUN_DEBUG"):
        monkeypatch.setenv(name, "leaked")
    monkeypatch.setenv("SBATCH_PARTITION", "nonsense")  # would refuse the job
    monkeypatch.setenv("SBATCH_TIMELIMIT", "leaked")
    monkeypatch.setenv("MY_OWN", "kept")
    made = submit('printf "%s\\n" "$#" "$1" "$PWD"; env | grep -e leaked -e MY_OWN')
    job = settled(made)
    assert (job.state, job.exit_code, job.exit_signal) == (JobState.COMPLETED, 0, None)
    assert batch_output(made) == f"1\n{made.run_dir}\n{tmp_path}\nMY_OWN=kept\n"
    names = sorted(str(path.relative_to(made.run_dir)) for path in made.paths.root.rglob("*"))
    assert names == ["job.json", "job.sbatch", "node.sh", "plan.json", "slurm", "slurm/batch.out"]
    assert made.paths.batch_output.stat().st_mode & 0o777 == 0o644


def test_any_directory_name_reaches_the_job_as_it_is(cluster: Cluster, tmp_path: Path) -> None:
    made = {}
    for name in ("100%j", "a b", "quo'te", 'dou"ble', "$(touch x)", "hash#x", "ü"):
        root = tmp_path / name
        root.mkdir()
        made[root] = submitter(root)('printf "%s\\n" "$1" "$PWD"')
    for root, one in made.items():
        settled(one)
        assert batch_output(one) == f"{one.run_dir}\n{root}\n"
        assert not (root / "x").exists()


def test_a_refusal_is_told_in_sbatchs_words_and_leaves_nothing(
    submit: Submit, tmp_path: Path
) -> None:
    has = "4 nodes with gpu:h100:4, 64 CPUs"
    reservation = "Requested reservation is invalid"
    for option, words, hint in (
        ("--partition=nope", "invalid partition specified: nope", "partitions here: "),
        ("--gpus-per-node=64", "Requested node configuration is not available", has),
        ("--time=soon", "Invalid --time specification", "write --time as minutes"),
        ("--bogus", "unrecognized option '--bogus'", "--sbatch-arg"),
        ("--constraint=nope", "Invalid feature specification", "sinfo"),
        ("--reservation=nope", reservation, "scontrol show reservations"),
    ):
        with pytest.raises(SubmissionError) as refused:
            submit("true", option, gpus_per_node=64)
        assert words in str(refused.value.cause)
        assert hint in refused.value.hints[0]
        assert not (tmp_path / "runs").exists()


def test_jobs_are_asked_about_together_and_unknown_ones_are_missing(submit: Submit) -> None:
    done, killed, held = submit("exit 3"), submit("kill -KILL $$"), submit("true", "--hold")
    ends = [(job.state, job.exit_code, job.exit_signal) for job in map(settled, (done, killed))]
    assert ends == [(JobState.FAILED, 3, None), (JobState.FAILED, 0, 9)]
    answer = BACKEND.query([done.job_id, held.job_id, "99999999"], max_age_s=0)
    assert sorted(answer) == sorted([done.job_id, held.job_id])
    assert answer[done.job_id].exit_code == 3
    waits = answer[held.job_id]
    assert (waits.state, waits.reason) == (JobState.PENDING, "JobHeldUser")
    assert BACKEND.query(["99999999"], max_age_s=0) == {}
    assert query.find_by_command(held.run_dir, None) == held.job_id
    assert query.find_by_command(held.run_dir + "0", None) is None
    BACKEND.cancel([held.job_id])
    with pytest.raises(JobNotFoundError, match="99999999"):
        BACKEND.cancel(["99999999"])


def test_times_nodes_and_limits_are_those_of_slurm(submit: Submit, cluster: Cluster) -> None:
    made = submit("sleep 30", "--time=7", "--nodes=2", "--ntasks-per-node=1")
    job = until(made, JobState.RUNNING)
    assert job.limit_s == 420
    assert job.nodelist == f"{cluster.nodes[0].rstrip('1')}[1-2]"
    assert job.start is not None
    assert abs(job.start - time.time()) < 20 * patience()
    assert job.elapsed_s is not None
    BACKEND.cancel([made.job_id])
    wait_for(lambda: ask(made).source == "sacct", "an answer of accounting", 60)  # it lags
    job = ask(made)
    assert (job.state, job.exit_code) == (JobState.CANCELLED, 0)
    assert job.end is not None


def test_cancel_ends_what_runs_and_what_waits_and_leaves_what_has_ended(submit: Submit) -> None:
    runs, waits, done = submit("sleep 60"), submit("true", "--hold"), submit("true")
    until(runs, JobState.RUNNING)
    settled(done)
    BACKEND.cancel([runs.job_id, waits.job_id, done.job_id])
    assert settled(runs).state is JobState.CANCELLED
    assert settled(waits).state is JobState.CANCELLED
    assert settled(waits).nodelist == ""
    assert settled(done).state is JobState.COMPLETED


def test_a_requeued_job_waits_and_says_so_and_is_not_over(submit: Submit) -> None:
    made = submit('mkdir -p "$1/attempts/1"; sleep 60', "--requeue")
    until(made, JobState.RUNNING)
    wait_for(made.paths.attempt(1).is_dir)
    assert shell.run(["scontrol", "requeue", made.job_id]).rc == 0
    states = []

    def waits() -> bool:
        states.append(stand(made).state)
        return states[-1] is JobState.PENDING

    wait_for(waits, f"the requeue of {made.job_id}", 60)
    assert not any(state.is_terminal for state in states)
    found = stand(made)
    assert found.pending is not None
    assert found.pending.text.startswith("requeued; Slurm holds it")
    assert found.expected_start is not None
    assert 30 < found.expected_start - time.time() < 120 + 10 * patience()
    BACKEND.cancel([made.job_id])


def test_without_accounting_scontrol_tells_how_a_job_ended(
    cluster_no_accounting: Cluster, tmp_path: Path
) -> None:
    made = submitter(tmp_path)("exit 3")
    job = settled(made)
    assert (job.state, job.exit_code, job.source) == (JobState.FAILED, 3, "scontrol")
    unknown = BACKEND.query([made.job_id, "99999999"], max_age_s=0)["99999999"]
    assert unknown.state is JobState.UNKNOWN
    assert "Slurm accounting storage is disabled" in unknown.note
    found = stand(made)
    assert (found.state, found.exit_code) == (JobState.FAILED, 3)
    with pytest.raises(JobNotFoundError):
        BACKEND.cancel(["99999999"])


def test_a_slurmctld_that_is_down_is_unreachable_and_has_no_job(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = cluster.shape.slurm_conf.read_text()
    dead = tmp_path / "slurm.conf"
    port = f"SlurmctldPort={cluster.shape.ctld_port}"
    assert port in conf
    dead.write_text(conf.replace(port, "SlurmctldPort=6999").replace("GresTypes=gpu", ""))
    monkeypatch.setenv("SLURM_CONF", str(dead))
    monkeypatch.setattr(shell, "PATIENCE_S", 1.0)  # Slurm's clients take 9 s for each try
    with pytest.raises(SchedulerUnreachableError) as silent:
        submitter(tmp_path)("true")
    assert "Unable to contact slurm controller" in str(silent.value.cause)
    assert not (tmp_path / "runs").exists()
