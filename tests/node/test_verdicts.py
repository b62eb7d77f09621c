"""What the verdict on a failure decides."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from clusterrun.diagnosis.kinds import Certainty, Retry
from clusterrun.node.base.processes import fork_answer
from clusterrun.node.recovery import rules
from clusterrun.node.recovery.rules import Decision, Ground, decide
from clusterrun.rundir import record
from clusterrun.rundir.end import Cause
from clusterrun.rundir.outcome import Next, Outcome, ShortVerdict, VerdictRule
from clusterrun.rundir.paths import RunPaths
from tests.launch.samples import here, on_slurm
from tests.patience import patience

NODES = ("n1", "n2", "n3", "n4")


def verdict(cause: str, **more: Any) -> ShortVerdict:
    about = {"status": Certainty.ESTABLISHED, "retry": Retry.NO, "ranks": (3,), "nodes": ("n2",)}
    said = {"means": f"It was {cause}.", "text": f"{cause}: 7"}
    return ShortVerdict(cause=cause, **{**about, **said, **more})


def failed(found: ShortVerdict | None, **more: Any) -> Outcome:
    about = {"attempt": 1, "job_id": "1", "started_at": 1.0, "ended_at": 2.0, "nodes": NODES}
    end = {"code": 1, "cause": Cause.EXIT, "reason": "it failed", "verdict": found}
    return Outcome(**{**about, **end, **more})


def after(*history: Outcome, allocated: tuple[str, ...] = NODES, **asked: Any) -> Decision:
    asked = {"max_restarts": 9, **asked}
    plan = on_slurm(nodes=4, gpus_per_node=2, **asked)
    return decide(history, Ground(plan=plan, allocated=allocated, unreachable=lambda nodes: ()))


def test_what_another_try_would_repeat_costs_one_attempt() -> None:
    decision = after(failed(verdict("cuda_oom")))
    assert (decision.next, decision.rule) == (Next.STOP, VerdictRule.WOULD_REPEAT)
    assert decision.why == "cuda_oom, before the first step: a new attempt would fail the same way"


LIKELY = {"status": Certainty.LIKELY, "generic": True}
MAYBE = {**LIKELY, "retry": Retry.MAYBE}


@pytest.mark.parametrize(
    "more",
    [
        {"found": verdict("cuda_oom"), "step": 3},  # the training got further
        {"found": verdict("cuda_oom", steps=3)},  # as its output shows
        {"found": verdict("cuda_oom", retry=Retry.MAYBE)},
        {"found": verdict("cuda_oom", status=Certainty.LIKELY)},
        {"found": verdict("bug", status=Certainty.UNCONFIRMED, generic=True)},
        {"found": verdict("user_code_exception", **MAYBE)},
        {"found": None},
    ],
)
def test_anything_less_certain_gets_another_try(more: dict[str, Any]) -> None:
    decision = after(failed(**more))
    assert (decision.next, decision.rule) == (Next.RELAUNCH, None)


def repeated() -> Iterator[tuple[str, Outcome, Outcome, bool]]:
    """Yield two failures, and whether they prove that a third would follow."""
    assertion = failed(verdict("device_assert"), step=7, checkpoint=5)

    def second(cause: str = "device_assert", step: int = 7, **more: Any) -> Outcome:
        return failed(verdict(cause, **more), step=step, checkpoint=5)

    yield "the same", assertion, assertion, True
    yield "another node", assertion, second(nodes=("n4",)), True
    yield "another rank", assertion, second(ranks=(1,)), True
    yield "it went further", assertion, second(step=8), False
    yield "another rank of another node", assertion, second(ranks=(1,), nodes=("n1",)), False
    yield "another cause", assertion, second("cuda_illegal_access"), False
    yield "it may pass", assertion, second(retry=Retry.YES), False
    yield "unconfirmed", assertion, second(status=Certainty.UNCONFIRMED), False
    yield "likely", assertion, second(status=Certainty.LIKELY), False
    apart = dataclasses.replace(assertion, cause=Cause.RENDEZVOUS)
    yield "nodes that do not meet", assertion, apart, False
    waits = second("nccl_timeout", status=Certainty.LIKELY, retry=Retry.MAYBE, ranks=range(8))
    yield "a time-out that nothing explains", waits, waits, False
    one, other = (second("user_code_exception", text=text, **MAYBE) for text in ("1", "2"))
    yield "one exception", one, one, True
    yield "two exceptions", one, other, False


def test_the_same_cause_at_the_same_place_costs_two_attempts() -> None:
    found = [
        (what, after(first, second).rule is VerdictRule.SAME_CAUSE, is_proof)
        for what, first, second, is_proof in repeated()
    ]
    assert [each for each in found if each[1] is not each[2]] == []
    assert after(failed(verdict("user_code_exception", **LIKELY))).rule is VerdictRule.WOULD_REPEAT


@pytest.mark.parametrize(
    "earlier",
    [
        failed(None, cause=Cause.NODE_LOST, step=900, checkpoint=800),
        failed(None, cause=Cause.NODE_LOST, ended_at=5000.0),  # of a script that reports nothing
    ],
)
def test_a_configuration_that_has_trained_is_not_to_blame(earlier: Outcome) -> None:
    unlucky = failed(verdict("gpu_not_visible"), checkpoint=earlier.checkpoint)
    assert (after(earlier, unlucky).next, after(unlucky).next) == (Next.RELAUNCH, Next.STOP)
    again = after(earlier, unlucky, unlucky)
    assert (again.next, again.rule) == (Next.STOP, VerdictRule.SAME_CAUSE)


GPU = verdict("gpu_xid", retry=Retry.EXCLUDE, blames_node=True)


def test_a_faulty_node_is_excluded() -> None:
    spare = after(failed(GPU, step=7, checkpoint=5), allocated=(*NODES, "n5"))
    found = (spare.next, spare.exclude, spare.rule)
    assert found == (Next.RELAUNCH, ("n2",), VerdictRule.FAULTY_NODE)
    assert spare.why == "n2 is at fault (gpu_xid)"
    none_left = after(failed(GPU))  # not even a checkpoint: the script is not to blame
    assert (none_left.next, none_left.exclude) == (Next.SUCCESSOR, ("n2",))


@pytest.mark.parametrize(
    "found",
    [
        verdict("host_oom", retry=Retry.MAYBE),
        verdict("gpu_xid", retry=Retry.EXCLUDE, blames_node=True, nodes=("n1", "n2")),
        verdict("gpu_xid", retry=Retry.EXCLUDE, blames_node=True, nodes=("elsewhere",)),
        verdict("gpu_hang", retry=Retry.EXCLUDE, blames_node=True, status=Certainty.LIKELY),
    ],
)
def test_no_node_is_excluded_for_less(found: ShortVerdict) -> None:
    assert after(failed(found, step=7)).exclude == ()


def others(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Have this process have threads of these names."""
    found = [threading.main_thread(), *(threading.Thread(name=name) for name in names)]
    monkeypatch.setattr(rules.threading, "enumerate", lambda: found)


