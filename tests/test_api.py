"""The verbs from Python: typed, documented, the same as on the command line."""

from __future__ import annotations

import inspect
import json
import pkgutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import submitit

import clusterrun
from clusterrun import ClusterrunError, JobSpec
from clusterrun.config.choices import Cluster
from clusterrun.errors import JobNotFoundError, SubmissionError, UsageError
from clusterrun.rundir import record
from clusterrun.shared.state import JobState
from clusterrun.verbs import status as status_verb
from clusterrun.verbs.render import prepare
from tests.patience import patience


@pytest.fixture(name="project")
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("print('hello')\n")
    for name in ("STATE", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("CLUSTERRUN_SITE_CONFIG", "/dev/null")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("PWD", raising=False)
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def spec(**fields: object) -> JobSpec:
    return JobSpec(**{"script": "train.py", "cluster": Cluster.LOCAL, **fields})  # type: ignore[arg-type]  # values of many types


@pytest.mark.parametrize("name", sorted(set(clusterrun.__all__) - {"__version__"}))
def test_every_name_that_is_promised_is_there_and_explained(name: str) -> None:
    thing = getattr(clusterrun, name)
    assert inspect.getdoc(thing)
    assert name in dir(clusterrun)
    if inspect.isfunction(thing):
        signature = inspect.signature(thing)
        every = (signature, *signature.parameters.values())
        given = [getattr(each, "return_annotation", None) or each.annotation for each in every]
        assert inspect.Signature.empty not in given


def test_no_promised_name_is_that_of_a_room() -> None:
    """Importing a room would put the module in the verb's place."""
    rooms = {module.name for module in pkgutil.iter_modules(clusterrun.__path__)}
    assert rooms & set(clusterrun.__all__) == set()


def test_a_name_that_is_not_promised_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'submitt'"):
        clusterrun.submitt  # noqa: B018 - the access is the test


def test_render_gives_every_file_and_writes_none(project: Path) -> None:
    bundle = clusterrun.render(spec(nodes=2, gpus_per_node=4, cluster=Cluster.SLURM))
    assert "#SBATCH --gpus-per-node=4\n" in bundle.files["job.sbatch"]
    assert list(project.iterdir()) == [project / "train.py"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"env": {"HTTP_PROXY": "http://ada:pw@proxy:3128"}}, "HTTP_PROXY looks like a secret"),
        ({"setup": ("export HF_TOKEN=abc",)}, "HF_TOKEN looks like a secret"),
        ({"setup": "module load cuda"}, "setup must be a list"),
        ({"args": "--lr 1"}, "args must be a list"),
        ({"clusters": "one,two"}, "must name one cluster"),
        ({"strategy": "zero4"}, "unknown strategy 'zero4'"),
    ],
)
def test_a_spec_made_in_python_meets_the_rules_of_the_command_line(
    project: Path, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        clusterrun.submit(spec(**fields))
    assert list(project.iterdir()) == [project / "train.py"]


def test_load_spec_reads_what_the_command_line_reads(project: Path) -> None:
    (project / "clusterrun.yaml").write_text("script: train.py\nslurm:\n  nodes: 3\n")
    resolved = clusterrun.load_spec({"cluster": "slurm"}, overrides=["slurm.partition=gpu"])
    assert (resolved.spec.nodes, resolved.spec.partition) == (3, "gpu")
    assert prepare(resolved).plan.nodes == 3


def fake_node(project: Path, text: str) -> None:
    """Replace what each simulated node runs, by a project's own template."""
    (project / "clusterrun.yaml").write_text("script: train.py\n")
    (project / "templates").mkdir()
    (project / "templates" / "node.sh.j2").write_text(f"#!/bin/bash\n{text}\n")


def test_a_job_on_this_machine_from_start_to_end(project: Path) -> None:
    fake_node(project, "exit 3")
    job = clusterrun.submit(clusterrun.load_spec({"cluster": "local", "nodes": 2}))
    assert (job.job_id, job.record.nodes, job.record.argv) == ("L1", 2, ())
    assert record.read(job.record.paths).job_id == "L1"
    ended = clusterrun.wait(job, timeout_s=60)
    assert (ended.state, ended.exit_code) == (JobState.FAILED, 3)
    found = (clusterrun.find_job("L1"), clusterrun.find_job(), clusterrun.find_job(job))
    assert {again.run_dir for again in found} == {job.run_dir}
    assert clusterrun.status("L1").state is JobState.FAILED
    assert [status.record.job_id for status in clusterrun.list_jobs()] == ["L1"]
    assert [status.state for status in clusterrun.cancel("L1")] == [JobState.FAILED]


def test_wait_gives_up_at_its_timeout_and_cancel_ends_the_job(project: Path) -> None:
    fake_node(project, "exec sleep 60")
    job = clusterrun.submit(clusterrun.load_spec({"cluster": "local"}))
    with pytest.raises(TimeoutError, match="job L1 is RUNNING after 0 s"):
        clusterrun.wait(job, timeout_s=0)
    job.cancel()
    assert clusterrun.wait(job, timeout_s=60).state is JobState.CANCELLED
    assert str(job.exception()) == "job L1 is CANCELLED: the job was cancelled"


LINES = (
    'mkdir -p "$1/logs/a$2"; cd "$1/logs/a$2"; T=1700000000000\n'
    'printf "$T%s\\n" "200 0 o zero" "300 1 e KeyError: 1" "400 - l launcher" > n0.log\n'
)


def test_the_handle_is_a_job_of_submitit(project: Path) -> None:
    fake_node(project, LINES)
    well = clusterrun.submit(clusterrun.load_spec({"cluster": "local"}))
    (project / "templates" / "node.sh.j2").write_text("#!/bin/bash\nexit 3\n")
    badly = clusterrun.submit(clusterrun.load_spec({"cluster": "local"}))
    assert isinstance(well, submitit.Job)
    wait = submitit.helpers.as_completed
    assert {*wait([well, badly], timeout=60 * patience(), poll_frequency=0.2)} == {well, badly}
    assert (well.state, badly.state) == ("COMPLETED", "FAILED")
    assert well.result().exit_code == 0
    assert well.exception() is None
    assert (well.stdout(), well.stderr()) == ("zero\n", "KeyError: 1\n")
    with pytest.raises(
        submitit.core.utils.FailedJobError, match=f"job {badly.job_id} is FAILED"
    ) as failed:
        badly.result()
    assert vars(failed.value) == {"hint": f"read its logs: clusterrun logs {badly.job_id}"}


def test_logs_are_merged_and_selected(project: Path) -> None:
    fake_node(
        project,
        f"{LINES}"
        'printf "$T%s\\n" "300 1 e error 26 KeyError: 1" "400 - l - 59 launcher" > n0.err\n'
        'printf "%s\\n" "${T}100 2 o two" > n1.log; touch n1.err',
    )
    job = clusterrun.submit(clusterrun.load_spec({"cluster": "local"}))
    assert job.wait(timeout_s=60).state is JobState.COMPLETED
    assert (job.status().exit_code, job.run_dir.is_dir()) == (0, True)
    assert [line.text for line in job.logs(ranks={0})] == [b"zero"]

    def texts(**which: object) -> list[bytes]:
        return [line.text for line in clusterrun.read_logs(job, **which)]  # type: ignore[arg-type]  # as below

    assert texts() == [b"two", b"zero", b"KeyError: 1", b"launcher"]
    assert texts(ranks={1, 2}) == [b"two", b"KeyError: 1"]
    assert texts(errors=True) == [b"KeyError: 1"]
    assert texts(nodes=["n0"], tail=1) == [b"launcher"]
    assert texts(attempt=2) == []


def slurm(project: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str, **others: str) -> None:
    """Put programs of a login node on PATH."""
    programs = project.parent / "bin"
    programs.mkdir()
    for name, text in {"sbatch": sbatch, "srun": "", "sinfo": "", **others}.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/bin:/usr/bin")


def test_a_refused_job_raises_and_leaves_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(project, monkeypatch, "echo 'sbatch: error: no' >&2; exit 1")
    with pytest.raises(SubmissionError) as raised:
        clusterrun.submit(spec(cluster="slurm"))
    assert isinstance(raised.value, ClusterrunError)
    assert raised.value.cause == "sbatch: error: no"
    assert list(project.iterdir()) == [project / "train.py"]


def test_the_record_is_there_before_the_job_can_start(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(project, monkeypatch, f'cp "${{@: -1}}/job.json" {project.parent}/seen; echo "7;tuxA"')
    job = clusterrun.submit(spec(cluster="slurm"))
    assert (job.job_id, job.record.slurm_cluster) == ("7", "tuxA")
    assert json.loads((project.parent / "seen").read_text())["job_id"] == ""
    assert record.read(job.record.paths) == job.record


def test_a_job_that_was_submitted_but_not_recorded_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(project, monkeypatch, 'rm "${@: -1}/job.json"; mkdir -p "${@: -1}/job.json/x"; echo 7')
    with pytest.raises(ClusterrunError) as raised:
        clusterrun.submit(spec(cluster="slurm"))
    assert raised.value.message == "job 7 was submitted, but its record could not be written"
    assert raised.value.hints[0].startswith(f"the run directory is {project}/runs/train/")


def test_a_run_whose_submission_was_interrupted_cannot_be_cancelled(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(project, monkeypatch, "echo 7")
    path = clusterrun.submit(spec(cluster="slurm")).record.paths.record
    path.write_text(path.read_text().replace('"job_id": "7"', '"job_id": ""'))
    with pytest.raises(JobNotFoundError, match="has no job id: its submission was interrupted"):
        clusterrun.cancel("train")


def test_wait_looks_less_often_at_a_job_that_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = [JobState.PENDING] * 3 + [JobState.RUNNING] * 60 + [JobState.COMPLETED]
    looks = iter(SimpleNamespace(state=state, error=None, pending=None) for state in states)
    pauses: list[float] = []
    monkeypatch.setattr(status_verb, "find_record", lambda job: SimpleNamespace(job_id=job))
    monkeypatch.setattr(status_verb, "quick_status", lambda *_, **__: next(looks))
    for name in ("with_startups", "with_usage"):
        monkeypatch.setattr(status_verb, name, lambda job: job)
    monkeypatch.setattr(status_verb.time, "sleep", pauses.append)
    assert clusterrun.wait("7").state is JobState.COMPLETED
    assert (pauses[0], pauses[3], max(pauses)) == (
        status_verb.POLL_S,
        status_verb.POLL_S,
        status_verb.POLL_MOST_S,
    )


def test_wait_ends_for_a_job_that_nobody_knows_any_more(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(project, monkeypatch, "echo 7", squeue="", sacct="", scontrol="")
    monkeypatch.setattr(status_verb, "FORGOTTEN_S", 0.0)
    job = clusterrun.submit(spec(cluster="slurm"))
    assert clusterrun.wait(job, timeout_s=60).state is JobState.UNKNOWN
