"""`status` says where the start of the newest attempt spent its time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterrun.rundir.outcome import Next
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.startup import Phase
from tests.cli.conftest import CommandLine
from tests.cli.outcomes import outcome
from tests.cli.runs import ended, events, queue, running, started, submitted
from tests.cli.test_attempts import lines

SUBMITTED = 1000.0
FIRST = {
    Phase.QUEUE: 1031.0,
    Phase.PROLOG: 1032.25,
    Phase.SETUP: 1032.9,
    Phase.PREFLIGHT: 1033.3,
    Phase.AGENTS: 1033.34,
    Phase.LAUNCHER: 1037.2,
    Phase.IMPORTS: 1040.3,
    Phase.RENDEZVOUS: 1040.9,
    Phase.FIRST_STEP: 1042.1,
}
AGAIN = {phase: end + 200 for phase, end in FIRST.items() if phase is not Phase.QUEUE}


def start(root: Path, ends: dict[Phase, float], attempt: int = 1, **record: Any) -> None:
    """Write what the head recorded, and when the run was submitted."""
    paths = RunPaths(root=root)
    data = json.loads(paths.record.read_text()) | {"submitted_at": SUBMITTED, **record}
    paths.record.write_text(json.dumps(data))
    if attempt == 1:
        paths.events("node17").unlink(missing_ok=True)
    started(root, ends, attempt)


def test_the_phases_add_up_to_the_time_since_the_submission(here: CommandLine) -> None:
    start(submitted(here), FIRST)
    queue(here, running())
    assert lines(here("status", "4711").out, "start") == [
        "42 s to the first step: queue 31 s, prolog 1.2 s, setup 0.7 s, preflight 0.4 s, "
        "launcher 3.9 s, imports 3.1 s, rendezvous 0.6 s, first step 1.2 s"
    ]
    told = json.loads(here("status", "4711", "--json").out)["attempts"][0]["startup"]
    assert (told["is_restart"], told["total_s"]) == (False, 42.1)
    assert {each["phase"]: each["seconds"] for each in told["phases"]} == {
        **{"queue": 31.0, "prolog": 1.25, "setup": 0.65, "preflight": 0.4, "agents": 0.04},
        **{"launcher": 3.86, "imports": 3.1, "rendezvous": 0.6, "first_step": 1.2},
    }
    assert json.loads(here("list", "--json").out)["jobs"][0]["attempts"][0]["startup"] is None


@pytest.mark.parametrize(
    ("how", "failed_at", "ends", "phases"),
    [
        (
            Next.RELAUNCH,
            1229.5,
            AGAIN | {Phase.QUEUE: 1031.0, Phase.STAGE: 1032.5},
            "stop 0.5 s, decision 2.2 s, setup",
        ),
        (
            Next.REQUEUE,
            None,
            AGAIN | {Phase.QUEUE: 1231.5},
            "queue 1.5 s, prolog 0.8 s, setup",
        ),
        (Next.SUCCESSOR, None, AGAIN, "queue 2.2 s, setup"),
    ],
)
def test_a_restart_counts_from_the_failure_or_end_of_the_attempt_before(
    here: CommandLine, how: Next, failed_at: float | None, ends: dict[Phase, float], phases: str
) -> None:
    root = submitted(here)
    start(root, FIRST)
    outcome(root, 1, next=how, failed_at=failed_at, ended_at=1230.0)
    start(root, ends, 2)
    queue(here, running())
    (said,) = lines(here("status", "4711").out, "restart")
    total_s, event = (12.6, "failure") if failed_at else (12.1, "end")
    assert said.startswith(
        f"{total_s:.0f} s from the {event} of attempt 1 to the first step: {phases} 0.7 s, "
    )
    told = json.loads(here("status", "4711", "--json").out)["attempts"]
    assert [each["startup"]["is_restart"] for each in told] == [False, True]
    assert [each["startup"]["total_s"] for each in told] == [42.1, total_s]
    named = [each["phase"] for each in told[1]["startup"]["phases"]]
    assert ("queue" in named, "decision" in named) == (not failed_at, bool(failed_at))
    assert "stage" not in named


@pytest.mark.parametrize(("resumed_at", "phase"), [(1220.0, "queue"), (9999.0, "setup")])
def test_a_resumed_run_counts_from_its_resume(
    here: CommandLine, resumed_at: float, phase: str
) -> None:
    root = submitted(here)
    outcome(root, 1, ended_at=1100.0)
    start(root, AGAIN, 2, resumed_at=resumed_at)
    ended(root, "COMPLETED", 0)
    (said,) = lines(here("status", "4711").out, "start")
    assert said.split(": ")[1].startswith(phase)


def test_slurm_says_when_the_job_started_if_the_nodes_did_not(here: CommandLine) -> None:
    root = submitted(here)
    without = {phase: end for phase, end in FIRST.items() if phase is not Phase.QUEUE}
    start(root, without)
    queue(here, "4711|RUNNING|node[17-18]|5:10:40|1-00:00:00|1031|N/A|None")
    assert "queue 31 s, prolog 1.2 s" in here("status", "4711").out
    start(root, without, submitted_at=1031.4)  # Slurm counts whole seconds
    assert "first step: prolog 0.8 s" in here("status", "4711").out
    start(root, without)
    queue(here)
    ended(root, "COMPLETED", 0)
    assert "queue 32 s, setup" in here("status", "4711").out


def test_staging_is_a_part_of_a_start(here: CommandLine) -> None:
    root = submitted(here)
    queue(here, running())
    start(root, {**FIRST, Phase.STAGE: 1032.5, Phase.FIRST_STEP: 1099.0, Phase.IMPORTS: 1090.0})
    (found,) = lines(here("status", "4711").out, "start")
    assert "prolog 1.2 s, stage 0.2 s, setup 0.4 s" in found


def test_status_says_why_ranks_were_not_forked(here: CommandLine) -> None:
    root, why = submitted(here), "the ranks start as new interpreters, not as forks: \x1b no"
    start(root, {phase: end for phase, end in FIRST.items() if phase is not Phase.FIRST_STEP})
    events(root, {"type": "not_forked", "reason": why})
    queue(here, running())
    told = json.loads(here("status", "4711", "--json").out)["attempts"][0]["startup"]
    assert told["not_forked"] == why
    out = here("status", "4711").out.splitlines()
    (place,) = (n for n, line in enumerate(out) if line.startswith("start "))
    assert out[place + 1].split(maxsplit=1)[0] == "the"
    assert "not as forks" in out[place + 1]
    assert "\x1b" not in out[place + 1]
