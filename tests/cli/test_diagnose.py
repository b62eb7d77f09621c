"""`diagnose`: the command, its output and its exit status."""

from __future__ import annotations

import dataclasses
import json
import runpy
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterrun.cli.diagnose import MOST_BYTES
from clusterrun.diagnosis import table
from clusterrun.diagnosis.kinds import Doubt, Memory, Note, NoteSource, Suspicion
from clusterrun.rundir.attempt import take_attempt
from clusterrun.rundir.end import Cause, Reason
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import state_dir
from clusterrun.verbs.diagnose import causes
from tests.cli.conftest import CommandLine
from tests.cli.outcomes import outcome
from tests.cli.runs import ended, events, queue, running, submitted
from tests.logs.corpus import side_lines

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "diagnose.md"
DOUBT = Suspicion(kind=Doubt.NO_STEP, text="no step was taken")
LOG = """\
[rank0]: step 1 loss 2.5
[rank3]: Traceback (most recent call last):
[rank3]:   File "train.py", line 5, in <module>
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
[rank1]: RuntimeError: Connection reset by peer
"""


def over(here: CommandLine, code: int = 1, state: str = "FAILED") -> Path:
    """Submit a job that has ended."""
    root = submitted(here)
    queue(here)
    ended(root, state, code)
    return root


def answered(here: CommandLine) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(here("diagnose", "--json").out)
    return answer


def test_a_log_of_any_job(here: CommandLine) -> None:
    (here.path / "job.log").write_text(LOG)
    done = here("diagnose", "job.log")
    assert done.code == 3
    assert f"$ clusterrun diagnose job.log\n{done.out}```" in PAGE.read_text()
    (here.path / "other" / "logs").mkdir(parents=True)
    (here.path / "other" / "logs" / "4711_3_log.err").write_text(LOG.replace("[rank3]: ", ""))
    answer = json.loads(here("diagnose", "--json", "other").out)
    assert answer["verdict"]["ranks"] == "3"  # the name of submitit's file has the rank
    (here.path / "job.log").write_text("step 1 loss 2.5\n")
    done = here("diagnose", "job.log")
    assert (done.code, done.out) == (0, "signs      no cause found in 1 line\n")


def test_files_of_ranks_do_not_hide_each_others_errors(here: CommandLine) -> None:
    steps = "".join(f"step {n} loss 2.{n}\n" for n in range(1, 9))
    (here.path / "rank0.log").write_text(steps + "ValueError: bad sample\n")
    (here.path / "rank1.log").write_text(
        "step 1 loss 2\nTraceback (most recent call last):\nValueError: bad sample\n"
    )
    (here.path / "rank2.log").write_text(steps)
    answer = json.loads(here("diagnose", "--json", "rank1.log", "rank2.log").out)
    assert answer["verdict"]["class"] == "user_code_exception"
    assert answer["verdict"]["ranks"] == "1"


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("x.log", "y.log"), "cannot read the log 'x.log'"),
        (("-", "--stacks"), "--attempt, --bundle and --stacks need a run of clusterrun"),
        (("empty",), "no log in the directory 'empty'"),
        (("missing.log",), "cannot read the log 'missing.log'"),
        (("99999",), "no job or run '99999'"),
        (("9" * 300,), "no job or run '999"),  # as a file, it cannot be looked up
        (("99999",), "; or pass the job's log, such as slurm-4711.out; - is standard input"),
        (("4711", "--attempt", "3"), "job 4711 has no attempt 3\n  hint: choose 1"),
    ],
)
def test_what_cannot_be_diagnosed(here: CommandLine, words: tuple[str, ...], wrong: str) -> None:
    outcome(submitted(here))
    (here.path / "empty").mkdir()
    done = here("diagnose", *words)
    assert done.code in (2, 4)
    assert wrong in done.err


