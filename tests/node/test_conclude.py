"""What is concluded from an attempt's files: whole, damaged, or missing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterrun.config.choices import Cluster
from clusterrun.launch.plan import Plan
from clusterrun.node.base.causes import Ending, Failure, NodeError, cancelled, lost_node
from clusterrun.node.recovery.conclude import Account, conclude, past
from clusterrun.node.recovery.rules import LOSSES, Decision
from clusterrun.rundir.attempt import amend_attempt, read_attempt, take_attempt
from clusterrun.rundir.end import Cause, Reason
from clusterrun.rundir.outcome import Next, Outcome, write_outcome
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import checkpoint_files
from tests.launch.samples import here, on_slurm

ON_SLURM = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[1-3]"}
LOST = {"code": 123, "cause": Cause.NODE_LOST, "reason": "n2: its agent is gone", "node": "n2"}


class EndedAttempts:
    """A run directory as nodes leave it."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root=root)
        self.paths.attempts_dir.mkdir()
        self.paths.events_dir.mkdir()
        self.reachable: Sequence[str] = ("n1", "n2", "n3")
        self.plan(on_slurm(nodes=2, gpus_per_node=2).to_json())

    def plan(self, text: str) -> None:
        self.paths.plan.write_text(text)

    def attempt(self, number: int, outcome: Mapping[str, Any] | None = None) -> None:
        self.paths.attempt(number).mkdir()
        amend_attempt(self.paths, number, owner="42")
        about = {"attempt": number, "job_id": "42", "started_at": 1.0, "ended_at": 2.0}
        killed = {"code": 137, "cause": Cause.SIGNAL, "reason": "rank 1 on n2: killed by SIGKILL"}
        if outcome is not None:
            values = {**about, "nodes": ("n1", "n2"), **killed, **outcome}
            write_outcome(self.paths, Outcome(**values))

    def world(self, number: int) -> None:
        amend_attempt(self.paths, number, nodes=("n1", "n2"), procs_per_node=1)

    def events(self, node: str, *events: Mapping[str, Any]) -> None:
        lines = "".join(f"{json.dumps({'ts': 1.0, **event})}\n" for event in events)
        self.paths.events(node).write_text(f"{lines}half a li")

    def save(self, step: int, **about: Any) -> None:
        saved = checkpoint_files.step_directory(self.paths.checkpoints_dir, step)
        saved.mkdir(parents=True)
        found = checkpoint_files.Checkpoint(
            path=saved, step=step, world_size=4, settings={}, **about
        )
        checkpoint_files.mark(found)

    def unreachable(self, nodes: Sequence[str]) -> tuple[str, ...]:
        return tuple(node for node in nodes if node not in self.reachable)

    def conclude(self, number: int, code: int = 137, **env: str) -> tuple[Decision, Outcome]:
        decision = conclude(self.paths, number, code, {**ON_SLURM, **env}, self.unreachable)
        return decision, Outcome.from_json(self.paths.outcome(number).read_text())


@pytest.fixture
def run(tmp_path: Path) -> EndedAttempts:
    return EndedAttempts(tmp_path)


def test_the_decision_is_written_into_what_the_agents_left(run: EndedAttempts) -> None:
    run.attempt(1, {"checkpoint": 100, "step": 120})
    decision, outcome = run.conclude(1)
    assert decision.next is outcome.next is Next.RELAUNCH
    assert (outcome.why, outcome.step, outcome.checkpoint) == (decision.why, 120, 100)
    assert outcome.why == "rank 1 on n2: killed by SIGKILL"
    assert run.paths.outcome(1).stat().st_mode & 0o777 == 0o600
    assert {p.name for p in run.paths.attempt(1).iterdir()} == {"outcome.json", "attempt.json"}


@pytest.mark.parametrize("text", [None, '{"schema": "another/1"}'])
def test_where_the_agents_left_no_word_the_events_tell_how_far_it_came(
    run: EndedAttempts, text: str | None
) -> None:
    run.attempt(1)
    run.world(1)
    if text is not None:
        run.paths.outcome(1).write_text(text)
    told = (("step", 100), ("checkpoint", 100), ("step", 120))
    run.events("n1", *({"type": kind, "step": step, "attempt": 1} for kind, step in told))
    run.events("n2", {"type": "rank_start", "rank": 2, "attempt": 1})
    run.reachable = ("n1", "n2")
    decision, outcome = run.conclude(1, 137)
    assert decision.next is Next.RELAUNCH
    assert (outcome.code, outcome.cause) == (137, "launcher")
    assert outcome.reason == "the agents exited with status 137 and reported no reason"
    assert (outcome.step, outcome.checkpoint) == (120, 100)
    assert (outcome.nodes, outcome.node, outcome.job_id) == (("n1", "n2"), "n1", "42")


