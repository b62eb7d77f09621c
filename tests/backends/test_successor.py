"""The next job of a run, submitted from inside this one, with an sbatch of our own."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.backends import cache
from clusterrun.config.choices import Cluster
from clusterrun.launch.plan import Directive
from clusterrun.rundir import record
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.rundir.plan import read_plan
from clusterrun.rundir.record import JobRecord
from tests.patience import patience

from .builders import SUBMIT_SUCCESSOR, make_bundle, make_plan, make_run
from .conftest import Stubs


@pytest.fixture
def site(stubs: Stubs) -> Stubs:
    stubs.add("sbatch", "echo 53")
    stubs.add("squeue")
    stubs.add("scancel")
    return stubs


def run_of(root: Path, job_id: str = "52", **changes: object) -> JobRecord:
    plan = make_plan(root, cluster=Cluster.SLURM, **changes)
    paths = make_run(root, plan, make_bundle(plan))
    record.write(record.new_record(plan, paths, argv=(), now=1.0))
    return record.register_run(paths.root, {"SLURM_JOB_ID": job_id})


def successor(made: JobRecord, *nodes: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SUBMIT_SUCCESSOR, made.run_dir, *nodes],
        env={**os.environ, "SLURM_JOB_ID": "52", **env},
        capture_output=True,
        text=True,
        timeout=60 * patience(),
        check=False,
    )


def test_sbatch_gets_the_script_and_both_ids_lead_to_the_run(site: Stubs, tmp_path: Path) -> None:
    made = run_of(tmp_path, pass_env=("SLURM_TOKEN",))
    own = {"SLURM_NNODES": "7", "SBATCH_PARTITION": "low", "PET_A": "1"}
    done = successor(made, SLURM_TOKEN="t", LANG="x", **own)
    assert (done.returncode, done.stdout, done.stderr) == (0, "53\n", "")
    assert site.calls("sbatch") == [
        [
            *("sbatch", "--parsable", f"--output={made.paths.batch_output}"),
            *(f"--chdir={tmp_path}", "--dependency=afterany:52"),
            *(str(made.paths.script), made.run_dir),
        ]
    ]
    seen = site.environ("sbatch")
    assert {"SLURM_JOB_ID", *own} & seen.keys() == set()
    assert (seen["SLURM_TOKEN"], seen["LANG"]) == ("t", "x")
    now = record.read(made.paths)
    assert (now.job_id, now.earlier_job_ids) == ("53", ("52",))
    for job_id in ("52", "53"):
        assert record.resolve_job(job_id, [made.runs_dir]).run_dir == made.run_dir


def test_lost_nodes_join_those_of_the_plan_and_are_not_waited_for(
    site: Stubs, tmp_path: Path
) -> None:
    made = run_of(tmp_path, directives=(Directive(name="exclude", value="node[4-5]"),))
    successor(made, "node2", "node4")
    (call,) = site.calls("sbatch")
    assert "--exclude=node[2,4-5]" in call
    assert not any(word.startswith("--dependency") for word in call)


def test_a_refusal_is_one_line_and_changes_nothing(site: Stubs, tmp_path: Path) -> None:
    made = run_of(tmp_path)
    before = made.paths.record.read_bytes()
    silent = "Unable to contact slurm controller"
    for sbatch, said in (
        ("echo 'sbatch: error: no' >&2; exit 1", "sbatch refused the job: sbatch: error: no"),
        (f"echo 'sbatch: error: {silent}' >&2; exit 1", silent),
        ("exit 0", "may or may not be in the queue"),
    ):
        site.add("sbatch", sbatch)
        done = successor(made)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert said in done.stderr
        assert made.paths.record.read_bytes() == before
        assert os.listdir(made.runs_dir.by_job) == ["52"]


def test_a_job_that_cannot_be_recorded_is_taken_back(
    site: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clusterrun.backends.slurm import successor as module
    from clusterrun.errors import ClusterrunError

    made = run_of(tmp_path)
    before = made.paths.record.read_bytes()

    link = record.link_job

    def full(runs_dir: RunsDir, job_id: str, paths: RunPaths) -> None:
        if job_id == "53":
            raise OSError("no space left on device")
        link(runs_dir, job_id, paths)

    monkeypatch.setattr(record, "link_job", full)
    monkeypatch.setattr(cache, "through", lambda *_: {})
    with pytest.raises(ClusterrunError, match=r"cannot write .*job\.json"):
        module.submit_successor(made.paths.root, read_plan(made.paths), (), {"SLURM_JOB_ID": "52"})
    assert site.calls("scancel") == [["scancel", "53"]]
    assert made.paths.record.read_bytes() == before


def chain(root: Path, *later: str) -> JobRecord:
    made = dataclasses.replace(run_of(root), chained_job_ids=later, chain_length=1 + len(later))
    record.write(made)
    return made


def test_in_a_chain_the_next_job_waits_already(site: Stubs, tmp_path: Path) -> None:
    site.add("scontrol")
    made = chain(tmp_path, "60", "61")
    done = successor(made, "node2")
    assert (done.returncode, done.stdout, site.calls("sbatch")) == (0, "60\n", [])
    assert site.calls("scontrol") == [["scontrol", "update", "JobId=60", "ExcNodeList=node2"]]
    now = record.read(made.paths)
    assert (now.earlier_job_ids, now.job_id, now.chained_job_ids) == (("52",), "60", ("61",))


def test_a_chain_that_is_used_up_goes_on_no_further(site: Stubs, tmp_path: Path) -> None:
    done = successor(chain(tmp_path))
    assert (done.returncode, site.calls("sbatch")) == (1, [])
    assert done.stderr == "all 1 jobs of the chain are used\n"
