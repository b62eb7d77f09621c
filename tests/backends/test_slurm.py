"""Submitting to Slurm and cancelling there, with executables of our own in the place of Slurm's."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from submitit.core import utils

from clusterrun.backends.base import PerhapsSubmittedError, Submission
from clusterrun.backends.select import submit_or_remove
from clusterrun.backends.slurm import backend as slurm
from clusterrun.backends.slurm import query
from clusterrun.backends.slurm.backend import SlurmBackend, submit_successor
from clusterrun.config.choices import Cluster
from clusterrun.errors import ClusterrunError, JobNotFoundError, SubmissionError, UsageError
from clusterrun.launch.plan import Directive, Plan
from clusterrun.rundir import record
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.reading import read_plan
from clusterrun.rundir.record import JobRecord
from tests.patience import finished

from .builders import SUBMIT_SUCCESSOR, make_bundle, make_plan, make_run
from .conftest import Stubs

SINFO = """\
echo 'low|up|infinite|1-infinite|no|4|idle|gpu:h100:4|64|512000|(null)|n[1-4]|none'
echo 'main*|up|1-00:00:00|1-infinite|no|1|idle|gpu:h100:4|64|512000|(null)|n1|none'
echo 'main*|up|1-00:00:00|1-infinite|no|3|down|gpu:h100:4|64|512000|(null)|n[2-4]|broken'
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "LOOK_AGAIN_S", 0.01)


@pytest.fixture
def site(stubs: Stubs) -> Stubs:
    stubs.add("srun")
    stubs.add("sinfo", SINFO)
    return stubs


def make(root: Path, **changes: object) -> tuple[Plan, RunPaths]:
    plan = make_plan(root, cluster=Cluster.SLURM, **changes)
    return plan, make_run(root, plan, make_bundle(plan, sbatch="#!/bin/bash\nsrun x\n"))


def submit(root: Path, backend: SlurmBackend | None = None, **changes: object) -> Submission:
    plan, paths = make(root, **changes)
    return submit_or_remove(backend or SlurmBackend(), plan, paths)


def test_sbatch_gets_the_runs_own_script_and_what_differs_per_run(
    site: Stubs, tmp_path: Path
) -> None:
    # Slurm makes no directory for the output.
    site.add("sbatch", "output=${2#--output=}; [[ -d ${output%/*} ]] && echo 53")
    plan, paths = make(tmp_path, name="a %j name")
    assert submit_or_remove(SlurmBackend(), plan, paths) == Submission(job_id="53")
    assert site.calls("sbatch") == [
        [
            "sbatch",
            "--parsable",
            f"--output={paths.root}/slurm/batch.out",
            f"--chdir={tmp_path}",
            f"{paths.root}/job.sbatch",
            str(paths.root),
        ]
    ]


def test_the_id_is_read_past_what_plugins_print(site: Stubs, tmp_path: Path) -> None:
    plan, paths = make(tmp_path)
    site.add("squeue", f"echo '53|{paths.root}/job.sbatch {paths.root}'")
    for printed in ("53", "53;tuxA", "Your budget: 3 hours\\n53\\n", "53\\n1200\\n", "hello"):
        site.add("sbatch", f"printf '{printed}'; printf 'lua: gr\\374\\303\\237e' >&2")  # not UTF-8
        cluster = "tuxA" if "tuxA" in printed else None
        expected = Submission(job_id="53", slurm_cluster=cluster)
        assert submit_or_remove(SlurmBackend(), plan, paths) == expected


# Environment


def test_odd_directories_and_missing_programs(stubs: Stubs, tmp_path: Path) -> None:
    stubs.add("sbatch", "echo 53")
    for name in ("100%j", "a\\b"):
        (tmp_path / name).mkdir()
    with pytest.raises(SubmissionError, match="not a Slurm cluster"):
        submit(tmp_path / "100%j")
    stubs.add("srun")
    with pytest.raises(UsageError, match="backslash"):
        submit(tmp_path / "a\\b")
    assert stubs.calls("sbatch") == []
    assert [*(tmp_path / "100%j").iterdir(), *(tmp_path / "a\\b").iterdir()] == []
    submit(tmp_path / "100%j")
    output = stubs.calls("sbatch")[0][2]
    assert output.startswith(f"--output={tmp_path}/100%%j/runs/demo/")


