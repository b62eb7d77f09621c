"""What `submit` prints and leaves, on a pretended login node."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from clusterrun.rundir.end import Cause
from clusterrun.shared.finding import ok
from clusterrun.shared.state import JobState
from clusterrun.verbs import doctor, render
from clusterrun.verbs import status as status_verb
from tests.cli.conftest import CommandLine, Said
from tests.cli.outcomes import outcome
from tests.patience import patience, wait_for


def run_dir(here: CommandLine, job_id: str = "4711") -> Path:
    return (here.path / "runs" / "by-job" / job_id).resolve()


def test_stdout_is_what_sbatch_prints_and_the_rest_is_on_stderr(here: CommandLine) -> None:
    here.slurm()
    said = here("submit", "-N2", "--gpus-per-node", "4", "-c", "8", "train.py", "--lr", "1")
    assert (said.code, said.out) == (0, "Submitted batch job 4711\n")
    assert said.err.endswith(
        "  world      8 ranks = 2 nodes x 4, Slurm\n"
        "  launcher   forge, strategy ddp, cuda, precision bf16 or fp16, "
        "depending on the GPUs of the first node\n"
        f"  run dir    {run_dir(here)}\n"
        "  follow     clusterrun logs -f 4711\n"
        "  cancel     clusterrun cancel 4711\n"
    )


def test_parsable_is_the_id_with_the_cluster_where_there_are_several(here: CommandLine) -> None:
    here.slurm("echo '4711;tuxA'")
    assert here("submit", "--parsable", "train.py").out == "4711;tuxA\n"
    here.program("sbatch", "echo 4712")
    assert here("submit", "--parsable", "train.py").out == "4712\n"


def test_json_is_one_object_and_nothing_else(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "PLACES_OF_ONE_MACHINE", ())  # the project is in one
    here.slurm()
    said = here("submit", "--json", "-N2", "--nproc-per-node", "3", "train.py")
    answer = json.loads(said.out)
    root = run_dir(here)
    note = "no GPU requested: 3 CPU ranks per node over gloo"
    places = {"run_dir": str(root), "script": str(root / "job.sbatch")}
    counts = {"world_size": 6, "nodes": 2, "procs_per_node": 3, "gpus_per_node": 0}
    expected = {"job_id": "4711", "backend": "slurm", "run_id": root.name, **places, **counts}
    assert {name: answer[name] for name in expected} == expected
    assert answer["warnings"] == [{"code": "note", "message": note}]
    assert f"note: {note}\n" in said.err


def test_the_run_is_private_and_remembers_what_was_asked(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.slurm()
    monkeypatch.setattr("sys.argv", ["/somewhere/clusterrun", "submit", "train.py", "a b"])
    assert here("submit", "train.py", "a b").code == 0
    root = run_dir(here)
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    record = json.loads((root / "job.json").read_text())
    assert record["job_id"] == "4711"
    assert record["argv"] == ["clusterrun", "submit", "train.py", "a b"]
    assert re.fullmatch(r"\d{4}-\d{6}-[a-z2-9]{4}", root.name)
    assert '{script: train.py, args: ["a b"],' in (root / "resolved.yaml").read_text()


def test_render_prints_exactly_what_submit_sends(here: CommandLine) -> None:
    here.slurm()
    argv = ("-N2", "--gpus-per-node", "4", "--strategy", "zero2", "train.py", "a b", "$(x)")
    rendered = here("render", *argv).out
    assert here("submit", *argv).code == 0
    assert (run_dir(here) / "job.sbatch").read_text() == rendered
    assert here.asked("sbatch")[-2:] == [str(run_dir(here) / "job.sbatch"), str(run_dir(here))]


def test_variables_of_sbatch_are_told_and_removed(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.slurm(f'echo "$SBATCH_PARTITION" > {here.bin}/seen; echo 4711')
    monkeypatch.setenv("SBATCH_PARTITION", "debug")
    said = here("submit", "-p", "gpu", "train.py")
    assert (here.bin / "seen").read_text() == "\n"
    assert (
        "warning: set in your shell for sbatch: SBATCH_PARTITION=debug\n"
        "  note: clusterrun removes these variables for this submission; pass options instead\n"
    ) in said.err
    warnings = json.loads(here("submit", "--json", "-p", "gpu", "train.py").out)["warnings"]
    assert {"code": "sbatch_env_removed", "message": "SBATCH_PARTITION=debug"} in warnings


def looks(said: Said) -> dict[str, str]:
    """Return the lines of a dry run without their hints: the word by the look."""
    rows = [line.split() for line in said.out.splitlines() if not line.startswith("      ")]
    return {row[1]: row[0] for row in rows}


def test_a_dry_run_looks_before_the_queue_in_five_lines_and_leaves_nothing(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_: [ok("node.shm", "large")])
    words = "sbatch: Job 53 to start at 2026-11-21T10:00:00 using 8 processors on nodes n[1-2]"
    here.slurm(f'cat > {here.bin}/script; echo "{words} in partition gpu" >&2')
    said = here("submit", "--dry-run", "train.py")
    assert (said.code, len(said.out.splitlines())) == (0, 5), said.out
    assert looks(said) == dict.fromkeys(("job", "check", "doctor", "plan", "sbatch"), "ok")
    assert "Job 53 to start at 2026-11-21T10:00:00 using 8" in said.out
    assert here("render", "train.py").out == (here.bin / "script").read_text()
    assert here.asked("sbatch") == ["--test-only"]
    assert here.files() == ["train.py"]
    answer = json.loads(here("submit", "--dry-run", "--json", "train.py").out)
    assert [found["id"] for found in answer["findings"]] == [*looks(said)]


def test_a_dry_run_ends_with_3_if_a_look_says_no_and_5_if_slurm_did_not_answer(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.slurm("echo Job 53 to start >&2")
    blind = here("submit", "--dry-run", "train.py")  # nodes can't see where the test runs
    assert (blind.code, looks(blind)["doctor"]) == (3, "FAIL")
    assert "path.runs: " in blind.out
    monkeypatch.setattr(doctor, "examine", lambda *_: [ok("node.shm", "large")])
    here.slurm('echo "allocation failure: Invalid qos specification" >&2; exit 1')
    refused = here("submit", "--dry-run", "train.py")
    assert (refused.code, looks(refused)["sbatch"]) == (3, "FAIL")
    assert "allocation failure: Invalid qos specification" in refused.out
    here.program("sbatch", "echo Job 53 to start >&2")
    (here.path / "train.py").write_text("import os\nos.environ['MASTER_PORT'] = '29500'\n")
    model = "--set training.model=llama-3.1-8b --set training.seq_len=4096 --set training.gpu=t4"
    two = ("--gpus-per-node", "2", "--device", "cuda", *model.split())
    unfit = here("submit", "--dry-run", *two, "train.py")
    assert (unfit.code, looks(unfit)["plan"], looks(unfit)["check"]) == (3, "FAIL", "note")
    here.program("sbatch", "echo 'sbatch: error: cannot stat file /etc/slurm.conf' >&2; exit 1")
    silent = here("submit", "--dry-run", "train.py")
    assert (silent.code, looks(silent)["sbatch"]) == (5, "skip")
    assert here.files() == ["train.py"]


def test_options_that_exclude_each_other(here: CommandLine) -> None:
    here.slurm()
    for options, message in (
        (("--json", "--parsable"), "--json and --parsable cannot be combined"),
        (("--json", "--follow"), "--json and --follow cannot be combined"),
        (("--parsable", "--dry-run"), "with --dry-run, --parsable has no job id"),
    ):
        said = here("submit", *options, "train.py")
        assert (said.code, f"error: {message}" in said.err) == (2, True), options
    assert here.asked("sbatch") == []


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        ('{"state": "COMPLETED", "exit_code": 0, "ended_at": 1}', 0),
        ('{"state": "FAILED", "exit_code": 3, "ended_at": 1}', 3),
        ('{"state": "FAILED", "exit_code": 137, "ended_at": 1}', 137),
        ('{"state": "CANCELLED", "exit_code": null, "ended_at": 1}', 1),
    ],
)
def test_wait_gives_the_status_of_the_job(here: CommandLine, ended: str, code: int) -> None:
    here.slurm(f"echo '{ended}' > \"${{@: -1}}/end.json\"; echo 4711")
    said = here("submit", "-W", "train.py")
    assert (said.code, said.out) == (code, "Submitted batch job 4711\n")
    state = json.loads(ended)["state"]
    assert f"\njob 4711 {state}\n" in said.err


def test_pass_env_reaches_sbatch_and_no_file(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.slurm(f'echo "$HF_TOKEN" > {here.bin}/seen; echo 4711')
    monkeypatch.setenv("HF_TOKEN", "hf_verysecretverysecret")
    assert here("submit", "--pass-env", "HF_TOKEN", "train.py").code == 0
    assert (here.bin / "seen").read_text() == "hf_verysecretverysecret\n"
    state = here.path.parent / "state"
    files = [p for place in (here.path, state) for p in place.rglob("*") if p.is_file()]
    assert len(files) > 5
    for path in files:
        assert b"verysecret" not in path.read_bytes(), path


def test_arguments_that_are_not_utf8_stay_the_same_bytes(here: CommandLine) -> None:
    here.slurm()
    assert here("submit", "train.py", os.fsdecode(b"caf\xe9 \n '$HOME'")).code == 0
    plan = json.loads((run_dir(here) / "plan.json").read_text())
    assert os.fsencode(plan["entry"][1]) == b"caf\xe9 \n '$HOME'"


@pytest.mark.parametrize("option", ["--follow", "--wait"])
def test_the_failure_of_a_job_is_printed_once(here: CommandLine, option: str) -> None:
    why = {"reason": "rank 1 on n1: ValueError: bad", "message": "ValueError: bad\nline 2"}
    outcome(here.path, cause=Cause.EXCEPTION, node="n1", rank=1, code=1, **why)
    ended = '{"state": "FAILED", "exit_code": 1, "ended_at": 1}'
    here.slurm(
        'run="${@: -1}"; mkdir -p "$run/logs/a1"\n'
        f'mv {here.path}/attempts "$run"\n'
        f'echo "1700000000000000 - a {why["reason"]}" > "$run/logs/a1/n1.log"\n'
        f'echo "1700000000000001 - z 1 {why["reason"]}" >> "$run/logs/a1/n1.log"\n'
        f'echo "1700000000000000 - a - 0 {why["reason"]}" > "$run/logs/a1/n1.err"\n'
        f"sleep 0.1; echo '{ended}' > \"$run/end.json\"; echo 4711"
    )
    said = here("submit", option, "train.py")
    assert said.code == 1
    assert said.out.count("ValueError: bad") == (option == "--follow")
    assert said.err.count("ValueError: bad") == 1
    assert "  failed     rank 1 on n1: exit 1: ValueError: bad\n             line 2\n" in said.err
    assert said.err.splitlines()[-1].startswith("  run dir    ")


def test_wait_warns_once_of_a_job_that_cannot_start(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.slurm()
    here.program("squeue", "echo '4711|PENDING||0:00|UNLIMITED|N/A|N/A|||PartitionNodeLimit'")
    states = iter([JobState.PENDING, JobState.PENDING, JobState.CANCELLED, JobState.CANCELLED])
    ask = status_verb.quick_status
    monkeypatch.setattr(status_verb, "POLL_S", 0.0)
    monkeypatch.setattr(
        status_verb, "quick_status", lambda job, **_: replace(ask(job), state=next(states))
    )
    said = here("submit", "--wait", "-N9", "train.py")
    reason = "requests more nodes than the partition allows; it will not start"
    hint = "  note: to end it, run: clusterrun cancel 4711\n"
    assert said.err.count(f"warning: job 4711 is pending: {reason}\n{hint}") == 1


@pytest.mark.parametrize(("option", "last"), [("--wait", "\ninterrupted\n"), ("--follow", "")])
def test_ctrl_c_while_waiting_leaves_the_job_alone(
    here: CommandLine, option: str, last: str
) -> None:
    here.slurm()
    here.program("squeue", "echo '4711|RUNNING|n|1:00|UNLIMITED|N/A|N/A|||None'")
    process = subprocess.Popen(
        [sys.executable, "-m", "clusterrun", "submit", option, "train.py"],
        cwd=here.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: len(here.asked("squeue")) > 1, "the second look at the job")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30 * patience())
    assert (process.returncode, out) == (130, "Submitted batch job 4711\n")
    told = "\njob 4711 keeps running\n  to end it, run: clusterrun cancel --checkpoint 4711\n"
    assert err.endswith(f"{told}{last}")
    assert here.asked("scancel") == []


COUNTING = 'n=$(($(cat "$0.n" 2> /dev/null || echo 4710) + 1)); echo $n > "$0.n"; echo $n'


def test_a_chain_is_one_run_of_jobs_that_wait_for_each_other(here: CommandLine) -> None:
    here.slurm(COUNTING)
    said = here("submit", "-N2", "--chain", "3", "train.py")
    assert (said.code, said.out) == (0, "Submitted batch job 4711\n")
    assert "  chain      continues as 4712, 4713\n" in said.err
    words = here.asked("sbatch")
    assert [w for w in words if w.startswith("--dependency")] == [
        "--dependency=afterany:4711",
        "--dependency=afterany:4712",
    ]
    root = run_dir(here)
    assert words[-2:] == [str(root), "chained"]
    record = json.loads((root / "job.json").read_text())
    assert (record["job_id"], record["chained_job_ids"]) == ("4711", ["4712", "4713"])
    assert record["chain_length"] == 3
    assert {run_dir(here, job_id) for job_id in ("4712", "4713")} == {root}
    assert json.loads((root / "plan.json").read_text())["on_interrupt"] == "successor"


def test_a_chain_that_is_refused_leaves_no_job(here: CommandLine) -> None:
    here.slurm(COUNTING + '; [[ $n != 4713 ]] || { echo "sbatch: error: no" >&2; exit 1; }')
    for how in ("requeue", "stop"):
        said = here("submit", "-N2", "--chain", "2", "--on-interrupt", how, "train.py")
        assert (said.code, here.asked("sbatch")) == (2, [])
        assert f"error: a chain and --on-interrupt {how} contradict each other\n" in said.err
    said = here("submit", "-N2", "--chain", "4", "train.py")
    assert (said.code, said.out) == (1, "")
    assert ": sbatch: error: no" in said.err
    assert here.asked("scancel") == ["4711", "4712"]


def test_what_is_easily_meant_otherwise_is_noted(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here.path / "clusterrun.yml").write_text("slurm: {nodes: 2}\n")
    for name in ("NODES", "FOO", "TEST_PATIENCE", "REQUIRE_SLURM", "SITE_CONFIG"):
        monkeypatch.setenv(f"CLUSTERRUN_{name}", "/dev/null")
    ignored = "is set in your shell but is not a setting, so it is ignored"
    notes = [
        "note: clusterrun.yml is ignored; rename it to clusterrun.yaml",
        f"note: CLUSTERRUN_NODES {ignored}; use CLUSTERRUN_SLURM_NODES",
        "note: --mem 64 is 64 megabytes; for gigabytes: 64G",
        "note: --time 4:00 is minutes:seconds, 4 minutes; for hours: 4:00:00",
    ]
    said = here("render", "--cluster", "slurm", "--mem", "64", "-t", "4:00", "train.py")
    assert said.err.splitlines()[:4] == notes
    monkeypatch.setenv("CLUSTERRUN_ATTEMPT", "1")  # in a job, which has variables of its own
    said = here("render", "--cluster", "slurm", "--mem", "64G", "-t", "4:00:00", "train.py")
    assert not any(text in said.err for text in notes[1:])


def test_sbatch_has_a_session_of_its_own_and_no_input(here: CommandLine) -> None:
    session = "read -ra stat < /proc/$$/stat; [[ ${stat[5]} == $$ ]] || exit 8"
    here.slurm(f"{session}; read -r && exit 9; echo 4711")
    assert here("submit", "train.py").code == 0
    from submitit.core.utils import CommandFunction  # others in this process may pickle it

    assert pickle.loads(pickle.dumps(CommandFunction(["ls"]))).command == ["ls"]
    with pytest.raises(FileNotFoundError) as caught:
        CommandFunction(["no-such-program"], verbose=False)()
    assert caught.value.__cause__ is None
