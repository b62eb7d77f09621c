"""Reading what squeue, sacct and scontrol print: text of a real Slurm 22.05, and odd cases."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterrun.backends.base import SchedulerJob
from clusterrun.backends.slurm import query
from clusterrun.backends.slurm.backend import SlurmBackend
from clusterrun.backends.slurm.query import parse_sacct, parse_scontrol, parse_squeue
from clusterrun.errors import SchedulerUnreachableError
from clusterrun.shared.state import JobState
from tests.patience import patience

from .conftest import Stubs

# Captured with SLURM_TIME_FORMAT=%s: a failed job, a held one, one that runs, one that waits,
# the parts of an array, a job while it is requeued after a preemption.
SQUEUE = """\
10|FAILED|node1|0:00|UNLIMITED|1795257574|1795257574|||NonZeroExitCode
13|PENDING||0:00|UNLIMITED|N/A|N/A|||JobHeldUser
11|RUNNING|node[1-2]|0:02|10:00|1795257574|1795258174|||None
12|PENDING||0:00|UNLIMITED|1795258174|NONE|||Resources
4_0|COMPLETED|s3node1|0:01|365-00:00:00|1795259200|1795259201|||None
4_[2-3%1]|PENDING||0:00|UNLIMITED|N/A|N/A|||JobArrayTaskLimit
5|PENDING||0:00|UNLIMITED|1795262799|NONE|||BeginTime
14|COMPLETING|s3node[1-2]|0:00|UNLIMITED|N/A|N/A|||None
"""
SACCT = """\
10|FAILED|3:0|node1|0|UNLIMITED|1795257574|1795257574|None
11|RUNNING|0:0|node[1-2]|2|10|1795257574|Unknown|None
12|CANCELLED by 0|0:0|None assigned|0|Partition_Limit|None|1795257576|None
15|PREEMPTED|0:0|s3node[1-2]|23||1795259230|1795259253|None
16|OUT_OF_MEMORY|0:125|node1|61|10|1795259230|1795259291|OutOfMemory
17|TIMEOUT|0:0|node1|60|1|1795259230|1795259290|None
18|NODE_FAIL|1:0|node1|9|1|1795259230|1795259239|None
"""
SCONTROL = (
    "JobId=10 JobName=we|ird, name UserId=root(0) GroupId=root(0) MCS_label=N/A "
    "Priority=4294901750 Nice=0 Account=root QOS=normal JobState=FAILED Reason=NonZeroExitCode "
    "Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=3:0 RunTime=00:01:07 "
    "TimeLimit=UNLIMITED TimeMin=N/A SubmitTime=1795257574 EligibleTime=1795257574 "
    "AccrueTime=1795257574 StartTime=1795257574 EndTime=1795257641 Deadline=N/A "
    "PreemptEligibleTime=1795257574 PreemptTime=None SuspendTime=None SecsPreSuspend=0 "
    "LastSchedEval=1795257574 Scheduler=Main Partition=main AllocNode:Sid=localhost:4457 "
    "ReqNodeList=(null) ExcNodeList=(null) NodeList=node1 BatchHost=node1 NumNodes=1 NumCPUs=1 "
    "NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=1,mem=1000M,node=1,billing=1 "
    "Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=* MinCPUsNode=1 MinMemoryCPU=1000M "
    "MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 OverSubscribe=OK Contiguous=0 "
    "Licenses=(null) Network=(null) Command=/runs/job.sbatch /runs/demo WorkDir=/home/me "
    "StdErr=/runs/demo/batch.out StdIn=/dev/null StdOut=/runs/demo/batch.out Power= \n"
)


def test_a_job_without_a_time_limit_has_none_before_and_after_its_start() -> None:
    """At the start of such a job Slurm sets its limit to a year."""
    for limit, minutes in (("UNLIMITED", "UNLIMITED"), ("365-00:00:00", str(365 * 24 * 60))):
        text = f"JobId=7 JobState=RUNNING NodeList=n1 RunTime=00:01:00 TimeLimit={limit} Restarts=0"
        assert parse_scontrol(text).limit_s is None
        row = f"7|COMPLETED|0:0|n1|60|{minutes}|1795257574|1795257634|None"
        assert parse_sacct(row)["7"].limit_s is None


def test_squeue_is_read_whole() -> None:
    jobs = parse_squeue(SQUEUE)
    assert list(jobs) == ["10", "13", "11", "12", "4_0", "4_[2-3%1]", "5", "14"]
    told = {"source": "squeue", "start": 1795257574.0}
    runs = {"nodelist": "node[1-2]", "elapsed_s": 2, "limit_s": 600}
    assert jobs["11"] == SchedulerJob(job_id="11", state=JobState.RUNNING, **runs, **told)
    ended = {"reason": "NonZeroExitCode", "nodelist": "node1", "elapsed_s": 0, "end": told["start"]}
    assert jobs["10"] == SchedulerJob(job_id="10", state=JobState.FAILED, **ended, **told)
    waits = {"source": "squeue", "reason": "Resources", "expected_start": 1795258174.0}
    assert jobs["12"] == SchedulerJob(job_id="12", state=JobState.PENDING, **waits)
    assert jobs["14"].state is JobState.COMPLETING
    assert jobs["14"].start is None


def test_sacct_is_read_whole() -> None:
    jobs = parse_sacct(SACCT)
    states = " ".join(job.state.value for job in jobs.values())
    assert states == "FAILED RUNNING CANCELLED PREEMPTED OUT_OF_MEMORY TIMEOUT NODE_FAIL"
    assert jobs["10"] == SchedulerJob(
        job_id="10",
        state=JobState.FAILED,
        source="sacct",
        nodelist="node1",
        elapsed_s=0,
        start=1795257574.0,
        end=1795257574.0,
        exit_code=3,
    )
    assert jobs["12"] == SchedulerJob(
        job_id="12", state=JobState.CANCELLED, source="sacct", end=1795257576.0, exit_code=0
    )
    assert (jobs["16"].exit_code, jobs["16"].exit_signal) == (0, 125)
    assert jobs["11"].exit_code is None  # 0:0 of a job that runs means nothing


def test_scontrol_is_read_whole() -> None:
    assert parse_scontrol(SCONTROL) == SchedulerJob(
        job_id="10",
        state=JobState.FAILED,
        source="scontrol",
        reason="NonZeroExitCode",
        nodelist="node1",
        elapsed_s=67,
        start=1795257574.0,
        end=1795257641.0,
        exit_code=3,
        partition="main",
        asked_nodes=1,
    )


def test_a_job_name_that_imitates_fields_fools_nobody() -> None:
    forged = SCONTROL.replace("we|ird, name", "x JobState=COMPLETED ExitCode=0:0 NodeList=evil")
    forged = forged.replace("WorkDir=/home/me", "WorkDir=/x JobState=COMPLETED ExitCode=0:0")
    assert parse_scontrol(forged) == parse_scontrol(SCONTROL)


def test_odd_lines_move_no_field() -> None:
    line = "7|A_STATE_OF_2031||0:00|10:00|N/A|N/A|||ReqNodeNotAvail, Reserved|for|maintenance"
    jobs = parse_squeue(f"CLUSTER: tuxA\n{line}\nslurm: a banner\n")
    assert list(jobs) == ["7"]
    assert jobs["7"].reason == "ReqNodeNotAvail, Reserved|for|maintenance"
    assert (jobs["7"].state, jobs["7"].state.is_terminal) == (JobState.UNKNOWN, False)


# Asking


def squeue_says(stubs: Stubs, line: str) -> None:
    stubs.add("squeue", f"echo '{line}'")


RUNNING = "7|RUNNING|n1|0:02|10:00|1795257574|N/A|||None"
FAILED = "7|FAILED|n1|0:02|10:00|1795257574|1795257576|||NonZeroExitCode"


def test_a_running_job_costs_one_squeue_and_nothing_else(stubs: Stubs) -> None:
    squeue_says(stubs, RUNNING)
    stubs.add("sacct")
    stubs.add("scontrol")
    assert query.ask(["7"])["7"].state is JobState.RUNNING
    assert [call[0] for call in stubs.calls()] == ["squeue"]


def test_fields_are_named_and_json_is_not_asked_for(stubs: Stubs) -> None:
    stubs.add("squeue")
    stubs.add("sacct")
    query.ask(["7", "8"], slurm_cluster="tuxA", since=1795257574.0)
    (squeue,) = stubs.calls("squeue")
    assert squeue[1:] == [
        "--clusters=tuxA",
        "--noheader",
        "--states=all",
        f"--user={os.getuid()}",
        "--jobs=7,8",
        "--format=%i|%T|%N|%M|%l|%S|%e|%P|%D|%r",
    ]
    (sacct,) = stubs.calls("sacct")
    assert sacct[1:7] == [
        "--clusters=tuxA",
        "--allocations",
        "--noheader",
        "--parsable2",
        "--jobs=7,8",
        "--format=JobID,State,ExitCode,NodeList,ElapsedRaw,TimelimitRaw,Start,End,Reason",
    ]
    assert sacct[-1].startswith("--starttime=2026-11-2")


def test_no_filter_of_the_users_hides_a_job(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SQUEUE_USERS", "SQUEUE_FORMAT", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    squeue_says(stubs, RUNNING)
    query.ask(["7"])
    environ = stubs.environ("squeue")
    assert environ["SLURM_TIME_FORMAT"] == "%s"
    assert environ["SLURM_CONF"] == "/etc/slurm.conf"
    assert not {"SQUEUE_USERS", "SQUEUE_FORMAT", "SLURM_CLUSTERS"} & environ.keys()


def test_accounting_that_lags_does_not_bring_a_job_back(stubs: Stubs) -> None:
    squeue_says(stubs, FAILED)
    stubs.add("sacct", "echo '7|RUNNING|0:0|n1|1|10|1795257574|Unknown|None'")
    stubs.add("scontrol", f"echo '{SCONTROL.replace('JobId=10', 'JobId=7').strip()}'")
    job = query.ask(["7"])["7"]
    assert (job.state, job.exit_code, job.source) == (JobState.FAILED, 3, "scontrol")
    assert job.note == ""


def test_without_accounting_scontrol_knows_the_exit_status(stubs: Stubs) -> None:
    squeue_says(stubs, FAILED)
    stubs.add("scontrol", f"echo '{SCONTROL.replace('JobId=10', 'JobId=7').strip()}'")
    refused = "Problem talking to the database: Connection refused"
    for words in ("sacct was not found", refused):
        answer = query.ask(["7", "8"])
        assert answer["7"].exit_code == 3
        assert answer["7"].note == ""
        assert answer["8"].state is JobState.UNKNOWN
        why = f"accounting does not answer: {words}"
        assert answer["8"].note == f"slurmctld no longer knows this job; {why}"
        assert stubs.calls("scontrol")[-1] == ["scontrol", "--oneliner", "show", "job", "7"]
        stubs.add("sacct", f"echo 'sacct: error: first' >&2; echo '{refused}' >&2; exit 1")


def test_squeue_is_asked_for_one_job_or_one_user_where_that_is_all(stubs: Stubs) -> None:
    stubs.add("squeue")
    stubs.add("sacct")
    query.ask([str(number) for number in range(70_000_000, 70_010_000)])
    assert [len(stubs.calls(program)) for program in ("squeue", "sacct")] == [1, 1]
    for ids in (["7", "8"], ["7"]):
        query.ask(ids)
        assert (f"--user={os.getuid()}" in stubs.calls("squeue")[-1]) is (len(ids) > 1)


def test_a_silent_slurmctld_is_an_error(stubs: Stubs) -> None:
    words = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    stubs.add("squeue", f"echo '{words}' >&2; exit 1")
    with pytest.raises(SchedulerUnreachableError) as silent:
        query.ask(["7", "8"])
    assert silent.value.cause == words


def test_find_by_command_takes_the_newest_job_of_the_run(stubs: Stubs) -> None:
    for given in (" /runs/demo/{run}", " /runs/demo/{run} chained", ""):
        jobs = {9: "r1", 53: "r1", 60: "r10"}
        rows = [f"{job}|/runs/demo/{r}/job.sbatch{given.format(run=r)}" for job, r in jobs.items()]
        stubs.add("squeue", "\n".join(f"echo '{row}'" for row in (*rows, "61|(null)")))
        assert query.find_by_command("/runs/demo/r1", None) == "53"
        assert query.find_by_command("/runs/demo/r2", None) is None


# A scheduler is asked once in ten seconds, however many processes want to know


SAYS_IT_RUNS = 'echo "7|RUNNING|n1|0:02|10:00|1|N/A|||None"'


def job(state: JobState = JobState.RUNNING, **values: object) -> SchedulerJob:
    return SchedulerJob(job_id="7", state=state, source="squeue", **values)  # type: ignore[arg-type]


def test_the_same_question_is_answered_from_memory(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs.add("squeue", SAYS_IT_RUNS)
    stubs.add("sacct")
    first = SlurmBackend().query(["7"])
    assert SlurmBackend().query(["7"]) == first
    assert len(stubs.calls("squeue")) == 1
    SlurmBackend().query(["7"], max_age_s=0)  # an answer of now
    SlurmBackend().query(["7", "8"])  # a job that was submitted just now
    SlurmBackend(slurm_cluster="tuxA").query(["7"])
    monkeypatch.setenv("SLURM_CONF", "/another/slurm.conf")
    SlurmBackend().query(["7"])
    assert len(stubs.calls("squeue")) == 5


def test_an_old_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ask() -> dict[str, SchedulerJob]:
        asked.append(1)
        return {"7": job()}

    now = time.time()
    for moment in (now, now + 9, now + 11, now - 3600):  # the last: a clock was set back
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        query.cached(("7",), query.TTL_S, ask)
    assert len(asked) == 3


def test_processes_that_ask_at_once_cost_one_call(stubs: Stubs) -> None:
    stubs.add("squeue", f"/bin/sleep 0.5\n{SAYS_IT_RUNS}")
    code = (
        "from clusterrun.backends.slurm.backend import SlurmBackend\n"
        "print(SlurmBackend().query(['7'])['7'].state.value)"
    )
    many = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(4)
    ]
    assert {process.communicate(timeout=60 * patience())[0] for process in many} == {b"RUNNING\n"}
    assert len(stubs.calls("squeue")) == 1


def test_a_silent_scheduler_is_not_remembered(stubs: Stubs) -> None:
    stubs.add("squeue", "exit 1")
    stubs.add("sacct", "exit 1")
    for _ in range(2):
        with pytest.raises(Exception, match="squeue failed"):
            SlurmBackend().query(["7"])
    assert len(stubs.calls("squeue")) == 2


def test_a_memory_that_is_damaged_or_cannot_be_written_is_asked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, text in enumerate(("", "{", "[]", '{"asked_at": 9e99, "answer": {}}')):
        query.cached(("7",), 10, lambda: {"7": job()})
        (file,) = (tmp_path / "runtime" / "clusterrun").glob("*.json")
        file.write_text(text)
        anew = job(reason=f"anew {number}")
        assert query.cached(("7",), 10, lambda anew=anew: {"7": anew}) == {"7": anew}
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert query.cached(("7",), 10, lambda: {"7": job()}) == {"7": job()}


def test_what_is_remembered_is_private_and_forgotten_if_nobody_asks(tmp_path: Path) -> None:
    query.cached(("7",), 10, lambda: {"7": job()})
    directory = tmp_path / "runtime" / "clusterrun"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    for path in directory.iterdir():
        os.utime(path, (1, 1))
    query.cached(("8",), 10, lambda: {"8": job()})
    assert len(list(directory.glob("*.json"))) == 1