def test_a_verdict_that_takes_too_long_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setattr(rules.sys, "executable", str(slow))
    others(monkeypatch, "reader")
    monkeypatch.setattr(rules, "LIMIT_S", 0.2)
    assert rules.judge(RunPaths(root=tmp_path), failed(None)) is None


@pytest.mark.parametrize("names", [(), ("agents", "shared disk"), ("reader",)])
def test_the_judge_names_the_cause_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    """It is a fork of this one if that is safe."""
    others(monkeypatch, *names)
    monkeypatch.setattr(rules, "LIMIT_S", rules.LIMIT_S * patience())
    rules.load_judge()
    paths = RunPaths(root=tmp_path)
    record.write(record.new_record(here(nodes=1, nproc_per_node=1), paths, argv=[], now=1.0))
    paths.attempt(1).mkdir(parents=True)
    text = "ModuleNotFoundError: No module named 'x'"
    end = failed(None, cause=Cause.EXCEPTION, message=text, rank=0, node="n1")
    found = rules.judge(paths, end)
    assert found is not None
    assert (found.cause, found.retry, found.ranks) == ("module_missing", Retry.NO, (0,))
    assert rules.judge(paths, failed(None, cause=Cause.CANCELLED)) is None


def slowly() -> str:
    time.sleep(60)
    return "late"


@pytest.mark.parametrize(
    ("work", "answer"),
    [
        (lambda: "yes", "yes"),
        (lambda: "x" * 1_000_000, "x" * 1_000_000),
        (lambda: os.environ["NOT_SET"], None),
        (lambda: os._exit(3), None),
        (slowly, None),
    ],
)
def test_a_fork_answers_in_time_or_not_at_all(work: Callable[[], str], answer: str | None) -> None:
    before = {*psutil.Process().children()}  # other tests may have left some
    assert fork_answer(work, 0.3 * patience()) == answer
    assert {*psutil.Process().children()} <= before