def test_what_would_leak_into_the_job_is_left_out(
    site: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("sbatch", "echo 53")
    leaks = {
        *("SLURM_JOB_ID", "SLURM_CPU_BIND", "SLURM_MEM_PER_NODE", "SLURM_NTASKS", "SRUN_DEBUG"),
        *("SBATCH_MEM_PER_NODE", "SBATCH_EXPORT", "SRUN_CPUS_PER_TASK", "SALLOC_PARTITION"),
        *("SBATCH_PARTITION", "SLURMD_NODENAME", "PMI_RANK", "PMIX_RANK", "MASTER_ADDR"),
        *("PET_RDZV_ENDPOINT", "PET_STANDALONE", "TORCHELASTIC_RUN_ID", "CLUSTERRUN_LOCAL_JOB_ID"),
        *("MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        *("ROLE_RANK", "NODE_RANK", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    }
    kept = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "WANDB_MODE", "RANKS", "PETS", "PATH"}
    for name in (leaks | kept) - {"PATH"}:
        monkeypatch.setenv(name, "x")
    submit(tmp_path)
    seen = site.environ("sbatch").keys()
    assert seen & leaks == set()
    assert kept <= seen


# Refusals: the words are those of sbatch 22.05


FAILED = "sbatch: error: Batch job submission failed: "
USAGE = "sbatch: unrecognized option '--bogus'\nTry \"sbatch --help\" for more information"
HAS = ("partition 'main' has 4 nodes with gpu:h100:4, 64 CPUs and 512000 MB",)
RULES = ("list what you may use: sacctmgr show associations user=$USER format=account,qos",)
LIMIT = "the time limit of partition '{}' is {}"
LIMITS = (LIMIT.format("low", "infinite"), LIMIT.format("main", "1-00:00:00"))
THERE = ("choose one of the partitions here: low, main",)
REFUSALS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    (f"{FAILED}Invalid partition name specified", 1, THERE),
    (f"{FAILED}Requested node configuration is not available", 1, HAS),
    (f"{FAILED}Node count specification invalid", 1, HAS),
    (f"{FAILED}Requested partition configuration not available now", 1, HAS),
    (f"{FAILED}More processors requested than permitted", 1, HAS),
    (f"{FAILED}Invalid account or account/partition combination specified", 1, RULES),
    (f"{FAILED}Invalid qos specification", 1, RULES),
    (f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)", 1, LIMITS),
    (USAGE, 255, ("check what you passed with --sbatch-arg",)),
    ("sbatch: error: a rule of this site", 1, ()),
    ("", 1, ()),
)


def test_a_refusal_is_told_verbatim_with_hints_and_leaves_nothing(
    site: Stubs, tmp_path: Path
) -> None:
    for words, rc, hints in REFUSALS:
        (tmp_path / "words").write_text(words)
        site.add("sbatch", f'printf "%s" "$(< {tmp_path}/words)" >&2; exit {rc}')
        with pytest.raises(SubmissionError, match="sbatch refused the job") as refused:
            submit(tmp_path, gpus_per_node=8)
        assert refused.value.cause == (words or f"sbatch exited with status {rc} and no message")
        assert (refused.value.hints, refused.value.exit_code) == (hints, 1)
        assert not (tmp_path / "runs").exists()


# Silence


TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


def test_a_job_that_was_queued_in_silence_is_found_on_its_cluster_not_submitted_twice(
    site: Stubs, tmp_path: Path
) -> None:
    site.add("sbatch", f"echo '{TIMED_OUT}' >&2; exit 1")
    for calls, cluster in enumerate((None, "tuxA"), start=1):
        directives = (Directive(name="clusters", value=cluster),) if cluster else ()
        plan, paths = make(tmp_path, directives=directives)
        found = f"echo '77|{paths.root}/job.sbatch {paths.root}'"
        option = f"--clusters={cluster}" if cluster else ""
        site.add("squeue", f"[[ $* == *{option}* ]] && {found}; exit 0")
        expected = Submission(job_id="77", slurm_cluster=cluster)
        assert submit_or_remove(SlurmBackend(), plan, paths) == expected
        assert len(site.calls("sbatch")) == calls
        assert paths.root.exists()


def test_a_job_that_may_be_queued_keeps_its_directory(site: Stubs, tmp_path: Path) -> None:
    silent = f"echo '{TIMED_OUT}' >&2; exit 1"
    unknown = "echo 'Socket timed out' >&2; exit 1"
    table = ((silent, "true"), (silent, unknown), ("echo", "true"), ("echo hello", "true"))
    for number, (sbatch, squeue) in enumerate(table):
        site.add("sbatch", sbatch)
        site.add("squeue", squeue)
        plan, paths = make(tmp_path / str(number))
        with pytest.raises(PerhapsSubmittedError, match="may or may not be in the queue") as error:
            submit_or_remove(SlurmBackend(), plan, paths)
        assert error.value.cause == (TIMED_OUT if sbatch is silent else sbatch[5:] or None)
        assert "squeue --me" in error.value.hints[0]
        assert str(paths.root) in error.value.hints[1]
        assert paths.script.exists()
        assert len(site.calls("sbatch")) == number + 1


def test_ctrl_c_while_sbatch_hangs_takes_the_job_back(site: Stubs, tmp_path: Path) -> None:
    interrupt = f"kill -INT {os.getpid()}"
    site.add("sbatch", f"{interrupt}; /bin/sleep 60")
    plan, paths = make(tmp_path)
    site.add("squeue", f"echo '77|{paths.root}/job.sbatch {paths.root}'")
    site.add("scancel")
    with pytest.raises(KeyboardInterrupt):
        submit_or_remove(SlurmBackend(), plan, paths)
    assert site.calls("scancel") == [["scancel", "77"]]
    assert not (tmp_path / "runs").exists()
    site.add("scancel", "echo 'no' >&2; exit 1")
    plan, paths = make(tmp_path)
    site.add("squeue", f"echo '78|{paths.root}/job.sbatch {paths.root}'")
    with pytest.raises(PerhapsSubmittedError, match="interrupted; the job may or may not be in"):
        submit_or_remove(SlurmBackend(), plan, paths)
    assert paths.script.exists()


def test_other_commands_of_submitit_are_run_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("clusterrun.backends.slurm.executor")
    argv = ["/bin/bash", "-c", "echo $GIVEN >&2; exit 3"]
    with pytest.raises(utils.FailedJobError, match="yes"):
        utils.CommandFunction(argv, verbose=False, env={"GIVEN": "yes"})()
    assert capsys.readouterr().err == "yes\n"


# Cancelling and asking


def test_cancel_tells_of_jobs_that_scancel_passes_over_in_silence(site: Stubs) -> None:
    site.add("scancel")  # scancel of an unknown id exits 0 (22.05)
    site.add("squeue", 'echo "7|RUNNING|n1|0:02|10:00|1|N/A|||None"')
    site.add("sacct")
    with pytest.raises(JobNotFoundError, match="not know job 8"):
        SlurmBackend().cancel(["7", "8"])
    assert site.calls("scancel") == [["scancel", "7", "8"]]
    words = "scancel: error: Kill job error on job id 7: Access/permission denied"
    site.add("scancel", f"echo '{words}' >&2; exit 1")
    with pytest.raises(ClusterrunError, match="scancel failed") as failed:
        SlurmBackend().cancel(["7"])
    assert failed.value.cause == words


def test_another_cluster_is_named_in_every_call(site: Stubs) -> None:
    site.add("scancel")
    site.add("squeue", 'echo "7|FAILED|n1|0:02|10:00|1|2|||None"')
    site.add("sacct", "exit 1")
    site.add("scontrol")
    SlurmBackend(slurm_cluster="tuxA").cancel(["7"])
    assert all("--clusters=tuxA" in call for call in site.calls())
    assert {call[0] for call in site.calls()} == {"scancel", "squeue", "sacct", "scontrol"}


def test_what_the_first_job_waited_for_is_not_waited_for_again(site: Stubs, tmp_path: Path) -> None:
    waits = [Directive(name="dependency", value="afterok:7"), Directive(name="hold")]
    waits += [Directive(name="begin", value="now+2hours")]
    plan, paths = make(tmp_path, directives=tuple(waits))
    made = record.new_record(plan, paths, argv=(), now=1.0)
    site.add("sbatch", "echo 53")
    site.add("scontrol", "exit 1")  # a job that stays held is a job: its status says so
    table: list[tuple[dict[str, Any], list[str]]] = [
        ({"waits": True}, []),
        ({}, ["--dependency=", "--begin=now"]),
        ({"after": "52"}, ["--dependency=afterany:52", "--begin=now"]),
    ]
    for released, (how, options) in enumerate(table):
        SlurmBackend().submit_again(plan, made, **how)
        words = site.calls("sbatch")[-1]
        assert [word for word in words if word.startswith(("--dependency", "--begin"))] == options
        assert site.calls("scontrol") == [["scontrol", "release", "53"]] * released
    site.add("scontrol", f"kill -INT {os.getpid()}; /bin/sleep 60")
    site.add("squeue", f"echo '53|{paths.root}/job.sbatch {paths.root}'")
    site.add("scancel")
    with pytest.raises(KeyboardInterrupt):
        SlurmBackend().submit_again(plan, made)
    assert site.calls("scancel") == [["scancel", "53"]]


# The next job of a run, submitted from inside this one


@pytest.fixture
def login(stubs: Stubs) -> Stubs:
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
    return finished(
        [sys.executable, "-c", SUBMIT_SUCCESSOR, made.run_dir, *nodes],
        env={**os.environ, "SLURM_JOB_ID": "52", **env},
    )


def test_sbatch_gets_the_script_and_both_ids_lead_to_the_run(login: Stubs, tmp_path: Path) -> None:
    made = run_of(tmp_path, pass_env=("SLURM_TOKEN",))
    own = {"SLURM_NNODES": "7", "SBATCH_PARTITION": "low", "PET_A": "1"}
    done = successor(made, SLURM_TOKEN="t", LANG="x", **own)
    assert (done.returncode, done.stdout, done.stderr) == (0, "53\n", "")
    assert login.calls("sbatch") == [
        [
            *("sbatch", "--parsable", f"--output={made.paths.batch_output}"),
            *(f"--chdir={tmp_path}", "--dependency=afterany:52"),
            *(str(made.paths.script), made.run_dir),
        ]
    ]
    seen = login.environ("sbatch")
    assert {"SLURM_JOB_ID", *own} & seen.keys() == set()
    assert (seen["SLURM_TOKEN"], seen["LANG"]) == ("t", "x")
    now = record.read(made.paths)
    assert (now.job_id, now.earlier_job_ids) == ("53", ("52",))
    for job_id in ("52", "53"):
        assert record.resolve_job(job_id, [made.paths.runs_dir]).run_dir == made.run_dir


def test_lost_nodes_join_those_of_the_plan_and_are_not_waited_for(
    login: Stubs, tmp_path: Path
) -> None:
    made = run_of(tmp_path, directives=(Directive(name="exclude", value="node[4-5]"),))
    successor(made, "node2", "node4")
    (call,) = login.calls("sbatch")
    assert "--exclude=node[2,4-5]" in call
    assert not any(word.startswith("--dependency") for word in call)


def test_a_refusal_is_one_line_and_changes_nothing(login: Stubs, tmp_path: Path) -> None:
    made = run_of(tmp_path)
    before = made.paths.record.read_bytes()
    silent = "Unable to contact slurm controller"
    for sbatch, said in (
        ("echo 'sbatch: error: no' >&2; exit 1", "sbatch refused the job: sbatch: error: no"),
        (f"echo 'sbatch: error: {silent}' >&2; exit 1", silent),
        ("exit 0", "may or may not be in the queue"),
    ):
        login.add("sbatch", sbatch)
        done = successor(made)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert said in done.stderr
        assert made.paths.record.read_bytes() == before
        assert os.listdir(made.paths.runs_dir.by_job) == ["52"]


def test_a_job_that_cannot_be_recorded_is_taken_back(
    login: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run_of(tmp_path)
    before = made.paths.record.read_bytes()
    link = record.link_job

    def full(paths: RunPaths, job_id: str) -> None:
        if job_id == "53":
            raise OSError("no space left on device")
        link(paths, job_id)

    monkeypatch.setattr(record, "link_job", full)
    monkeypatch.setattr(query, "cached", lambda *_: {})
    with pytest.raises(ClusterrunError, match=r"cannot write .*job\.json"):
        submit_successor(made.paths.root, read_plan(made.paths), (), {"SLURM_JOB_ID": "52"})
    assert login.calls("scancel") == [["scancel", "53"]]
    assert made.paths.record.read_bytes() == before


def test_in_a_chain_the_next_job_waits_already_until_all_are_used(
    login: Stubs, tmp_path: Path
) -> None:
    login.add("scontrol")
    made = dataclasses.replace(run_of(tmp_path), chain_length=3, chained_job_ids=())
    record.write(made)
    done = successor(made)
    assert (done.returncode, login.calls("sbatch")) == (1, [])
    assert done.stderr == "this was the last of the chain's 3 jobs\n"
    record.write(dataclasses.replace(made, chained_job_ids=("60", "61")))
    done = successor(made, "node2")
    assert (done.returncode, done.stdout, login.calls("sbatch")) == (0, "60\n", [])
    assert login.calls("scontrol") == [["scontrol", "update", "JobId=60", "ExcNodeList=node2"]]
    now = record.read(made.paths)
    assert (now.earlier_job_ids, now.job_id, now.chained_job_ids) == (("52",), "60", ("61",))