@pytest.mark.parametrize(("resaved", "next_step"), [(80, Next.RELAUNCH), (40, Next.STOP)])
def test_what_was_trained_and_saved_again_counts_and_what_was_begun_with_does_not(
    run: EndedAttempts, resaved: int, next_step: Next
) -> None:
    run.attempt(1, {"checkpoint": 100, "next": Next.RELAUNCH})
    for number in (2, 3):  # that of step 100 was damaged; they went on from step 40
        run.attempt(number, {"step": 90, "next": Next.RELAUNCH})
        run.world(number)
        told = (("checkpoint", 40), ("step", 41), ("checkpoint", resaved))
        run.events("n1", *({"type": kind, "step": step, "attempt": number} for kind, step in told))
    assert run.conclude(3)[0].next is next_step


def test_a_checkpoint_that_a_killed_agent_had_not_reported_counts_once(run: EndedAttempts) -> None:
    run.save(100, attempt=2)
    for number in (1, 2, 3, 4):
        run.attempt(number)
        run.world(number)
    run.events("n1", {"type": "checkpoint", "step": 60, "attempt": 1})
    found = [run.conclude(number) for number in (1, 2, 3, 4)]
    assert [outcome.checkpoint for _, outcome in found] == [60, 100, 100, 100]
    assert [decision.next for decision, _ in found] == [*[Next.RELAUNCH] * 3, Next.STOP]


def test_what_was_before_a_person_resumed_does_not_count(run: EndedAttempts) -> None:
    run.attempt(1, {"checkpoint": 100})
    run.paths.earlier_end(1).write_text("{}")
    run.attempt(2, {"step": 110})
    for number in (1, 2):
        run.world(number)
    run.events("n1", {"type": "checkpoint", "step": 100, "attempt": 1})  # it was set aside
    decision, outcome = run.conclude(2)
    assert (decision.next, outcome.checkpoint) == (Next.STOP, None)
    assert [outcome.attempt for outcome in past(run.paths, 3)] == [2]


def test_attempts_whose_outcomes_a_full_disk_took_do_not_go_on_for_ever(run: EndedAttempts) -> None:
    run.events("n1", {"type": "checkpoint", "step": 100, "attempt": 1})
    nexts = []
    for number in range(1, 7):
        run.attempt(number)
        run.world(number)
        nexts.append(run.conclude(number, 121)[0].next)
        run.paths.outcome(number).unlink()
    assert nexts == [Next.RELAUNCH] * 5 + [Next.STOP]


HERE = here(nodes=2, nproc_per_node=2)
ON_HOSTS = dataclasses.replace(
    on_slurm(nodes=2, gpus_per_node=2), cluster=Cluster.SSH, hosts=("n1", "n2")
)
GO_ON = ("the time limit", "preempted", "a warning signal (SIGUSR1 or SIGUSR2)")


def interrupted() -> Iterator[tuple[dict[str, Any], str, Plan | None, Next, Cause, str]]:
    """Yield an end, a request, a plan, and what must follow: the step, the cause and a reason."""
    ended = {"code": 124, "cause": Cause.CANCELLED, "reason": "n1: cancelled"}
    for word, reason in zip(("time-limit", "preempt", "signal"), GO_ON, strict=True):
        for cause in (Cause.SIGNAL, Cause.LAUNCHER, Cause.CANCELLED):  # killed after a warning
            yield {"cause": cause}, word, None, Next.REQUEUE, Cause.INTERRUPTED, reason
    for cause in (Cause.EXIT, Cause.NODE_LOST, Cause.HUNG, Cause.EXCEPTION):
        for word in ("time-limit", "preempt"):  # Slurm is about to take the nodes
            yield {"cause": cause, "reason": "x"}, word, None, Next.REQUEUE, cause, "x"
    for word in ("end", "cancel"):
        yield ended, word, None, Next.STOP, Cause.CANCELLED, "n1: cancelled"
    for cause in (Cause.SIGNAL, Cause.EXCEPTION, Cause.NODE_LOST):  # its save failed
        own: dict[str, Any] = {"cause": cause, "reason": "x"}
        yield own, "cancel", None, Next.STOP, Cause.CANCELLED, "x"
    yield ended, "", None, Next.REQUEUE, Cause.INTERRUPTED, "preempted"
    yield ended, "", HERE, Next.STOP, Cause.CANCELLED, "n1: cancelled"
    yield ended, "", ON_HOSTS, Next.RELAUNCH, Cause.INTERRUPTED, "preempted"
    for code, cause in (124, Cause.EXIT), (125, Cause.EXIT):  # as `timeout` ends
        own = {"code": code, "cause": cause, "reason": "x"}
        yield own, "", None, Next.RELAUNCH, cause, "x"