def test_a_job_that_completed_has_no_cause_and_may_be_suspect(here: CommandLine) -> None:
    root = over(here, 0, "COMPLETED")
    outcome(root, cause=Cause.COMPLETED, code=0)
    (root / "slurm" / "batch.out").write_text("CUDA out of memory. Tried to allocate 2 GiB\n")
    done = here("diagnose")
    assert done.code == 0
    assert "nothing failed: the job completed" in done.out
    outcome(root, cause=Cause.COMPLETED, code=0, suspicions=(DOUBT,))
    done = here("diagnose")
    assert done.code == 0
    assert "suspect    no step was taken\n" in done.out
    assert answered(here)["suspicions"] == [{"kind": "no_step", "text": "no step was taken"}]


def test_a_job_that_ended_before_its_first_attempt_has_a_reason(here: CommandLine) -> None:
    root = over(here, 2)
    (root / "attempts" / "1").rmdir()
    (root / "slurm" / "batch.out").write_text("clusterrun: n1: the job has 1 node\n")
    done = here("diagnose")
    assert (done.code, "failed     exit 2: n1: the job has 1 node\n" in done.out) == (3, True)


def test_a_failure_without_a_known_cause_keeps_its_reason(here: CommandLine) -> None:
    root = over(here, 122)
    reason = "node2: a setup line exited the shell"
    outcome(root, cause=Cause.NODE_UNFIT, code=122, reason=reason)
    done = here("diagnose")
    assert (done.code, done.out.splitlines()[2:]) == (
        3,
        [
            "signs      no cause found in 1 line",
            f"failed     exit 122: {reason}",
            "next       clusterrun resume 4711",
            "lost       40 steps (about 00:00:40): the newest checkpoint is 100",
            "more       clusterrun logs 4711 --errors",
            f"run dir    {root}",
        ],
    )


def test_a_job_that_waits_has_not_failed(here: CommandLine) -> None:
    submitted(here)
    queue(here, "4711|PENDING||0:00|1:00:00|N/A|N/A|||Priority")
    done = here("diagnose")
    assert (done.code, done.out.splitlines()[-1]) == (
        0,
        "           the job has not started; to see why: clusterrun status 4711",
    )


def test_a_job_that_runs_and_shows_nothing_may_hang(here: CommandLine) -> None:
    root = submitted(here)
    queue(here, running())
    (root / "attempts" / "1").mkdir(parents=True)
    noted(root, rank="step 1 loss 2.5")
    done = here("diagnose")
    assert (done.code, done.out.splitlines()[-2:]) == (
        0,
        [
            "signs      no cause found in 1 line",
            "next       see where the ranks are: clusterrun diagnose 4711 --stacks",
        ],
    )


LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:36"


def test_what_is_not_confirmed_reads_so(here: CommandLine) -> None:
    root = over(here, 137)
    outcome(root, cause=Cause.SIGNAL, node="node18", rank=2, signal=9, message="killed by SIGKILL")
    verdict = answered(here)["verdict"]
    assert (verdict["class"], verdict["status"]) == ("host_oom", "unconfirmed")
    assert (verdict["ranks"], verdict["nodes"]) == ("2", ["node18"])
    done = here("diagnose").out
    assert "cause      perhaps: The node or the job ran out of" in done
    assert "           a new attempt may succeed\n" in done


