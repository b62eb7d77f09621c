"""`status` of a run that came back: its attempts, what they lost, and when the next one starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterrun.backends.evidence import bad_nodes, read_attempts
from clusterrun.rundir.outcome import Next
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.world import write_world
from tests.cli.conftest import CommandLine
from tests.cli.outcomes import outcome
from tests.cli.runs import ended, queue, running, submitted

HELD = "4711|PENDING||0:00|1:00:00|1795257574|N/A|BeginTime"


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")


def came_back(here: CommandLine) -> Path:
    """Submit a job that failed once, started again in its allocation, and runs."""
    root = submitted(here)
    outcome(root, 1, next=Next.RELAUNCH, why="a rank died and progress was made")
    (root / "attempts/2").mkdir()
    write_world(RunPaths(root=root), 2, ["node19", "node17"], 1)
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
    write_world(RunPaths(root=root), 1, ["node17", "node18"], 1)
    first, _ = lines(here("status", "4711").out, "attempts")
    assert first == "1  node[17-18]  end not reported"


def test_an_attempt_that_was_cancelled_before_it_could_report_says_so(here: CommandLine) -> None:
    ended(came_back(here), "CANCELLED", 124)
    queue(here)
    _, second = lines(here("status", "4711").out, "attempts")
    assert second == "2  node[17,19]  cancelled"
    told = json.loads(here("status", "4711", "--json").out)
    assert (told["attempts"][1]["cause"], told["attempts"][1]["code"]) == ("cancelled", 124)
    assert told["verdict"] is None


def test_an_attempt_that_saved_nothing_lost_all_that_it_did(tmp_path: Path) -> None:
    outcome(tmp_path, 1, step=10, checkpoint=None)
    outcome(tmp_path, 2, step=30, checkpoint=20)
    outcome(tmp_path, 3, step=25, checkpoint=20)
    attempts = read_attempts(RunPaths(root=tmp_path))
    assert [attempt.lost_steps for attempt in attempts] == [10, 10, 5]
    assert [attempt.lost_s for attempt in attempts] == [140.0, pytest.approx(140 / 3), 140.0]


def test_without_a_report_of_a_save_nothing_is_said_to_be_lost_before_the_next_attempt(
    tmp_path: Path,
) -> None:
    outcome(tmp_path, 1, step=10, checkpoint=None)
    (attempt,) = read_attempts(RunPaths(root=tmp_path))
    assert (attempt.lost_steps, attempt.lost_s) == (None, None)


def test_what_was_lost_is_counted_from_where_the_next_attempt_went_on(tmp_path: Path) -> None:
    """The newest checkpoint may have been damaged since, or set aside."""
    paths = RunPaths(root=tmp_path)
    outcome(tmp_path, 1, step=30, checkpoint=20)
    outcome(tmp_path, 2, step=25, checkpoint=20)
    paths.resumed(2).write_text("10\n")
    attempts = read_attempts(paths)
    assert [attempt.lost_steps for attempt in attempts] == [20, 5]
    assert attempts[1].lost_s == pytest.approx(140 / 3)


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
    assert now.endswith("start it now, run: scontrol update JobId=4711 StartTime=now+2")
    assert later.startswith("note: a site can shorten the two minutes: SchedulerParameters=")
    assert here.asked("scontrol") == []
