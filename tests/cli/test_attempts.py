"""`status` of a run that came back: its attempts, what they lost, and when the next one starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterrun.backends.evidence import bad_nodes, read_attempts
from clusterrun.rundir.attempt import amend_attempt
from clusterrun.rundir.events import Phase
from clusterrun.rundir.outcome import Next
from clusterrun.rundir.paths import RunPaths
from tests.cli.conftest import CommandLine
from tests.cli.outcomes import outcome
from tests.cli.runs import ended, queue, running, started, submitted

HELD = "4711|PENDING||0:00|1:00:00|1795257574|N/A|||BeginTime"


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")


def came_back(here: CommandLine) -> Path:
    """Submit a job that failed once, started again in its allocation, and runs."""
    root = submitted(here)
    outcome(root, 1, next=Next.RELAUNCH, why="a rank died and progress was made")
    (root / "attempts/2").mkdir()
    amend_attempt(RunPaths(root=root), 2, nodes=("node19", "node17"), procs_per_node=1)
    queue(here, running())
    return root


def lines(text: str, label: str) -> list[str]:
    """Return what stands at a label, and the lines below it without one."""
    found: list[str] = []
    for line in text.splitlines():
        if line.startswith(label) or (found and line.startswith(" ")):
            found.append(line[11:])
        elif found:
            break
    return found


def test_each_attempt_has_a_line_with_what_it_lost(here: CommandLine) -> None:
    came_back(here)
    said = here("status", "4711")
    assert said.code == 0
    first, second = lines(said.out, "attempts")
    head, facts = first.split("  ", 4)[:4], first.split("  ", 4)[4]
    assert [head[0], *head[2:]] == ["1", "00:02:20", "node[17-18]"]
    assert facts == (
        "rank 1 on node18: killed by SIGKILL at step 140; checkpoint 100; "
        "lost 40 steps (about 00:00:40); relaunch: a rank died and progress was made"
    )
    assert second == "2  node[17,19]"
    assert lines(said.out, "checkpoint") == ["step 100, the newest when attempt 1 ended"]
    assert "\nsaved  step 100, the newest when attempt 1 ended\n" in here("top", "4711").out


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED", "TIMEOUT", "COMPLETED"])
def test_a_run_that_ended_early_and_has_saved_says_how_to_continue(
    here: CommandLine, state: str
) -> None:
    root = submitted(here)
    outcome(root)
    ended(root, state, 0 if state == "COMPLETED" else 1)
    says = lines(here("status", "4711").out, "next")
    assert says == ([] if state == "COMPLETED" else ["clusterrun resume 4711"])


def test_an_attempt_that_left_no_word_has_no_times(here: CommandLine) -> None:
    root = came_back(here)
    outcome(root, 1, started_at=0.0, ended_at=0.0, step=None, reason="it left no report")
    first, _ = lines(here("status", "4711").out, "attempts")
    assert first.startswith("1  node[17-18]  it left no report; ")
    told = json.loads(here("status", "4711", "--json").out)["attempts"][0]
    assert {told[key] for key in ("start", "end", "elapsed_s")} == {None}
    (root / "attempts/1/outcome.json").unlink()
    amend_attempt(RunPaths(root=root), 1, nodes=("node17", "node18"), procs_per_node=1)
    first, _ = lines(here("status", "4711").out, "attempts")
    assert first == "1  node[17-18]  end not reported"


def test_an_attempt_that_was_cancelled_before_it_reported_did_not_fail(here: CommandLine) -> None:
    ended(came_back(here), "CANCELLED", 124)
    queue(here)
    _, second = lines(here("status", "4711").out, "attempts")
    assert second == "2  node[17,19]  end not reported"
    told = json.loads(here("status", "4711", "--json").out)
    assert told["attempts"][1]["cause"] is None
    assert told["verdict"] is None


def test_what_an_attempt_lost_is_known_from_where_the_next_one_begins(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path)
    outcome(tmp_path, 1, step=10, checkpoint=None)
    (attempt,) = read_attempts(paths)
    assert (attempt.lost_steps, attempt.lost_s) == (None, None)  # no save is reported yet
    outcome(tmp_path, 2, step=30, checkpoint=20)
    outcome(tmp_path, 3, step=25, checkpoint=20)
    for resumed_at, steps, last_s in ((20, [10, 10, 5], 140), (10, [10, 20, 5], 140 / 3)):
        amend_attempt(paths, 3, resumed=resumed_at)  # the newest, or an older one if damaged
        attempts = read_attempts(paths)
        assert [attempt.lost_steps for attempt in attempts] == steps
        assert attempts[0].lost_s == 140
        assert attempts[2].lost_s == pytest.approx(last_s)


BAD = (  # the outcomes of attempts: cause, node, excluded nodes; then the nodes that are bad
    ([("halted", "node1", ())], ()),
    ([("halted", "node1", ()), ("halted", "node2", ())], ()),
    ([("halted", "node1", ()), ("halted", "node2", ()), ("halted", "node1", ())], ("node1",)),
    ([("hung", "node1", ()), ("hung", "node1", ())], ()),
    ([("hung", "node1", ()), ("halted", "node1", ())], ()),
    ([("halted", None, ()), ("halted", None, ())], ()),
    *(([(cause, "node1", ())] * 2, ()) for cause in ("signal", "node_lost", "exception")),
    (
        [("node_lost", "node1", ("node2",)), ("launcher", "node1", ("node2", "node3"))],
        ("node2", "node3"),
    ),
)


def test_a_node_is_bad_without_a_sign_of_life_or_where_ranks_halted_twice(tmp_path: Path) -> None:
    for case, (outcomes, bad) in enumerate(BAD):
        root = tmp_path / str(case)
        for attempt, (cause, node, exclude) in enumerate(outcomes, 1):
            outcome(root, attempt, cause=cause, node=node, exclude=exclude)
        assert bad_nodes(RunPaths(root=root)) == bad, outcomes


def test_a_requeued_job_that_is_held_is_named_with_the_command_that_starts_it(
    here: CommandLine,
) -> None:
    came_back(here)
    queue(here, HELD)
    said = here("status", "4711")
    assert "waits      requeued; Slurm holds it for two minutes; starts about" in said.out
    now, later = said.err.splitlines()
    assert now.endswith("start the job now, run: scontrol update JobId=4711 StartTime=now+2")
    assert later.startswith("note: a site can shorten the two minutes: SchedulerParameters=")
    assert here.asked("scontrol") == []


# Where the start of the newest attempt spent its time


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
        (Next.REQUEUE, None, AGAIN | {Phase.QUEUE: 1231.5}, "queue 1.5 s, prolog 0.8 s, setup"),
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
    queue(here, "4711|RUNNING|node[17-18]|5:10:40|1-00:00:00|1031|N/A|||None")
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