def test_an_end_is_told_by_its_cause_and_by_who_asked_for_it(tmp_path: Path) -> None:
    wrong = []
    for number, (end, word, plan, *expected) in enumerate(interrupted()):
        (tmp_path / str(number)).mkdir()
        run = EndedAttempts(tmp_path / str(number))
        run.attempt(1, {"checkpoint": 100, **end})
        if plan:
            run.plan(plan.to_json())
        if word:
            run.paths.request(1).write_text(f"{word}\n")
        decision, outcome = run.conclude(1, SLURM_JOB_END_TIME="60")
        if [decision.next, outcome.cause, outcome.reason] != expected:
            wrong.append((end, word, decision, outcome))
    assert wrong == []


NO_MODULE = """Traceback (most recent call last):
  File "agent.py", line 1, in <module>
    import psutil
ModuleNotFoundError: No module named 'psutil'
srun: error: n1: task 0: Exited with exit code 1
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{NO_MODULE}clusterrun: n1: a setup line failed\n", "n1: a setup line failed"),
        (NO_MODULE, "ModuleNotFoundError: No module named 'psutil'"),
        (
            "srun: error: n1: task 0: Exited with exit code 1\n"
            "srun: error: Only allocated 1 nodes asked for 2\nsrun: error: later\n",
            "srun: error: Only allocated 1 nodes asked for 2",
        ),
    ],
    ids=["a script of a node", "an exception", "srun's"],
)
def test_what_an_attempt_printed_tells_why_no_agent_could(
    run: EndedAttempts, text: str, reason: str
) -> None:
    run.attempt(1, {"checkpoint": 5})
    run.paths.batch_output.parent.mkdir()
    run.paths.batch_output.write_text("clusterrun: n1: of attempt 1\n")
    run.conclude(1)
    assert take_attempt(run.paths, 2, "me")
    with run.paths.batch_output.open("a") as output:
        output.write(f"clusterrun: attempt 1: relaunch: x\n{text}")
    amend_attempt(run.paths, 2, taken_at=5.0)
    _, outcome = run.conclude(2, 1)
    assert (outcome.reason, outcome.cause) == (reason, Cause.LAUNCHER)
    assert outcome.started_at == 5.0


@pytest.mark.parametrize(("left_s", "reason"), [(1800, Reason.SIGNAL), (150, Reason.TIME_LIMIT)])
def test_a_signal_with_time_left_is_not_the_time_limit(
    run: EndedAttempts, left_s: int, reason: Reason
) -> None:
    left = {"code": 125, "cause": Cause.INTERRUPTED, "interruption": Reason.TIME_LIMIT}
    run.attempt(1, {**left, "reason": "the time limit", "checkpoint": 100, "ended_at": 5000.0})
    decision, outcome = run.conclude(1, 125, SLURM_JOB_END_TIME=str(5000 + left_s))
    assert (outcome.interruption, outcome.reason) == (reason, reason.text)
    assert decision.next is Next.REQUEUE


def test_a_node_that_does_not_answer_is_left_out_from_then_on(run: EndedAttempts) -> None:
    run.reachable = ("n1", "n3")
    run.attempt(1, {**LOST, "checkpoint": 100})
    decision, _ = run.conclude(1, 123)
    assert (decision.next, decision.exclude) == (Next.RELAUNCH, ("n2",))
    run.attempt(2, {"checkpoint": 200, "nodes": ("n1", "n3")})
    assert run.conclude(2)[0].exclude == ("n2",)
    for nodelist in ("n[1-2]", "", "n["):  # too few, or not to be read: it goes through the queue
        decision, _ = run.conclude(1, 123, SLURM_JOB_NODELIST=nodelist)
        assert (decision.next, decision.exclude) == (Next.SUCCESSOR, ("n2",))
    assert run.conclude(2)[0].exclude == ()


@pytest.mark.parametrize("text", ["{", '{"nodes": 2}', "another release"])
def test_a_damaged_plan_is_an_error_that_callers_catch(run: EndedAttempts, text: str) -> None:
    run.attempt(1, {})
    plan = {**json.loads(run.paths.plan.read_text()), "unheard_of": 1}
    run.plan(json.dumps(plan) if text == "another release" else text)
    with pytest.raises(ValueError):  # noqa: PT011 - json says what is wrong, plan.py, or nobody
        run.conclude(1)


# What is left of an attempt: one outcome, and how far it came


FAILURE = Failure(
    at=5.0, node="n2", rank=3, code=1, signal=0,
    cause=Cause.EXCEPTION, message="ValueError: x", where="train.py:7",
)  # fmt: skip


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(root=tmp_path)
    paths.attempts_dir.mkdir()
    for number in (1, 2):
        paths.attempt(number).mkdir()
    return paths


BOTH = ("n1", "n2")


def account(paths: RunPaths, number: int = 1) -> Account:
    return Account(paths, number, "42")


def outcome(paths: RunPaths, number: int = 1) -> Outcome:
    return Outcome.from_json(paths.outcome(number).read_text())


def test_a_failure_is_told_with_who_where_and_how_far(paths: RunPaths) -> None:
    book = account(paths)
    book.open()
    for kind, step in (
        *(("step", 100), ("checkpoint", 100), ("checkpoint", 50), ("step", 120)),
        *(("step", "many"), ("resumed", 40), ("resumed", 0)),
    ):
        book.take({"type": kind, "step": step})
    book.close(Ending.of_first([FAILURE]), BOTH)
    found = outcome(paths)
    assert (found.attempt, found.job_id, found.nodes) == (1, "42", ("n1", "n2"))
    assert (found.node, found.rank, found.where, found.alike) == ("n2", 3, "train.py:7", 1)
    assert (found.code, found.cause) == (1, "exception")
    assert found.reason == "rank 3 on n2: ValueError: x"
    assert (found.step, found.checkpoint) == (120, 100)
    assert found.started_at <= found.ended_at
    assert read_attempt(paths, 1).resumed == 40  # the first one
    modes = {path.name: path.stat().st_mode & 0o777 for path in paths.attempt(1).iterdir()}
    assert modes == dict.fromkeys(("outcome.json", "attempt.json"), 0o600)


def test_what_an_earlier_attempt_saved_is_there(paths: RunPaths) -> None:
    first = account(paths)
    first.take({"type": "checkpoint", "step": 100})
    first.close(Ending.of_first([FAILURE]), BOTH)
    second = account(paths, 2)
    second.open()
    second.take({"type": "step", "step": 3})
    second.close(Ending.of_first([FAILURE]), BOTH)
    assert (outcome(paths, 2).step, outcome(paths, 2).checkpoint) == (3, 100)


@pytest.mark.parametrize(
    ("failure", "decided", "follows"),
    [
        (lost_node("n2", "gone"), (Next.SUCCESSOR, "n2 is lost"), (Next.REQUEUE, "n2 is lost")),
        (cancelled("n1"), None, (Next.REQUEUE, "Slurm started the job again")),
        (FAILURE, None, (Next.REQUEUE, "Slurm started the job again")),
        (FAILURE, (Next.STOP, "no checkpoint was saved"), (Next.STOP, "no checkpoint was saved")),
    ],
)
def test_what_followed_an_attempt_is_known_to_the_next(
    paths: RunPaths, failure: Failure, decided: tuple[Next, str] | None, follows: tuple[Next, str]
) -> None:
    account(paths).close(Ending.of_first([failure]), BOTH)
    if decided:
        step, why = decided
        write_outcome(paths, dataclasses.replace(outcome(paths), next=step, why=why))
    account(paths, 2).open()
    assert (outcome(paths).next, outcome(paths).why) == follows


def test_only_the_last_step_is_the_end(paths: RunPaths) -> None:
    book = account(paths)
    for step, total in ((0, None), (0, "0"), (99, 100)):
        book.take({"type": "step", "step": step, "total": total})
        assert not book.is_at_last_step
    book.take({"type": "step", "step": 100, "total": 100})
    assert book.is_at_last_step
    for total in (100, 50):  # a trainer that is stopped early reports its last step as the total
        book.take({"type": "step", "step": 50, "total": total})
        assert not book.is_at_last_step


def test_batch_hosts_that_vanish_again_and_again_end_the_run(paths: RunPaths) -> None:
    """Nobody is left to decide after such an attempt, and Slurm would requeue for ever."""
    for number in range(3, LOSSES + 3):
        paths.attempt(number).mkdir()
    account(paths, LOSSES).open()
    with pytest.raises(NodeError, match=f"{LOSSES} attempts in a row left no report"):
        account(paths, LOSSES + 2).open()
