"""Where the output of other tools' jobs goes: text of real Slurms, and who is asked."""

from __future__ import annotations

import pytest

from clusterrun.backends.slurm import foreign
from clusterrun.backends.slurm.foreign import parse_parts
from clusterrun.errors import SchedulerUnreachableError
from clusterrun.shared.state import JobState

from .conftest import Stubs

MIDDLE = (
    "UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901743 Nice=0 Account=root "
    "QOS=normal JobState=COMPLETED Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 "
    "Reboot=0 ExitCode=0:0 RunTime=00:00:01 TimeLimit=365-00:00:00 TimeMin=N/A "
    "SubmitTime=1795259200 EligibleTime=1795259200 AccrueTime=1795259200 StartTime=1795259200 "
    "EndTime=1795259201 Deadline=N/A SuspendTime=None SecsPreSuspend=0 Partition=main "
    "AllocNode:Sid=localhost:6963 ReqNodeList=(null) ExcNodeList=(null) NodeList=s5node[1-2] "
    "BatchHost=s5node1 NumNodes=2 NumCPUs=4 NumTasks=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:* "
    "TRES=cpu=4,mem=4000M,node=2,billing=4 Socks/Node=* NtasksPerN:B:S:C=2:0:*:* CoreSpec=* "
    "MinCPUsNode=2 MinMemoryCPU=1000M MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 "
    "OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null)"
)
PLAIN = (
    f"JobId=13 JobName=my job StdOut=x {MIDDLE} Command=(null) WorkDir=/tmp/f/w ork "
    "StdErr=/tmp/f/w ork/o ut/my job x=1 13-%N-%t.out StdIn=/dev/null "
    "StdOut=/tmp/f/w ork/o ut/my job x=1 13-%N-%t.out Power= \n"
)
FORGED = (
    f"JobId=20 JobName=x UserId=me(0) GroupId=1 JobState=FAILED {MIDDLE} Command=(null) "
    "WorkDir=/tmp/f Comment=x StdErr=/e StdIn=/i StdOut=/evil  StdErr=/tmp/f/com ment-20.out "
    "StdIn=/dev/null StdOut=/tmp/f/com ment-20.out Power= \n"
)
ARRAY = (
    f"JobId=2 ArrayJobId=2 ArrayTaskId=3 JobName=arr x {MIDDLE} Command=/gone/arr.sh a "
    "WorkDir=/w StdErr=/w/arr-2_3.err StdIn=/dev/null StdOut=/w/arr-2_%4a.out Power= \n"
    f"JobId=11 ArrayJobId=2 ArrayTaskId=1 JobName=arr x {MIDDLE} Command=/gone/arr.sh a "
    "WorkDir=/w StdErr=/w/arr-2_1.err StdIn=/dev/null StdOut=/w/arr-2_%4a.out Power= \n"
    f"JobId=14 ArrayJobId=14 ArrayTaskId=1-3%1 ArrayTaskThrottle=1 JobName=wrap {MIDDLE} "
    "Command=(null) WorkDir=/w StdErr=/w/p-14_4294967294.out StdIn=/dev/null "
    "StdOut=/w/p-14_4294967294.out Power= \n"
)
HET = (
    f"JobId=7 HetJobId=7 HetJobOffset=0 JobName=wrap HetJobIdSet=7-8 {MIDDLE} Command=(null) "
    "WorkDir=/w StdErr=/w/slurm-7.out StdIn=/dev/null StdOut=/w/slurm-7.out Power= \n"
    f"JobId=8 HetJobId=7 HetJobOffset=1 JobName=wrap HetJobIdSet=7-8 {MIDDLE} Command=(null) "
    "WorkDir=/w StdErr=/w/slurm-8.out StdIn=/dev/null StdOut=/w/slurm-8.out Power= \n"
)
NEWLINE = (
    f"JobId=15 JobName=new\nline {MIDDLE} Command=(null) WorkDir=/w StdErr=/w/n-15.out "
    "StdIn=/dev/null StdOut=/w/n-15.out Power= \n"
)
ALLOCATION = f"JobId=24 JobName=alloc {MIDDLE} Command=(null) WorkDir=/tmp/f Power= \n"

UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
SILENT = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


# slurmctld's answer


def test_paths_and_names_with_spaces_are_read_whole() -> None:
    (part,) = parse_parts(PLAIN)
    assert part.stdout == part.stderr == "/tmp/f/w ork/o ut/my job x=1 13-%N-%t.out"
    assert (part.job.job_id, part.label) == ("13", "13")
    assert (part.job.state, part.job.nodelist) == (JobState.COMPLETED, "s5node[1-2]")


def test_a_comment_or_a_name_that_imitates_fields_fools_nobody() -> None:
    (part,) = parse_parts(FORGED)
    assert part.stdout == part.stderr == "/tmp/f/com ment-20.out"
    assert part.job.state is JobState.COMPLETED


def test_tasks_of_an_array_are_parts_with_labels_of_their_own() -> None:
    parts = parse_parts(ARRAY)
    assert [(part.label, part.job.job_id) for part in parts] == [
        *(("2_3", "2"), ("2_1", "11"), ("14", "14"))
    ]
    assert parts[1].stdout == "/w/arr-2_%4a.out"


def test_components_newlines_and_allocations_are_read_as_slurm_means_them() -> None:
    assert [part.label for part in parse_parts(HET)] == ["7", "7+1"]
    (part,) = parse_parts(NEWLINE)
    assert part.stdout == "/w/n-15.out"
    (part,) = parse_parts(ALLOCATION)
    assert (part.stdout, part.stderr) == ("", "")


def test_no_field_behind_the_output_is_taken_for_a_part_of_its_name() -> None:
    fields = (
        *("", " Power=", " SegmentSize=1", " Switches=1@00:05:00", " BurstBuffer=#BB_LUA x"),
        *(" GresEnforceBind=No", " KillOnInvalidDependent=Yes", " SpreadJob=1"),
        *(
            " ExpeditedRequeue=Yes",
            " OOMKillStep=0 TresPerNode=gres/gpu:8 MailUser=me MailType=END",
        ),
    )
    about = f"JobId=9 JobName=a {MIDDLE} Command=/w/a.sh SubmitLine=sbatch a.sh WorkDir=/w "
    for later in fields:
        (part,) = parse_parts(f"{about}StdErr= StdIn=/dev/null StdOut=/w/train log{later}\n")
        assert (part.stdout, part.stderr) == ("/w/train log", ""), later


# Who is asked


def test_only_slurmctld_is_asked_and_once(stubs: Stubs) -> None:
    stubs.add("scontrol", f"echo '{PLAIN.strip()}'")
    stubs.add("sacct")
    assert [part.label for part in foreign.ask("13")] == ["13"]
    assert stubs.calls() == [["scontrol", "--oneliner", "show", "job", "13"]]


def test_a_job_that_slurmctld_forgot_is_no_error(stubs: Stubs) -> None:
    assert foreign.ask("13") == []  # there is no Slurm
    for said in (UNKNOWN, "echo 'Job 2_9 not found'; exit 1"):
        stubs.add("scontrol", said)
        assert foreign.ask("13") == []


def test_a_silent_slurmctld_is_never_mistaken_for_an_unknown_job(stubs: Stubs) -> None:
    stubs.add("scontrol", f"echo '{SILENT}' >&2; exit 1")
    with pytest.raises(SchedulerUnreachableError) as silent:
        foreign.ask("13")
    assert silent.value.cause == SILENT


def test_a_job_of_several_parts_is_active_while_one_is() -> None:
    for words in (
        "COMPLETED PENDING RUNNING -> RUNNING",
        "COMPLETED FAILED PENDING -> PENDING",
        "COMPLETED FAILED -> FAILED",
        "COMPLETED COMPLETED -> COMPLETED",
        " -> UNKNOWN",
    ):
        states, _, joint = words.partition(" -> ")
        assert foreign.joint_state([JobState(word) for word in states.split()]) is JobState(joint)
