"""Where jobs write that clusterrun did not start: text of a real Slurm 22.05, and who is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterrun.backends import foreign
from clusterrun.backends.foreign import parse_parts, parse_rows
from clusterrun.errors import SchedulerUnreachableError
from clusterrun.state import JobState

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
    "StdErr=/tmp/f/w ork/o ut/my job StdOut=x 13-%N-%t.out StdIn=/dev/null "
    "StdOut=/tmp/f/w ork/o ut/my job StdOut=x 13-%N-%t.out Power= \n"
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
LATER = (  # fields of newer versions behind StdOut
    f"JobId=9 JobName=a {MIDDLE} Command=/w/a.sh WorkDir=/w StdErr=/w/e StdIn=/dev/null "
    "StdOut=/w/o TresPerNode=gres/gpu:8 MailUser=me MailType=END\n"
)

UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
SILENT = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def row(*values: str) -> str:
    return "\x1f".join(values) + "\n"


def job_row(label: str, raw_id: str, name: str, workdir: str, line: str) -> str:
    state = ("COMPLETED", "0:0", "s5node[1-2]", "1", "10", "1795259200", "1795259201", "None")
    return row(label, *state, raw_id, "root", name, workdir, line)


def step_row(label: str, line: str) -> str:
    state = ("COMPLETED", "0:0", "s5node1", "1", "", "1795259200", "1795259201", "")
    return row(label, *state, label, "", "bash", "", line)


# slurmctld's answer


def test_paths_and_names_with_spaces_that_imitate_fields_are_read_whole() -> None:
    (part,) = parse_parts(PLAIN)
    assert part.name == "my job StdOut=x"
    assert part.workdir == Path("/tmp/f/w ork")
    assert part.stdout == "/tmp/f/w ork/o ut/my job StdOut=x 13-%N-%t.out"
    assert part.stderr == part.stdout
    assert (part.job.job_id, part.label, part.user) == ("13", "13", "root")
    assert (part.job.state, part.job.nodelist) == (JobState.COMPLETED, "s5node[1-2]")


def test_a_comment_or_a_name_that_imitates_fields_fools_nobody() -> None:
    (part,) = parse_parts(FORGED)
    assert part.stdout == part.stderr == "/tmp/f/com ment-20.out"
    assert part.workdir == Path("/tmp/f")
    assert part.job.state is JobState.COMPLETED
    assert part.name == "x UserId=me(0) GroupId=1 JobState=FAILED"


def test_tasks_of_an_array_are_parts_with_labels_of_their_own() -> None:
    parts = parse_parts(ARRAY)
    assert [(part.label, part.job.job_id, part.array_task_id) for part in parts] == [
        ("2_3", "2", "3"),
        ("2_1", "11", "1"),
        ("14", "14", ""),
    ]
    assert parts[1].stdout == "/w/arr-2_%4a.out"
    assert foreign.symbols(parts[1]) == {
        "j": "11",
        "A": "2",
        "a": "1",
        "u": "root",
        "x": "arr x",
        "r": "0",
    }


def test_parts_of_a_heterogeneous_job_are_named_as_slurm_does() -> None:
    assert [part.label for part in parse_parts(HET)] == ["7", "7+1"]


def test_a_newline_in_a_name_makes_no_second_job() -> None:
    (part,) = parse_parts(NEWLINE)
    assert (part.name, part.stdout) == ("new\nline", "/w/n-15.out")


def test_an_allocation_has_no_output() -> None:
    (part,) = parse_parts(ALLOCATION)
    assert (part.stdout, part.stderr, part.workdir) == ("", "", Path("/tmp/f"))


def test_fields_of_newer_versions_behind_the_output_are_no_part_of_it() -> None:
    (part,) = parse_parts(LATER)
    assert part.stdout == "/w/o"


def test_patterns_of_the_scripts_srun_lines_are_found_but_not_what_the_shell_completes(
    tmp_path: Path,
) -> None:
    script = tmp_path / "with space.sh"
    script.write_text(
        "#!/bin/bash\n"
        "srun --unbuffered --output /l/%j_%t_log.out \\\n  --error=/l/%j_%t_log.err python t.py\n"
        "# srun -o commented-%t.out x\n"
        "srun -o $DIR/%t.out x\n"
        "srun python t.py -o result.json\n"
    )
    (part,) = parse_parts(PLAIN.replace("Command=(null)", f"Command={script} arg"))
    assert part.step_patterns == (("/l/%j_%t_log.out", False), ("/l/%j_%t_log.err", True))


# accounting's answer


def test_what_slurmctld_forgot_is_read_from_the_submit_lines_of_job_and_steps() -> None:
    text = (
        job_row("13", "13", "gpt", "/w", "sbatch -N2 -o out/%x-%j.out --error=%j.err gone.sh")
        + step_row("13.batch", "")
        + step_row("13.0", "srun -N2 -n4 -o out-%j-%t.log -e err-%j-%4t.log bash -c echo task")
    )
    (part,) = parse_rows(text)
    assert (part.stdout, part.stderr) == ("out/%x-%j.out", "%j.err")
    assert part.step_patterns == (("out-%j-%t.log", False), ("err-%j-%4t.log", True))
    assert (part.label, part.job.job_id, part.workdir) == ("13", "13", Path("/w"))
    assert (part.job.state, part.job.start) == (JobState.COMPLETED, 1795259200.0)


def test_the_scripts_own_directives_count_where_the_command_line_is_silent(tmp_path: Path) -> None:
    (tmp_path / "arr.sh").write_text(
        "#!/bin/bash\n#SBATCH --array=1-3\n#SBATCH -e 'e r-%A_%a.err' # why\n#SBATCH -o a.out\n"
        "echo\n#SBATCH -o too-late.out\n"
    )
    line = "sbatch -o b.out arr.sh -o of-the-script"
    (part,) = parse_rows(job_row("2_1", "11", "arr x", str(tmp_path), line))
    assert (part.stdout, part.stderr) == ("b.out", "e r-%A_%a.err")
    assert (part.label, part.array_job_id, part.array_task_id) == ("2_1", "2", "1")


@pytest.mark.parametrize(("label", "pattern"), [("3", "slurm-%j.out"), ("3_1", "slurm-%A_%a.out")])
def test_without_any_option_the_output_is_slurms_own(label: str, pattern: str) -> None:
    (part,) = parse_rows(job_row(label, "3", "wrap", "/w", "sbatch --wrap echo hi"))
    assert (part.stdout, part.stderr) == (pattern, pattern)


def test_accountings_rows_with_newlines_and_waiting_arrays_are_read() -> None:
    text = job_row("15", "15", "new\nline", "/w", "sbatch -J new\nline -o n-%j.out --wrap sleep 1")
    text += job_row("14_[1-3%1]", "14", "wrap", "/w", "sbatch -o p-%A_%a.out --wrap sleep 1")
    text += job_row("7+1", "8", "wrap", "/w", "sbatch -n1 : -n2 --wrap echo het")
    assert [(part.label, part.name) for part in parse_rows(text)] == [
        ("15", "new\nline"),
        ("14_[1-3%1]", "wrap"),
        ("7+1", "wrap"),
    ]


# Who is asked


def test_a_job_that_slurmctld_knows_costs_one_question(stubs: Stubs) -> None:
    stubs.add("scontrol", f"echo '{PLAIN.strip()}'")
    stubs.add("sacct")
    assert [part.label for part in foreign.ask("13")] == ["13"]
    assert stubs.calls() == [["scontrol", "--oneliner", "show", "job", "13"]]


@pytest.mark.parametrize("said", [UNKNOWN, "echo 'Job 2_9 not found'; exit 1"])
def test_a_job_that_slurmctld_forgot_is_asked_of_accounting(stubs: Stubs, said: str) -> None:
    stubs.add("scontrol", said)
    stubs.add("sacct", f"printf %s '{job_row('13', '13', 'gpt', '/w', 'sbatch a.sh')}'")
    assert [part.name for part in foreign.ask("13")] == ["gpt"]


@pytest.mark.parametrize(
    "sacct", ["true", "echo 'Slurm accounting storage is disabled' >&2; exit 1", None]
)
def test_a_job_that_nobody_knows_is_no_error(stubs: Stubs, sacct: str | None) -> None:
    stubs.add("scontrol", UNKNOWN)
    if sacct is not None:
        stubs.add("sacct", sacct)
    assert foreign.ask("99999") == []


def test_where_there_is_no_slurm_nobody_knows_a_job(stubs: Stubs) -> None:
    assert foreign.ask("13") == []
    assert stubs.calls() == []


def test_a_silent_slurmctld_is_never_mistaken_for_an_unknown_job(stubs: Stubs) -> None:
    stubs.add("scontrol", f"echo '{SILENT}' >&2; exit 1")
    with pytest.raises(SchedulerUnreachableError) as silent:
        foreign.ask("13")
    assert silent.value.cause == SILENT


def test_accounting_that_does_not_answer_is_never_mistaken_for_an_unknown_job(
    stubs: Stubs,
) -> None:
    words = "sacct: error: Problem talking to the database: Connection refused"
    stubs.add("scontrol", UNKNOWN)
    stubs.add("sacct", f"echo '{words}' >&2; exit 1")
    with pytest.raises(SchedulerUnreachableError) as silent:
        foreign.ask("13")
    assert silent.value.cause == words


def test_the_state_is_asked_again_at_most_as_often_as_allowed(stubs: Stubs) -> None:
    stubs.add("scontrol", f"echo '{PLAIN.replace('=COMPLETED', '=RUNNING').strip()}'")
    assert foreign.current_state("13", max_age_s=60) is JobState.RUNNING
    assert foreign.current_state("13", max_age_s=60) is JobState.RUNNING
    assert len(stubs.calls()) == 1
    stubs.add("scontrol", UNKNOWN)
    assert foreign.current_state("13", max_age_s=0) is JobState.UNKNOWN


@pytest.mark.parametrize(
    ("states", "joint"),
    [
        (["COMPLETED", "PENDING", "RUNNING"], "RUNNING"),
        (["COMPLETED", "FAILED", "PENDING"], "PENDING"),
        (["COMPLETED", "FAILED"], "FAILED"),
        (["COMPLETED", "COMPLETED"], "COMPLETED"),
        ([], "UNKNOWN"),
    ],
)
def test_a_job_of_several_parts_is_active_while_one_is(states: list[str], joint: str) -> None:
    assert foreign.joint_state([JobState(state) for state in states]) is JobState(joint)