def test_what_slurm_or_the_agents_know_is_enough(here: CommandLine) -> None:
    """An interruption is named before Slurm reports the end."""
    root = submitted(here)
    queue(here, running())
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
    table: list[tuple[str, dict[str, Any]]] = [
        ("slurm_time_limit", {"cause": Cause.INTERRUPTED, "interruption": Reason.TIME_LIMIT}),
        ("slurm_preempted", {"cause": Cause.INTERRUPTED, "interruption": Reason.PREEMPT}),
        ("slurm_cancelled", {"cause": Cause.INTERRUPTED, "interruption": Reason.CANCEL}),
        ("slurm_cancelled", {"cause": Cause.CANCELLED}),
        ("cuda_oom", {"cause": Cause.EXCEPTION, "message": oom}),
        ("user_code_exception", {"cause": Cause.EXCEPTION, "message": "ValueError: no tokenizer"}),
        ("user_code_exception", {"cause": Cause.EXIT, "message": "train.py: error: --width"}),
        ("hang_rank_missing", {"cause": Cause.HUNG, "rank": 3, "where": "data.py:3"}),
        ("hang_no_timeout", {"cause": Cause.HUNG, "rank": None}),
    ]
    for name, ending in table:
        outcome(root, **{"code": 1, "rank": 2, "node": "node18", "message": "asked", **ending})
        answer = answered(here)
        assert (answer["verdict"]["class"], answer["consequences"]) == (name, []), ending
        assert {each["source"] for each in answer["evidence"]} == {"agents"}
    queue(here)
    for state, name in (("TIMEOUT", "slurm_time_limit"), ("NODE_FAIL", "slurm_node_fail")):
        (root / "attempts" / "1" / "outcome.json").unlink(missing_ok=True)
        ended(root, state, 1)
        assert answered(here)["verdict"]["class"] == name


def test_the_rank_that_exited_first_outranks_its_victims(here: CommandLine) -> None:
    root = over(here, 5)
    victim = f'Traceback (most recent call last):\n  File "train.py", line 5, in f\n{LOST}'
    outcome(root, cause=Cause.EXIT, code=5, rank=1, node="node17", message="exited with status 5")
    oom = "torch.OutOfMemoryError: CUDA out of memory."
    for own, cause, text in (
        ("", "user_code_exception", "exited with status 5"),
        ("a warning", "user_code_exception", "exited with status 5"),
        (oom, "cuda_oom", oom),
    ):
        noted(root, rank=victim, others={1: own})
        answer = answered(here)
        assert (answer["verdict"]["class"], answer["verdict"]["ranks"]) == (cause, "1")
        assert answer["verdict"]["message"] == text
        assert [each["class"] for each in answer["consequences"]] == ["peer_died"]


def test_setup_lines_are_no_cause_once_ranks_have_run(here: CommandLine) -> None:
    root = over(here)
    (root / "slurm" / "batch.out").write_text("bash: line 3: docker: command not found\n")
    raised, unfit = (
        (Cause.EXCEPTION, "user_code_exception"),
        (Cause.NODE_UNFIT, "command_not_found"),
    )
    for ending, cause in (raised, unfit):
        outcome(root, cause=ending, code=1, rank=2, message="ValueError: bad sample")
        assert answered(here)["verdict"]["class"] == cause


def test_the_log_says_more_than_the_agents(here: CommandLine) -> None:
    root = over(here)
    losses = "\n".join(f"step {n} loss {'nan' if n > 3 else 2 / n}" for n in range(1, 7))
    text = "OSError: [Errno 98] Address already in use"
    frame = '  File "port.py", line 16, in main\n    s.bind(("127.0.0.1", 29555))'
    raised = f"Traceback (most recent call last):\n{frame}\n{text}"
    for printed, ending, message, name, frames in (
        (losses, Cause.EXIT, "exited with status 1", "loss_nan", 0),
        (raised, Cause.EXCEPTION, text, "user_code_exception", 1),
    ):
        noted(root, rank=printed)
        outcome(root, cause=ending, code=1, rank=0, node="node17", message=message)
        verdict = answered(here)["verdict"]
        assert (verdict["class"], len(verdict["frames"])) == (name, frames)


def test_an_error_of_the_launcher_is_not_one_of_the_script(here: CommandLine) -> None:
    root = over(here)
    noted(root, rank=RAISED)
    paths = RunPaths(root=root)
    for file in (paths.log(1, "node17"), paths.log_errors(1, "node17")):
        file.write_text(file.read_text().replace(" 0 e ", " - l "))
    outcome(root, cause=Cause.LAUNCHER, code=1, node="node17", message="the launcher exited")
    assert answered(here)["verdict"]["class"] == "launcher_failed"


