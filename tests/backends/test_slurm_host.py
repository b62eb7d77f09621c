"""A job of Slurm as the conductor's host: the commands that it runs, and how it reads answers."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterrun.backends.slurm import host as slurm_host
from clusterrun.backends.slurm.backend import CHAINED
from clusterrun.backends.slurm.host import SlurmHost
from clusterrun.errors import SchedulerUnreachableError
from clusterrun.rundir import create, record
from clusterrun.rundir.attempt import take_attempt
from clusterrun.rundir.end import write_end
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.shared import shell
from clusterrun.shared.state import JobState
from tests.backends.builders import make_bundle
from tests.launch.samples import on_slurm

JOB = {"SLURM_JOB_ID": "42", "SLURM_JOB_PARTITION": "gpu"}


class Slurm:
    """What is asked of Slurm, and its answers by the words of the command."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, shell.Completed | Exception] = {}

    def says(self, words: str, text: str = "", rc: int = 0) -> Slurm:
        self.answers[words] = shell.Completed(rc=rc, stdout=text, stderr=text if rc else "")
        return self

    def run(self, argv: Sequence[str], **_: Any) -> shell.Completed:
        self.asked.append(" ".join(argv))
        for words, answer in self.answers.items():
            if words in self.asked[-1]:
                if isinstance(answer, Exception):
                    raise answer
                return answer
        return shell.Completed(rc=0, stdout="", stderr="")


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    slurm = Slurm()
    monkeypatch.setattr(shell, "run", slurm.run)
    return slurm


def host(root: Path, kind: str = "", env: Mapping[str, str] = {}, **asked: Any) -> SlurmHost:
    plan = on_slurm(**{"nodes": 2, "gpus_per_node": 4, **asked})
    return SlurmHost(RunPaths(root=root), plan, kind=kind, environ={**JOB, **env})


def srun(given: SlurmHost, *excluded: str, is_relaunch: bool = False) -> list[str]:
    return list(given.command(3, 7, is_relaunch=is_relaunch, excluded=excluded))


# Steps


def test_srun_gets_one_task_a_node_and_its_cpus(tmp_path: Path) -> None:
    assert srun(host(tmp_path, cpus_per_task=6)) == [
        *("srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=6"),
        *("--export=ALL", "--no-kill", "--wait=0", "--unbuffered", "--input=none"),
        *("bash", f"{tmp_path}/node.sh", str(tmp_path), "3", socket.gethostname(), "7"),
    ]


def test_cpus_that_the_site_chose_are_read_from_the_job(tmp_path: Path) -> None:
    per_node = "SLURM_JOB_CPUS_PER_NODE"
    for given, cpus in (
        ({per_node: "16(x2)"}, ["--cpus-per-task=16"]),
        ({per_node: "64,8(x3),32"}, ["--cpus-per-task=8"]),
        ({per_node: "64", "SLURM_CPUS_PER_TASK": "4"}, ["--cpus-per-task=4"]),
        ({}, []),
    ):
        argv = srun(host(tmp_path, env=given))
        assert [option for option in argv if option.startswith("--cpus")] == cpus


def test_a_relaunch_shares_what_a_lost_step_holds_and_does_not_wait(tmp_path: Path) -> None:
    first = srun(host(tmp_path))
    again = srun(host(tmp_path), "n2", "n5", is_relaunch=True)
    assert [option for option in again if option not in first] == [
        *("--exclude=n2,n5", "--overlap", "--mem=0", "--immediate=60")
    ]


def test_numbers_that_were_changed_by_hand_are_refused(tmp_path: Path) -> None:
    fewer = "the job has 1 node but was rendered for 3; render it again with --nodes 1"
    for nodes, reason in (("1", fewer), ("3", "")):
        given = host(tmp_path, env={"SLURM_JOB_NUM_NODES": nodes}, spare_nodes=1)
        assert given.refusal() == reason
    given.paths.accelerate.write_text("num_machines: 2\nnum_processes: 4\n")
    assert "accelerate.yaml now has num_processes 4" in given.refusal()
    own = "num_machines: 2\nnum_processes: 4\n"  # the user's file
    given.plan = dataclasses.replace(given.plan, accelerate_text=own)
    assert given.refusal() == ""
    words = given.srun
    given.srun = tuple(word.replace("--ntasks=2", "--ntasks=1") for word in words)
    assert "srun has --ntasks=1, but the job was rendered with another value" in given.refusal()
    given.srun = tuple(word for word in words if not word.startswith("--ntasks="))
    assert given.refusal() == ""  # the allocation's


# What is left to do


def test_the_next_job_of_a_chain_continues_only_after_the_time_limit(tmp_path: Path) -> None:
    given = host(tmp_path, CHAINED)
    given.paths.attempts_dir.mkdir()
    take_attempt(given.paths, 1, "the job before")
    assert given.nothing_left() == ""
    for state in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT):
        write_end(given.paths, state, 1)
        assert (given.nothing_left() == "") is (state is JobState.TIMEOUT), state
        assert host(tmp_path).nothing_left() == "", "a person has resumed the run"


