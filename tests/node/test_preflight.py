"""What the checks of a node find before the launch."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable

import pytest

from clusterrun.config.choices import Device, Preflight
from clusterrun.health.examine import Check
from clusterrun.health.gpus import ANSWER_S
from clusterrun.node.link.connection import LINE_BYTES, Report
from clusterrun.node.watch import preflight
from clusterrun.node.watch.preflight import NodeChecks
from clusterrun.shared import shell
from clusterrun.shared.finding import Finding, Severity, fail, note
from clusterrun.shared.typed import decoded
from tests.launch.samples import here
from tests.patience import patience

FULL = fail("node.tmp", "only 0.0 GiB are free", "delete files")
SMALL = note("node.shm", "64 MiB", "--shm-size=16g")
Answer = Callable[..., None]


@pytest.fixture(name="answer")
def _answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Have the quick checks find this."""

    def answer(*found: Finding | Check) -> None:
        looks = {
            each.id if isinstance(each, Finding) else f"late.{n}": (
                (lambda each=each: each) if isinstance(each, Finding) else each
            )
            for n, each in enumerate(found)
        }
        monkeypatch.setattr(preflight, "quick_checks", lambda *_: looks)

    return answer


def checks(asked: Preflight = Preflight.WARN) -> NodeChecks:
    return NodeChecks(here(nodes=2, nproc_per_node=2, preflight=asked))


def reported(*, of: NodeChecks | None = None) -> tuple[Finding, ...]:
    return asyncio.run((of or checks()).report())


def test_a_check_that_is_late_delays_a_start_by_less_than_2_s(answer: Answer) -> None:
    answer(FULL, lambda: time.sleep(60) or SMALL)  # type: ignore[func-returns-value]
    start = time.monotonic()
    assert reported() == (FULL,)
    assert preflight.DEADLINE_S < 2
    assert time.monotonic() - start < preflight.DEADLINE_S + 5 * patience()


def test_checks_can_be_switched_off(answer: Answer) -> None:
    answer(FULL)
    assert (reported(), reported(of=checks(Preflight.OFF))) == ((FULL,), ())


def test_a_fault_of_a_check_is_a_note_and_ends_nothing(answer: Answer) -> None:
    def torn() -> Finding:
        raise ZeroDivisionError

    answer(torn)
    (found,) = reported()
    said = "cannot check this node: ZeroDivisionError()"
    assert (found.severity, found.text) == (Severity.NOTE, said)


def test_a_driver_that_hangs_delays_neither_the_start_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck = shell.Completed(rc=shell.TIMED_OUT, stdout='{"asks": "GPU 3"}', stderr="", pid=4242)
    monkeypatch.setattr(shell, "run_once", lambda *_, **__: stuck)
    found = NodeChecks(dataclasses.replace(here(nproc_per_node=2), device=Device.CUDA))
    assert found.pids == []
    texts = {each.id: each.text for each in reported(of=found)}
    assert "did not answer within 1.2 s, asked for GPU 3" in texts["gpu.count"]
    assert found.pids == [4242], "it is left alone"
    assert ANSWER_S < preflight.DEADLINE_S, "a late check is skipped"


@pytest.mark.parametrize("letter", ["x", "\U0001f525", "\0"])
def test_a_report_of_long_texts_is_short(answer: Answer, letter: str) -> None:
    long = letter * 9999
    answer(*(fail(f"gpu.x{n}", f"a\n{long}", long) for n in range(99)))
    one = Report(node="n1", node_rank=1, versions={}, checks=reported())
    data = json.dumps(dataclasses.asdict(one))
    assert len(data) < LINE_BYTES / 10
    assert decoded(Report, json.loads(data)) == one
    assert all(each.text.startswith(f"a {letter}") for each in one.checks)