def test_without_slurm_the_logs_still_answer(here: CommandLine) -> None:
    root = submitted(here)
    here.program("squeue", "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1")
    done = here("diagnose")
    assert done.code == 5
    assert "the job's state in Slurm is unknown" in done.err
    outcome(root, cause=Cause.SIGNAL, node="node18", rank=2, signal=11, message="SIGSEGV")
    assert here("diagnose").code == 3


def _packed(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        members = archive.getmembers()
        assert all(member.mode == 0o600 for member in members)
        found = {member.name.partition("/")[2]: archive.extractfile(member) for member in members}
        return {name: file.read().decode() for name, file in found.items() if file}


def test_a_bundle_has_the_evidence_and_no_secret(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_ACCESS", "correct-horse-battery")
    words = ("--pass-env", "MY_ACCESS", "train.py", "--api-key", "gold1234", "--lr", "0.0001")
    root = submitted(here, "4711", "-N2", *words)
    queue(here)
    ended(root, "FAILED", 137)
    outcome(root, cause=Cause.SIGNAL, node="node18", rank=2, signal=9, message="killed")
    errors = RunPaths(root=root).log_errors(1, "node18")
    errors.parent.mkdir(parents=True)
    token = "hf_" + "a1B2" * 8
    errors.write_text(f"login correct-horse-battery {token} http://me:pass1@proxy HF_TOKEN=zzzz9\n")
    assert "read it before you send it" in here("diagnose", "--bundle", "help.tgz").err
    assert (here.path / "help.tgz").stat().st_mode & 0o777 == 0o600
    packed = _packed(here.path / "help.tgz")
    assert json.loads(packed["diagnosis.json"])["verdict"]["class"] == "host_oom"
    assert packed["logs/a1/node18.err"].startswith("login [MY_ACCESS] [redacted] http://[redacted]")
    assert {
        "resolved.yaml",
        "plan.json",
        "job.json",
        "attempts/1/outcome.json",
        "attempts/1/attempt.json",
    } <= packed.keys()
    everything = "".join(packed.values())
    assert "0.0001" in everything
    for secret in ("correct-horse-battery", token, "pass1", "zzzz9", "gold1234"):
        assert secret not in everything


@pytest.mark.parametrize("shell", [{}, {"MY_ACCESS": "other-horse-battery"}])
def test_a_bundle_of_another_shell_has_no_text_of_the_script(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch, shell: dict[str, str]
) -> None:
    monkeypatch.setenv("MY_ACCESS", "correct-horse-battery")
    key = state_dir() / "key"  # as a full disk left it
    key.parent.mkdir(parents=True)
    key.touch()
    root = submitted(here, "4711", "-N2", "--pass-env", "MY_ACCESS", "train.py")
    assert len(key.read_bytes()) == 32
    queue(here)
    ended(root, "FAILED", 1)
    said = "ValueError: correct-horse-battery"
    outcome(root, cause=Cause.EXCEPTION, rank=0, code=1, message=said)
    (root / "slurm" / "batch.out").write_text(said)
    assert "left out" not in here("diagnose", "--bundle", "same.tgz").err
    assert "attempts/1/outcome.json" in _packed(here.path / "same.tgz")
    monkeypatch.delenv("MY_ACCESS")
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    assert "this shell may lack the job's MY_ACCESS" in here("diagnose", "--bundle", "no.tgz").err
    packed = _packed(here.path / "no.tgz")
    assert json.loads(packed["diagnosis.json"])["verdict"]["class"]
    assert "horse" not in "".join(packed.values()) + (root / "passed.jsonl").read_text()


def test_a_bundle_has_no_part_of_a_secret(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SHORT", "correct"), ("LONG", 'correct"horse\\böttery')):
        monkeypatch.setenv(name, value)
    root = submitted(here, "4711", "-N2", "--pass-env", "SHORT", "--pass-env", "LONG", "train.py")
    queue(here)
    ended(root, "FAILED", 1)
    errors = RunPaths(root=root).log_errors(1, "node18")
    errors.parent.mkdir(parents=True)
    errors.write_text(f"hf_{8 * 'a1B2'}\n" + MOST_BYTES // 2 * "\n" + (MOST_BYTES // 2 - 9) * "x")
    text = 'ValueError: user correct, password correct"horse\\böttery'
    outcome(root, cause=Cause.EXCEPTION, rank=0, code=1, message=text)
    assert here("diagnose", "--bundle", "help.tgz").code == 3
    packed = _packed(here.path / "help.tgz")
    assert "user [SHORT], password [LONG]" in packed["attempts/1/outcome.json"]
    assert not any(part in text for text in packed.values() for part in ("horse", "ttery", "B2a1"))


def test_a_bundle_replaces_no_file(here: CommandLine) -> None:
    submitted(here)
    queue(here)
    (here.path / "help.tgz").write_text("mine")
    done = here("diagnose", "--bundle", "help.tgz")
    assert (done.code, (here.path / "help.tgz").read_text()) == (1, "mine")
    assert "cannot write help.tgz" in done.err


OOM_KILL = "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0.\n"


def test_what_earlier_attempts_printed_is_no_cause_now(here: CommandLine) -> None:
    root = over(here)
    paths, batch = RunPaths(root=root), root / "slurm" / "batch.out"
    for attempt, text in ((1, OOM_KILL), (2, "srun: error: node18: task 1: Exited\n")):
        batch.touch()
        assert take_attempt(paths, attempt, "me")
        with batch.open("a") as file:
            file.write(text)
        outcome(root, attempt, cause=Cause.HUNG, code=126, message="no step ended for 61 s")
    found = [json.loads(here("diagnose", "--json", "--attempt", n).out) for n in "12"]
    assert [each["verdict"]["class"] for each in found] == ["host_oom", "hang_no_timeout"]


def test_the_exit_status_of_an_agent_is_an_echo_of_its_ranks(here: CommandLine) -> None:
    root = over(here, 139)
    ends = [f"srun: error: node{n}: task {n - 17}: Exited with exit code 139\n" for n in (17, 18)]
    (root / "slurm" / "batch.out").write_text("".join(ends))
    outcome(root, cause=Cause.SIGNAL, code=139, signal=11, rank=9, node="node18", message="SIGSEGV")
    verdict = answered(here)["verdict"]
    assert (verdict["class"], verdict["ranks"], verdict["nodes"]) == ("segfault", "9", ["node18"])


@pytest.fixture(name="added")
def _added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Add the file of a cause to ours."""
    shutil.copytree(table.CAUSES, tmp_path / "causes")
    about = "means: Scratch was purged., do: [{text: copy it, run: stage-data}]"
    row = f"- {{id: scratch_purged, {about}, signs: [was purged by policy]}}\n"
    (tmp_path / "causes" / "scratch_purged.yaml").write_text(row)
    monkeypatch.setattr(table, "CAUSES", tmp_path / "causes")
    for known in (table.built_in, causes):
        known.cache_clear()
    yield "scratch_purged"
    for known in (table.built_in, causes):
        known.cache_clear()


def test_one_file_adds_a_cause_its_page_and_its_documentation(
    here: CommandLine, added: str
) -> None:
    (here.path / "job.log").write_text("/scratch was purged by policy\n")
    said = here("diagnose", "job.log").out
    assert f"cause      Scratch was purged ({added})" in said
    assert "next       copy it:\n             stage-data\n" in said
    assert "was purged by policy" in here("explain", added).out
    generate = runpy.run_path(str(REFERENCE / "generate.py"))
    assert f"## {added}\n\nScratch was purged." in "\n".join(generate["_causes"]())


def noted(
    root: Path, *notes: Note, rank: str = "", others: Mapping[int, str] | None = None
) -> None:
    """Write what the agent of the first node noted, and what rank 0 and others printed."""
    log = RunPaths(root=root).log(1, "node17")
    log.parent.mkdir(parents=True, exist_ok=True)
    printed = [f"0 e {text}" for text in rank.splitlines()]
    printed += [f"{n} e {text}" for n, text in (others or {}).items() if text]
    lines = (f"{1140_000000 + n:016d} {text}\n" for n, text in enumerate(printed))
    log.write_text("".join(lines))
    log.with_suffix(".err").write_bytes(b"".join(side_lines(log.read_bytes())))
    RunPaths(root=root).events("node17").unlink(missing_ok=True)
    events(root, *({"type": "note", "note": dataclasses.asdict(note)} for note in notes))


def of(source: str, text: str = "", **more: Any) -> Note:
    return Note(source=NoteSource(source), text=text, **more)


XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
OOM_OF_RANK = "Memory cgroup out of memory: Killed process 42 (python) total-vm:9kB, UID:1"
FULL = of("nvml", "GPU 1 (0000:5e:00): 70000 of 81559 MiB were in use", held_gpu=1)
NO_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU {} has 79 GiB"
RAISED = 'Traceback (most recent call last):\n  File "train.py", line 5, in f\nValueError: torn'
CANNOT_READ = "FileNotFoundError: [Errno 2] No such file or directory: 'a'"


def test_what_a_node_noted_is_weighed(here: CommandLine) -> None:
    root = over(here)
    for note, rank, signal, cause, source in (
        (of("kernel", XID), "RuntimeError: CUDA error: unknown", 0, "gpu_xid", "kernel"),
        (of("kernel", OOM_OF_RANK, rank=1), "", 9, "host_oom", "kernel"),
        (of("kernel", OOM_OF_RANK), RAISED, 0, "user_code_exception", "log"),
        (of("cgroup", memory=Memory(1)), RAISED, 0, "user_code_exception", "log"),
        (of("kernel", "EDAC MC3: 1 UE memory read error"), "", 7, "host_memory_fault", "kernel"),
        (FULL, NO_MEMORY.format(1), 0, "gpu_memory_held_or_faulty", "nvml"),
        (FULL, NO_MEMORY.format(0), 0, "cuda_oom", "log"),
        (FULL, CANNOT_READ, 0, "file_not_found", "log"),
    ):
        noted(root, note, rank=rank)
        ending = Cause.SIGNAL if signal else Cause.EXIT
        outcome(root, cause=ending, node="node17", rank=1, signal=signal, message="failed", code=1)
        answer = answered(here)
        assert (answer["verdict"]["class"], answer["evidence"][0]["source"]) == (cause, source)


def test_nodes_that_failed_preflight_are_the_cause(here: CommandLine) -> None:
    root = over(here, 122)
    reason = "preflight failed: node.tmp on node18"
    about: dict[str, Any] = {"code": 122, "reason": reason, "unfit": ("node18",)}
    outcome(root, cause=Cause.PREFLIGHT, **about)
    shared = answered(here)["verdict"]
    assert (shared["class"], shared["nodes"]) == ("preflight_failed", [])
    outcome(root, cause=Cause.PREFLIGHT, **about, exclude=("node18",))
    verdict = answered(here)["verdict"]
    assert (verdict["class"], verdict["exclude_nodes"]) == ("preflight_failed", ["node18"])
    assert (verdict["status"], verdict["message"]) == ("established", reason)


def test_the_answer_has_the_memory_that_the_job_may_use(here: CommandLine) -> None:
    root = over(here, 137)
    noted(root, of("cgroup", memory=Memory(1, 64 << 30)))
    outcome(root, cause=Cause.SIGNAL, node="node17", rank=1, signal=9, message="killed by SIGKILL")
    done = here("diagnose").out
    assert "killed 1 process, the job may use 64 GiB on this node" in done
    resume = "             clusterrun resume 4711 --from scratch --mem 128G\n"
    assert f"next       double the memory, now 64 GiB per node:\n{resume}" in done
    noted(root, of("cgroup", memory=Memory(0, 64 << 30)))
    assert answered(here)["verdict"]["class"] == "sigkill_external"