def test_a_job_that_slurm_starts_again_leaves_a_run_that_another_continues(tmp_path: Path) -> None:
    for restarts, earlier, is_left in (("1", ["42"], False), ("1", [], True), ("0", ["42"], True)):
        given = host(tmp_path, env={"SLURM_RESTART_COUNT": restarts})
        given.paths.record.write_text(json.dumps({"job_id": "43", "earlier_job_ids": earlier}))
        assert (given.nothing_left() == "") is is_left


# The record


def test_a_run_that_was_submitted_by_hand_is_registered_once(tmp_path: Path) -> None:
    runs = RunsDir(root=tmp_path / "runs")
    paths = create.create_run(runs, "demo", "42", make_bundle(on_slurm(name="demo")))
    given = host(paths.root)
    given.register()
    before = paths.record.stat().st_mtime_ns
    given.register()
    assert json.loads(paths.record.read_text())["job_id"] == "42"
    assert record.resolve_job("42", [runs]).run_dir == str(paths.root)
    assert paths.record.stat().st_mtime_ns == before


# The time limit


def test_a_job_that_slurm_ends_at_its_time_limit_has_timed_out(tmp_path: Path) -> None:
    for end, minutes, elapsed_s, is_over in (
        ("4000000000", 60, 9999, False),
        ("1000000000", 60, 0, True),
        ("", 60, 3600 - 4, True),
        ("", 60, 3600 - 30, False),
        ("", None, 9999, False),
    ):
        given = host(tmp_path, env={"SLURM_JOB_END_TIME": end}, time_minutes=minutes)
        given.started = slurm_host.time.monotonic() - elapsed_s
        assert given.is_over() is is_over, (end, minutes, elapsed_s)


# slurmctld


def test_slurmctld_answers_unless_all_of_them_are_down(tmp_path: Path, slurm: Slurm) -> None:
    down = "Slurmctld(primary) at head is DOWN\n"
    up = "Slurmctld(backup) at other is UP\n"
    for answer, answers in ((up, True), (down, False), (down + up, True), ("", True)):
        slurm.says("ping", answer)
        assert host(tmp_path).answers() is answers


BEGAN = "2026-11-22T18:00:00"


def in_grace_time(
    slurm: Slurm,
    version: str = "24.11.5",
    preempted: str = BEGAN,
    mode: str = "REQUEUE",
    by: str = "preempt/partition_prio",
    requeue: int = 1,
) -> None:
    job = f"JobId=42 Requeue={requeue} Restarts=0 PreemptEligibleTime=None PreemptTime={preempted}"
    config = f"PreemptMode             = REQUEUE\nPreemptType             = {by}\n"
    slurm.says("show job", job)
    slurm.says("show config", f"{config}SLURM_VERSION           = {version}\n")
    slurm.says("show partition gpu", f"PartitionName=gpu PreemptMode={mode} State=UP")


def test_a_job_is_requeued_by_hand_unless_slurm_certainly_does_so(
    tmp_path: Path, slurm: Slurm
) -> None:
    """A second requeue would follow the last end of the run."""
    slurm.says("requeue", "Requested operation is disabled", 1)
    others: tuple[dict[str, Any], ...] = (
        *({}, {"version": "22.05.8"}, {"version": "23.11.10"}, {"preempted": "None"}),
        *({"mode": "CANCEL"}, {"by": "preempt/qos"}, {"requeue": 0}),
    )
    for otherwise in others:
        in_grace_time(slurm, **otherwise)
        refusal = host(tmp_path).requeue()
        is_asked = slurm.asked[-1] == "scontrol requeue 42"
        assert is_asked == bool(otherwise) == (refusal == "Requested operation is disabled")
    slurm.answers = {"show": SchedulerUnreachableError("silent")}
    assert host(tmp_path).requeue() == ""
    assert slurm.asked[-1] == "scontrol requeue 42"


OFF = "scontrol update JobId=42 Requeue=0"


def test_a_run_that_is_over_is_not_started_again(
    tmp_path: Path, slurm: Slurm, capfd: pytest.CaptureFixture[str]
) -> None:
    slurm.says("update", "slurm_update error: Access denied", 1)
    for restarts, preempted, is_off in (("0", "None", 0), ("0", BEGAN, 1), ("2", "None", 1)):
        in_grace_time(slurm, preempted=preempted)
        host(tmp_path, env={"SLURM_RESTART_COUNT": restarts}).stay_down()
        assert slurm.asked.count(OFF) == is_off
        said = "may start this job again: slurm_update error"
        assert (said in capfd.readouterr().err) == bool(is_off)
        slurm.asked.clear()
