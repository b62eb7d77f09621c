"""`resume` and `resubmit`: what they say, what they send, and what they refuse."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import submitit
from submitit.core import utils
from submitit.core.core import PicklingExecutor

from clusterrun.backends.base import Submission
from clusterrun.backends.slurm.backend import SlurmBackend, submit_successor
from clusterrun.errors import ClusterrunError
from clusterrun.node.recovery.conclude import past
from clusterrun.rundir.end import Cause
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.reading import read_plan
from clusterrun.rundir.record import JobRecord, read
from clusterrun.shared import checkpoint_files, locks
from clusterrun.verbs import resume
from tests.cli.conftest import CommandLine
from tests.cli.outcomes import checkpoint, outcome
from tests.cli.runs import ended, queue, running, submitted

FAILED = "4711|FAILED|node[17-18]|0:31:09|1-00:00:00|1000|2000|||NonZeroExitCode"


def failed(here: CommandLine, *argv: str) -> Path:
    """Submit a job that saved at step 100 and failed at step 140."""
    root = submitted(here, "4711", *(argv or ("-N2", "train.py")))
    outcome(root)
    ended(root, "FAILED", 137)
    checkpoint(root, 100, effective_batch=256)
    queue(here, FAILED)
    here.program("sbatch", "echo 4714")
    (here.bin / "sbatch.argv").unlink()
    return root


def record_of(root: Path) -> JobRecord:
    return read(RunPaths(root=root))


def test_resume_says_what_failed_and_submits_the_same_script(here: CommandLine) -> None:
    root = failed(here)
    script = (root / "job.sbatch").read_bytes()
    said = here("resume", "4711")
    assert (said.code, said.out) == (0, "Submitted batch job 4714\n")
    assert said.err == (
        "  ended      job 4711: rank 1 on node18: killed by SIGKILL at step 140\n"
        f"  from       {root}/checkpoints/step-00000100\n"
        "  attempt    2\n"
        f"  run dir    {root}\n"
        "  follow     clusterrun logs -f 4714\n"
        "  cancel     clusterrun cancel 4714\n"
    )
    assert here.asked("sbatch")[-2:] == [str(root / "job.sbatch"), str(root)]
    assert (root / "job.sbatch").read_bytes() == script


def test_submitit_runs_sbatch_for_a_run_a_resume_and_a_successor(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = utils.CommandFunction
    call, submit = command.__call__, PicklingExecutor._submit_command
    printed, jobs = [], []
    monkeypatch.setattr(command, "__call__", lambda it: printed.append(call(it)) or printed[-1])
    monkeypatch.setattr(
        PicklingExecutor, "_submit_command", lambda *its: jobs.append(submit(*its)) or jobs[-1]
    )
    root = failed(here)
    here("resume", "4711")
    here.program("sbatch", "echo '4715;tuxA'")
    plan = read_plan(RunPaths(root=root))
    assert submit_successor(root, plan, (), {"SLURM_JOB_ID": "4714"}) == "4715"
    assert printed == ["4711", "4714", "4715;tuxA"]
    assert [job.job_id for job in jobs] == ["4711", "4714", "4715"]
    assert all(isinstance(job, submitit.Job) for job in jobs)
    assert list(root.rglob("*.pkl")) == []


def test_the_run_keeps_both_ids_and_its_earlier_end(here: CommandLine) -> None:
    root = failed(here)
    here("resume", "4711")
    record = record_of(root)
    assert (record.job_id, record.earlier_job_ids) == ("4714", ("4711",))
    assert not (root / "end.json").exists()
    assert json.loads((root / "attempts/1/end.json").read_text())["state"] == "FAILED"
    queue(here, "4714|PENDING||0:00|1:00:00|N/A|N/A|||Resources")
    for job_id in ("4711", "4714"):
        assert "PENDING" in here("status", job_id).out


def test_what_follows_a_resumed_run_begins_at_its_next_attempt(here: CommandLine) -> None:
    log = RunPaths(root=failed(here)).log(1, "node17")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("1700000000000000 0 o an old line\n")
    queue(here, "4712|FAILED|n|1:00|1:00|1000|2000|||NonZeroExitCode")
    assert "an old line" in here("logs", "4711", "-a").out
    here.program("sbatch", "echo 4712")
    said = here("resume", "4711", "--follow")
    assert "Submitted batch job 4712" in said.out
    assert "an old line" not in said.out


def test_failures_before_a_run_that_left_no_end_was_resumed_count_no_more(
    here: CommandLine,
) -> None:
    root = failed(here)
    (root / "end.json").unlink()  # as where its batch script, or its controller, was killed
    assert len(past(RunPaths(root=root), 2)) == 1
    here("resume", "4711")
    assert past(RunPaths(root=root), 2) == []


def test_a_newer_checkpoint_that_is_damaged_is_named_with_its_fault(here: CommandLine) -> None:
    root = failed(here)
    (checkpoint(root, 140) / "model.pt").write_text("weights 14")
    said = here("resume", "4711")
    assert f"  from       {root}/checkpoints/step-00000100\n" in said.err
    assert "step-00000140 is incomplete and was skipped: model.pt has" in said.err


def test_a_run_that_is_active_is_refused_unless_forced(here: CommandLine) -> None:
    (failed(here) / "end.json").unlink()
    queue(here, running())
    said = here("resume", "4711")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(
        "error: job 4711 is still RUNNING; two jobs would write to one run directory\n"
    )
    assert here("cancel", "4711").code == 0
    said = here("resume", "4711")
    assert (said.code, "error: job 4711 is still COMPLETING" in said.err) == (2, True)
    assert said.err.endswith("hint: wait for its end: clusterrun status 4711 --wait\n")
    assert here.asked("sbatch") == []
    assert here("resume", "4711", "--force").code == 0


def test_a_run_whose_chain_goes_on_is_refused(here: CommandLine) -> None:
    root = failed(here)
    data = json.loads((root / "job.json").read_text()) | {"chained_job_ids": ["4712"]}
    (root / "job.json").write_text(json.dumps(data))
    queue(here, FAILED, "4712|PENDING||0:00|1:00:00|N/A|N/A|||Dependency")
    said = here("resume", "4711")
    assert said.code == 2
    assert "error: job 4712 is the next in a chain and will continue the run" in said.err


def test_where_slurm_is_silent_nobody_knows_and_nothing_is_sent(here: CommandLine) -> None:
    failed(here)
    words = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    here.program("squeue", f"echo '{words}' >&2; exit 1")
    here.program("sacct", "exit 1")
    assert (here("resume", "4711").code, here.asked("sbatch")) == (5, [])


def test_without_a_complete_checkpoint_only_scratch_goes_on(here: CommandLine) -> None:
    root = failed(here)
    (root / "checkpoints/step-00000100/.complete").unlink()
    said = here("resume", "4711")
    assert said.code == 2
    assert said.err.startswith(f"error: there is no complete checkpoint in {root}/checkpoints")
    assert "it has no .complete" in said.err
    assert "--from scratch" in said.err
    assert here.asked("sbatch") == []
    said = here("resume", "4711", "--from", "scratch")
    assert said.code == 0
    assert "  from       the beginning (1 newer checkpoint set aside)\n" in said.err
    assert checkpoint_files.listed(root / "checkpoints") == []


def test_without_a_name_the_newest_that_did_not_complete_is_resumed(here: CommandLine) -> None:
    failed(here)
    ended(submitted(here, "4712", "-N2", "--job-name", "bb", "train.py"), "COMPLETED", 0)
    root = submitted(here, "4713", "-N2", "--job-name", "cc", "train.py")
    record = json.loads((root / "job.json").read_text())
    (root / "job.json").write_text(json.dumps({**record, "job_id": ""}))  # being submitted
    here.program("sbatch", "echo 4714")
    said = here("resume", "cc")
    assert (said.code, "hint: wait for its job id" in said.err) == (2, True)
    said = here("resume")
    assert (said.code, said.out) == (0, "Submitted batch job 4714\n")
    assert said.err.startswith("using job 4711 (")


def test_from_an_older_checkpoint_sets_newer_ones_aside(here: CommandLine) -> None:
    root = failed(here)
    checkpoint(root, 140)
    said = here("resume", "4711", "--from", "step-100")
    assert said.code == 0
    assert "step-00000100 (1 newer checkpoint set aside)\n" in said.err
    assert [step for step, _ in checkpoint_files.listed(root / "checkpoints")] == [100]
    assert len(list((root / "checkpoints").glob("set-aside-*/step-00000140/.complete"))) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step-7", "there is no checkpoint of step 7 in this run\n  hint: use one of: step-1"),
        ("step-140", "checkpoint step-00000140 is incomplete"),
        ("/x/step-100", "'/x/step-100' is not latest, scratch or step-N"),
    ],
)
def test_a_start_that_is_not_there_is_refused(here: CommandLine, text: str, said: str) -> None:
    (failed(here) / "checkpoints/step-00000140").mkdir()
    answer = here("resume", "4711", "--from", text)
    assert (answer.code, here.asked("sbatch")) == (2, [])
    assert answer.err.startswith(f"error: {said}")


def test_no_checkpoint_is_read_but_the_one_to_start_from(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = failed(here)
    checkpoint(root, 120)
    checkpoint(root, 140)
    checksum, touched = checkpoint_files.checksum, []

    def read(file: Path) -> int:
        touched.append(file.parent.name)
        return checksum(file)

    monkeypatch.setattr(checkpoint_files, "checksum", read)
    for start in ("step-120", "latest", "scratch", "step-7"):
        here("resume", "4711", "--dry-run", "--from", start)
    assert touched == ["step-00000120", "step-00000140"]


def test_what_is_changed_is_shown_rendered_and_the_old_files_kept(here: CommandLine) -> None:
    root = failed(here)
    old = {path.name: path.read_bytes() for path in root.iterdir() if path.is_file()}
    said = here("resume", "4711", "--time", "2:00:00", "--set", "env.LEVEL=1")
    assert said.code == 0
    assert "  changes    slurm.time: (none) -> 02:00:00\n" in said.err
    assert "             env.LEVEL: (none) -> 1\n" in said.err
    assert "#SBATCH --time=120\n" in (root / "job.sbatch").read_text()
    kept = {path.name: path.read_bytes() for path in (root / "attempts/1/config").iterdir()}
    assert kept == {name: old[name] for name in kept}
    assert {"job.sbatch", "plan.json", "resolved.yaml", "env.sh", "node.sh"} <= kept.keys()
    assert record_of(root).time_minutes == 120
    written = [root / name for name in kept] + [root / "attempts/1/config" / name for name in kept]
    assert {path.stat().st_mode & 0o077 for path in written} == {0}


def test_the_configuration_of_today_does_not_count(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = failed(here)
    (here.path / "clusterrun.yaml").write_text("slurm: {partition: gpu}\n")
    monkeypatch.setenv("CLUSTERRUN_SLURM_ACCOUNT", "x")
    said = here("resume", "4711", "--time", "60")
    assert said.code == 0
    assert said.err.count("->") == 1  # the time
    assert "partition" not in (root / "job.sbatch").read_text().split("END_OF_FILE")[0]


@pytest.mark.parametrize("has_end", [True, False])
def test_a_refusal_of_sbatch_leaves_all_as_it_was(here: CommandLine, has_end: bool) -> None:
    root = failed(here)
    if not has_end:
        (root / "end.json").unlink()
    checkpoint(root, 140)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    here.program("sbatch", "echo 'sbatch: error: no' >&2; exit 1")
    said = here("resume", "4711", "--from", "step-100", "--time", "60")
    assert said.code == 1
    assert ": sbatch: error: no" in said.err
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    kept = root / "attempts/1/config"
    (root / ".resume.lock").unlink()
    after.pop(root / ".resume.lock")
    assert {path: text for path, text in after.items() if path.parent != kept} == before


def test_dry_run_says_all_and_does_nothing(here: CommandLine) -> None:
    root = failed(here)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    said = here("resume", "4711", "--dry-run", "--time", "60")
    assert (said.code, said.out) == (0, "")
    assert "slurm.time: (none) -> 01:00:00" in said.err
    assert said.err.endswith("note: --dry-run: nothing was submitted\n")
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert here.asked("sbatch") == []


def test_a_complete_run_stays_as_it_is_unless_something_changes(here: CommandLine) -> None:
    root = failed(here)
    ended(root, "COMPLETED", 0)
    said = here("resume", "4711")
    assert (said.code, said.out, here.asked("sbatch")) == (0, "", [])
    assert said.err == (
        f"note: run {root.name} is complete; to train further, pass new arguments: "
        "clusterrun resume 4711 -- ARGS\n"
    )
    (root / "checkpoints").rename(root / "saved")
    anew = "the run has no checkpoint; to train again: clusterrun resubmit 4711\n"
    assert here("resume", "4711").err.endswith(anew)
    (root / "saved").rename(root / "checkpoints")
    assert here("resume", "4711", "--set", "args=[--max-steps, 9]").code == 0
    assert here.asked("sbatch") != []


def test_another_number_of_ranks_is_said_with_the_new_batch(here: CommandLine) -> None:
    root = failed(here)
    said = here("resume", "4711", "-N", "3")
    assert said.code == 0
    words = "if the script refuses that, also change its batch size or accumulation"
    assert f"  batch      256 -> 384 (2 -> 3 ranks); {words}\n" in said.err
    assert (record_of(root).nodes, record_of(root).world_size) == (3, 3)


def test_shards_of_another_world_are_refused(here: CommandLine) -> None:
    root = failed(here, "-N2", "--strategy", "zero2", "train.py")
    said = here("resume", "4711", "-N", "3")
    assert (said.code, here.asked("sbatch")) == (2, [])
    assert said.err.startswith(
        "error: step-00000100 was saved by 2 ranks with zero2; "
        "it can't be read by 3 ranks with zero2\n"
    )
    said = here("resume", "4711", "--strategy", "ddp")
    assert "saved by 2 ranks with zero2; it can't be read by 2 ranks with ddp" in said.err
    assert here("resume", "4711", "-N", "3", "--from", "scratch").code == 0
    assert record_of(root).nodes == 3


def test_shards_of_other_parallel_sizes_are_refused(here: CommandLine) -> None:
    failed(here, "-N2", "--gpus-per-node", "4", "--strategy", "fsdp", "train.py")
    said = here("resume", "4711", "--set", "launch.tensor_parallel=4", "--exclude-bad")
    assert (said.code, here.asked("sbatch")) == (2, [])
    assert "step-00000100 was saved with launch.tensor_parallel not set; its shards" in said.err


def test_nodes_with_evidence_against_them_are_left_out(here: CommandLine) -> None:
    root = failed(here, "-N2", "-x", "node3", "train.py")
    outcome(root, 1, cause=Cause.NODE_LOST, node="node18", exclude=("node18",))
    outcome(root, 2, cause=Cause.HUNG, exclude=("node17",))
    said = here("resume", "4711", "--exclude-bad")
    assert said.code == 0
    assert "  changes    slurm.exclude: node3 -> node[3,17-18]\n" in said.err
    assert "#SBATCH --exclude='node[3,17-18]'" in (root / "job.sbatch").read_text()


def test_a_run_keeps_its_name_its_directory_and_its_cluster(here: CommandLine) -> None:
    failed(here)
    for argv in (("--job-name", "other"), ("--run-dir", "elsewhere"), ("--cluster", "local")):
        said = here("resume", "4711", *argv)
        assert (said.code, here.asked("sbatch")) == (2, [])
        assert " can't change its " in said.err
        assert "start a new run: clusterrun resubmit accepts another name" in said.err


def test_files_of_another_version_are_rendered_anew(here: CommandLine) -> None:
    root = failed(here)
    plan = json.loads((root / "plan.json").read_text())
    (root / "plan.json").write_text(json.dumps({**plan, "since_removed": 1}))
    assert here("resume", "4711").code == 0
    assert json.loads((root / "plan.json").read_text()) == plan


def test_a_run_is_locked_while_its_files_are_replaced(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed(here)
    monkeypatch.setattr(locks, "WAIT_S", 0.1)
    others: list[str] = []

    def meanwhile(*_: object, **__: object) -> Submission:
        with pytest.raises(ClusterrunError) as refused:
            resume.resume("4711", nodes=3)
        others.append(refused.value.message)
        return Submission(job_id="4714")

    monkeypatch.setattr(SlurmBackend, "submit_again", meanwhile)
    assert resume.resume("4711", nodes=4).job_id == "4714"
    assert len(others) == 1
    assert f"process {os.getpid()} on" in others[0]


def test_a_run_that_cannot_be_written_is_told(here: CommandLine) -> None:
    root = failed(here)
    (root / "attempts/1/config").write_text("in the way")
    said = here("resume", "4711", "--time", "60")
    assert (said.code, here.asked("sbatch")) == (1, [])
    assert said.err.splitlines()[-1].startswith(f"error: cannot write to {root}")


def test_resubmit_makes_a_new_run_of_the_frozen_configuration(here: CommandLine) -> None:
    root = failed(here, "-N2", "train.py", "--lr", "1")
    (here.path / "clusterrun.yaml").write_text("slurm: {partition: gpu}\n")
    said = here("resubmit", "4711", "--time", "60")
    assert (said.code, said.out) == (0, "Submitted batch job 4714\n")
    assert "  changes    slurm.time: (none) -> 01:00:00\n" in said.err
    new = (here.path / "runs/by-job/4714").resolve()
    assert new != root
    assert json.loads((new / "plan.json").read_text())["entry"] == ["train.py", "--lr", "1"]
    assert "partition" not in (new / "job.sbatch").read_text().split("END_OF_FILE")[0]
    assert not (new / "attempts").exists()
    assert record_of(root).job_id == "4711"


@pytest.mark.parametrize("verb", ["resume", "resubmit"])
def test_words_behind_two_dashes_replace_the_arguments_of_the_script(
    here: CommandLine, verb: str
) -> None:
    failed(here, "-N2", "train.py", "--max-steps", "200")
    said = here(verb, "4711", "--time", "1h", "--", "--max-steps", "400", "--", "-x")
    assert said.code == 0, said.err
    assert '"--max-steps", "200"] -> ["--max-steps", "400", "--", "-x"]' in said.err
    record = record_of(here.path / "runs/by-job/4714")
    assert read_plan(record.paths).entry == ("train.py", "--max-steps", "400", "--", "-x")
