"""What `diagnose` proposes with a run's own numbers, and that each proposed command works."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from clusterrun.rundir.end import Cause
from clusterrun.rundir.outcome import VerdictRule
from tests.cli.conftest import CommandLine
from tests.cli.outcomes import checkpoint, outcome
from tests.cli.runs import ended, events, queue, running, submitted

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
TRAIN = ("-N2", "--nproc-per-node", "2", "--device", "cpu")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "diagnose.md"


def proposed(
    here: CommandLine,
    root: Path,
    printed: str = "",
    *,
    state: str = "FAILED",
    is_saved: bool = True,
) -> list[str]:
    """Return what to do, after trying its commands."""
    queue(here)
    ended(root, state, 1)
    if is_saved:
        checkpoint(root, 100, world=4)
    (root / "slurm" / "batch.out").write_text(printed + "\n")
    texts: list[str] = verdict(here)["do"]
    for text in texts:
        if command := re.search(r"clusterrun (resume 4711 .+)", text):
            words = shlex.split(command[1])
            done = here(*words[:2], "--dry-run", *words[2:])
            assert done.code == 0, (text, done.err)
    return texts


LOWER = (
    "lower the micro-batch from {} to {} and raise the accumulation from {} to {}: the effective"
)
HALVE = "halve the micro-batch and double the accumulation: the effective batch stays the same"
KILLED = "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0."
WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL"
PLANNED = "--set training.planned=true --set training.micro_batch=8 train.py"
LARGER = "raise the timeout if a rank needs more time to save or evaluate"


@pytest.mark.parametrize(
    ("argv", "printed", "text", "command"),
    [
        (
            "train.py --batch-size 8 --gradient-accumulation=2 --lr 1",
            OOM,
            LOWER.format(8, 4, 2, 4) + " batch stays 64",
            "-- --batch-size 4 --gradient-accumulation=4 --lr 1",
        ),
        (
            PLANNED,
            OOM,
            LOWER.format(8, 4, 1, 2) + " batch stays 32",
            "--set training.micro_batch=4 --set training.accumulation=2",
        ),
        ("train.py --batch-size 8", OOM, HALVE, None),  # the accumulation is not known
        (  # a secret is not printed
            "train.py --api-key gold1234 --batch-size 8 --accumulation 1",
            OOM,
            LOWER.format(8, 4, 1, 2) + " batch stays 32",
            None,
        ),
        (
            "--mem 64G train.py",
            KILLED,
            "double the memory, now --mem 64G",
            "--mem 128G",
        ),
        (  # an argument is like a word of the advice
            "train.py --name JOB --batch-size 8 --accumulation 1",
            OOM,
            LOWER.format(8, 4, 1, 2) + " batch stays 32",
            "-- --name JOB --batch-size 4 --accumulation 2",
        ),
        (
            "--set launch.main_process_port=29500 train.py",
            "OSError: [Errno 98] Address already in use",
            "choose a different port (by default clusterrun derives the port from the job id)",
            "--set launch.main_process_port=29501",
        ),
        ("--timeout 10m train.py", f"{WATCHDOG}(SeqNum=7)", LARGER, "--timeout 20m"),
    ],
)
def test_a_remedy_has_the_numbers_of_the_run(
    here: CommandLine, argv: str, printed: str, text: str, command: str | None
) -> None:
    expected = f"{text}: clusterrun resume 4711 {command}" if command else text
    assert expected in proposed(here, submitted(here, "4711", *TRAIN, *argv.split()), printed)


def test_the_time_limit_fits_the_steps_that_are_left(here: CommandLine) -> None:
    root = submitted(here, "4711", *TRAIN, "--time", "1:00:00", "train.py")
    steps = ({"ts": 100.0 + n, "type": "step", "step": n, "total": 10_000} for n in (1, 3001))
    events(root, *steps)
    checkpoint(root, 2800, world=4)
    assert proposed(here, root, state="TIMEOUT", is_saved=False)[1:] == [
        "7,200 steps are left, 02:00:00 at 1 steps/s, plus a tenth for starts and saves: "
        "clusterrun resume 4711 --time 02:12:00",
        "or keep the limit and let 3 jobs run one after another: "
        "clusterrun resume 4711 --on-interrupt successor",
    ]


def test_nodes_that_are_excluded_stay_so(here: CommandLine) -> None:
    root = submitted(here, "4711", *TRAIN, "--exclude", "node03", "train.py")
    outcome(root, cause=Cause.NODE_LOST, node="node18", message="lost")
    texts = proposed(here, root)
    assert any(text.endswith("clusterrun resume 4711 --exclude 'node[03,18]'") for text in texts)


def test_the_page_shows_a_remedy_of_a_run(here: CommandLine) -> None:
    script = ("train.py", "--batch-size", "8", "--accumulation", "2")
    root = submitted(here, "4711", *TRAIN, *script)
    advice = proposed(here, root, OOM)[0].replace(": clusterrun", ":\n             clusterrun")
    assert f"```\nnext       {advice}\n```" in PAGE.read_text()


UNUSED = "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--lr']"
RAISED = 'Traceback (most recent call last):\n  File "train.py", line 5, in f\n'


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (
            RAISED + "ValueError: bad sample",
            "or its arguments, then start the run again: clusterrun resume 4711{}",
        ),
        (RAISED + UNUSED, "script accepts: clusterrun resume 4711{} -- ARGS"),
        ("op.preamble.length <= op.nbytes. 12 vs 4", "resume 4711{} --env TORCH_DISTRIBUTED_DEBUG"),
        (
            "_pickle.UnpicklingError: pickle data was truncated",
            "clusterrun resume 4711 --from scratch",
        ),
        ("OSError: [Errno 116] Stale file handle", "start the run again: clusterrun resume 4711{}"),
    ],
)
def test_a_command_is_one_that_the_run_accepts(
    here: CommandLine, printed: str, expected: str, *, is_saved: bool
) -> None:
    root = submitted(here, "4711", *TRAIN, "train.py", "--learning-rate", "0.1")
    texts = proposed(here, root, printed, is_saved=is_saved)
    assert expected.format("" if is_saved else " --from scratch") in "\n".join(texts)
    assert not any("resume 4711 --from scratch --from" in text for text in texts)


def test_a_module_of_the_project_is_to_be_found_not_installed(here: CommandLine) -> None:
    (here.path / "src" / "odd").mkdir(parents=True)
    root = submitted(here, "4711", *TRAIN, "train.py")
    texts = proposed(here, root, RAISED + "ModuleNotFoundError: No module named 'odd.data'")
    where = here.path / "src"
    assert texts[0].startswith(f"'odd' is in {where}; let the job's Python look there: clusterrun ")
    assert texts[0].endswith(f" resume 4711 --env PYTHONPATH={where}")
    assert "pip install" not in "".join(texts)


def test_a_damaged_checkpoint_is_passed_over(here: CommandLine) -> None:
    root = submitted(here, "4711", *TRAIN, "train.py")
    checkpoint(root, 80, world=4)
    (texts, *_) = proposed(here, root, "_pickle.UnpicklingError: pickle data was truncated")
    assert texts == "resume from an earlier checkpoint: clusterrun resume 4711 --from step-80"


def verdict(here: CommandLine) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(here("diagnose", "4711", "--json").out)["verdict"]
    return found


@pytest.mark.parametrize("is_saved", [True, False])
def test_the_same_limit_ends_a_run_without_a_checkpoint_again(
    here: CommandLine, *, is_saved: bool
) -> None:
    root = submitted(here, "4711", *TRAIN, "--time", "1:00:00", "train.py")
    texts = proposed(here, root, state="TIMEOUT", is_saved=is_saved)
    assert any("continue the run: clusterrun resume 4711" in text for text in texts) == is_saved
    assert any("--time 02:00:00" in text for text in texts)
    assert verdict(here)["retry"] == ("yes" if is_saved else "no")


def test_what_no_try_can_change_fails_again(here: CommandLine) -> None:
    root = submitted(here, "4711", *TRAIN, "train.py")
    table: list[tuple[dict[str, Any], str]] = [
        ({"cause": Cause.EXIT, "code": 2}, "no"),
        ({"cause": Cause.EXCEPTION, "alike": 4}, "no"),
        ({"cause": Cause.EXCEPTION, "rule": VerdictRule.SAME_CAUSE}, "no"),
        ({"cause": Cause.EXCEPTION, "alike": 1}, "maybe"),
    ]
    proposed(here, root, RAISED + "ValueError: boom")
    for ending, answer in table:
        outcome(root, **{"rank": 0, "message": "boom", "code": 1, **ending})
        assert verdict(here)["retry"] == answer


def test_a_broken_world_contract_says_once_what_to_do(here: CommandLine) -> None:
    root = submitted(here, "4711", *TRAIN, "train.py")
    hints = ["call init_process_group()", "use --set launch.world_contract=false"]
    lines = ["world contract broken: this rank trains alone", "cause: no process group"]
    message = "\n".join([*lines, *(f"hint: {hint}" for hint in hints)])
    outcome(root, code=120, cause=Cause.WORLD, rank=0, node="node17", message=message)
    assert proposed(here, root) == hints
    said = here("diagnose", "4711").out
    assert "cause: no process group" in said
    assert [said.count(hint) for hint in hints] == [1, 1]


@pytest.mark.parametrize("is_over", [True, False])
def test_advice_for_a_job_that_runs_is_left_out_after_its_end(
    here: CommandLine, *, is_over: bool
) -> None:
    root = submitted(here, "4711", *TRAIN, "train.py")
    queue(here, *(() if is_over else (running(),)))
    if is_over:
        ended(root, "FAILED", 1)
    (root / "attempts" / "1").mkdir(parents=True, exist_ok=True)
    (root / "slurm" / "batch.out").write_text("They never joined any collectives\n")
    texts = verdict(here)["do"]
    assert texts[0].endswith(": clusterrun logs 4711 --all-ranks")
    assert any("--stacks" in text for text in texts) != is_over


def test_no_command_of_slurm_is_proposed_where_there_is_none(here: CommandLine) -> None:
    root = submitted(here, "4711", *TRAIN, "train.py")
    assert any("sacct" in text for text in proposed(here, root, state="CANCELLED"))
    plan = json.loads((root / "plan.json").read_text())
    (root / "plan.json").write_text(json.dumps({**plan, "cluster": "local"}))
    assert verdict(here)["do"] == ["continue the run: clusterrun resume 4711"]
