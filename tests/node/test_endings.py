"""Which failure came first, and what the job's exit status says."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from clusterrun.node.base.causes import (
    Cause,
    Ending,
    Failure,
    cancelled,
    first_failure,
    lost_node,
)
from clusterrun.node.forward.spool import Spool
from clusterrun.node.watch.ranks import Ranks
from clusterrun.shared.typed import decoded

NO_PID = 2**22 + 1  # more than the kernel gives out


def failure(**changes: Any) -> Failure:
    given = {
        "at": 10.0,
        "node": "n1",
        "rank": 3,
        "code": 1,
        "signal": 0,
        "cause": Cause.EXCEPTION,
        "message": "ValueError: x",
    }
    return Failure(**{**given, **changes})


def test_the_earliest_failure_is_the_first() -> None:
    early, late = failure(at=9.5, rank=7), failure(at=10.0)
    assert first_failure([late, early]) is early


@pytest.mark.parametrize(
    "consequence",
    [
        failure(at=1.0, signal=15, cause=Cause.SIGNAL),
        failure(at=1.0, rank=None, cause=Cause.LAUNCHER),
        failure(at=1.0, cause=Cause.WORLD_ELSEWHERE),
        failure(at=1.0, has_lost_peer=True),
    ],
)
def test_a_consequence_never_comes_first(consequence: Failure) -> None:
    cause = failure(at=2.0)
    assert first_failure([consequence, cause]) is cause
    assert first_failure([consequence]) is consequence


def test_next_to_a_lost_node_a_cancellation_is_slurms_answer_to_it() -> None:
    by_slurm = failure(at=1.0, rank=None, cause=Cause.CANCELLED, code=124)
    lost = failure(at=1.1, rank=None, cause=Cause.NODE_LOST, code=123)
    assert first_failure([by_slurm, lost]) is lost
    assert first_failure([by_slurm, failure(at=1.1)]) is by_slurm


def test_a_rank_that_lost_another_one_at_its_line_did_not_fail_alike() -> None:
    train = failure(where="train.py:18", rank=0)
    alike = failure(where="train.py:18")
    assert Ending.of_first([train, alike]).alike == 2
    assert Ending.of_first([train, dataclasses.replace(alike, has_lost_peer=True)]).alike == 1


@pytest.mark.parametrize(
    ("cause", "message", "has_lost_peer"),
    [
        ("exception", "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:4", True),
        ("exception", "DistBackendError: NCCL communicator was aborted on rank 3.", True),
        ("exception", "ValueError: x", False),
        ("exit", "Connection closed by peer", False),
    ],
)
def test_an_exception_shows_whether_the_rank_had_lost_another_one(
    tmp_path: Path, cause: str, message: str, has_lost_peer: bool
) -> None:
    found: list[Failure] = []
    spool = Spool(root=tmp_path)
    ranks = Ranks(spool=spool, node="n1", happened=lambda event: None, failed=found.append)
    events = (
        {"ts": 1.0, "type": "rank_start", "pid": NO_PID},
        {"ts": 1.0, "type": "rank_exit", "code": 1, "cause": cause, "message": message},
    )
    spool.events(0).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    ranks.look()
    assert [failure.has_lost_peer for failure in found] == [has_lost_peer]


async def test_a_rank_that_has_reported_its_failure_is_not_waited_for_if_one_looks_closely(
    tmp_path: Path,
) -> None:
    found: list[Failure] = []
    spool = Spool(root=tmp_path)
    ranks = Ranks(spool=spool, node="n1", happened=lambda event: None, failed=found.append)
    now = time.time()
    events = (
        {"ts": now, "type": "rank_start", "pid": os.getpid()},
        {"ts": now, "type": "rank_exit", "code": 3, "cause": "exception", "message": "x"},
    )
    spool.events(0).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    ranks.look()
    assert found == []
    ranks.look(closely=True)
    ranks.close()
    assert [failure.code for failure in found] == [3]


def test_failures_and_endings_survive_the_wire() -> None:
    ending = Ending.of(failure(rank=None, signal=9, cause=Cause.SIGNAL))
    assert decoded(Ending, dataclasses.asdict(ending)) == ending
    assert decoded(Ending, {"code": 0, "reason": "completed"}).failure is None
    for bad in ({}, {"code": "x", "reason": ""}, {"code": 1, "reason": "", "failure": {"at": 1}}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            decoded(Ending, bad)


def test_reasons_name_rank_and_node() -> None:
    assert failure().sentence() == "rank 3 on n1: ValueError: x"
    assert lost_node("n2", "gone").sentence() == "n2: gone"
    assert cancelled("n2").sentence() == "cancelled"
    assert (lost_node("n2", "gone").code, cancelled("n2").code) == (123, 124)
