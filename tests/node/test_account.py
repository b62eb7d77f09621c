"""What is left of an attempt: one outcome, and how far it came."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from clusterrun.node.base.causes import Cause, Ending, Failure, NodeError, cancelled, lost_node
from clusterrun.node.recovery.account import Account
from clusterrun.node.recovery.rules import LOSSES
from clusterrun.rundir.outcome import Next, Outcome, write_outcome
from clusterrun.rundir.paths import RunPaths

FAILURE = Failure(
    at=5.0,
    node="n2",
    rank=3,
    code=1,
    signal=0,
    cause=Cause.EXCEPTION,
    message="ValueError: x",
    where="train.py:7",
)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(root=tmp_path)
    paths.attempts_dir.mkdir()
    for number in (1, 2):
        paths.attempt(number).mkdir()
    return paths


NODES = ("n1", "n2")


def account(paths: RunPaths, number: int = 1) -> Account:
    return Account(paths, number, "42")


def outcome(paths: RunPaths, number: int = 1) -> Outcome:
    return Outcome.from_json(paths.outcome(number).read_text())


def test_a_failure_is_told_with_who_where_and_how_far(paths: RunPaths) -> None:
    book = account(paths)
    book.open()
    for event in (
        {"type": "step", "step": 100},
        {"type": "checkpoint", "step": 100},
        {"type": "checkpoint", "step": 50},
        {"type": "step", "step": 120},
        {"type": "step", "step": "many"},
        {"type": "resumed", "step": 40},
        {"type": "resumed", "step": 0},
    ):
        book.take(event)
    book.close(Ending.of_first([FAILURE]), NODES)
    found = outcome(paths)
    assert (found.attempt, found.job_id, found.nodes) == (1, "42", ("n1", "n2"))
    assert (found.node, found.rank, found.where, found.alike) == ("n2", 3, "train.py:7", 1)
    assert (found.code, found.cause) == (1, "exception")
    assert found.reason == "rank 3 on n2: ValueError: x"
    assert (found.step, found.checkpoint) == (120, 100)
    assert found.started_at <= found.ended_at
    assert paths.resumed(1).read_text() == "40\n"  # the first one
    modes = {path.name: path.stat().st_mode & 0o777 for path in paths.attempt(1).iterdir()}
    assert modes == dict.fromkeys(("outcome.json", paths.resumed(1).name), 0o600)


def test_what_an_earlier_attempt_saved_is_there(paths: RunPaths) -> None:
    first = account(paths)
    first.take({"type": "checkpoint", "step": 100})
    first.close(Ending.of_first([FAILURE]), NODES)
    second = account(paths, 2)
    second.open()
    second.take({"type": "step", "step": 3})
    second.close(Ending.of_first([FAILURE]), NODES)
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
    account(paths).close(Ending.of_first([failure]), NODES)
    if decided:
        step, why = decided
        write_outcome(paths, dataclasses.replace(outcome(paths), next=step, why=why))
    account(paths, 2).open()
    assert (outcome(paths).next, outcome(paths).why) == follows


def test_only_the_last_step_is_the_end(paths: RunPaths) -> None:
    book = account(paths)
    book.take({"type": "step", "step": 99, "total": 100})
    assert not book.is_through
    book.take({"type": "step", "step": 100, "total": 100})
    assert book.is_through
    for total in (100, 50):  # a trainer that is stopped early reports its last step as the total
        book.take({"type": "step", "step": 50, "total": total})
        assert not book.is_through


def test_batch_hosts_that_vanish_again_and_again_end_the_run(paths: RunPaths) -> None:
    """Nobody is left to decide after such an attempt, and Slurm would requeue for ever."""
    for number in range(3, LOSSES + 3):
        paths.attempt(number).mkdir()
    account(paths, LOSSES).open()
    with pytest.raises(NodeError, match=f"{LOSSES} attempts in a row left no report"):
        account(paths, LOSSES + 2).open()
