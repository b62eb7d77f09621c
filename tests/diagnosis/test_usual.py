"""What earlier runs printed when they went well is no cause; the rest still is."""

from __future__ import annotations

import pytest

from clusterrun.diagnosis.lines import read_line
from clusterrun.diagnosis.scan import Scanner
from clusterrun.diagnosis.weigh import verdict_of
from clusterrun.verbs.usual import UsualLog, doubtful, kind_of
from tests.diagnosis.test_examples import scanned

RETRY = "fetch of shard 17 by pid 905: Connection timed out: No space left on device"
OTHER = "fetch of shard 3 by pid 77123: Connection timed out: No space left on device"
STEPS = "\n".join(f"step {n} loss 2.{n}" for n in range(1, 5))
TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\nKeyError: 3'


def without_usual(failed: str, earlier: str, **how: float) -> Scanner:
    scanner = scanned(failed)
    findings = doubtful(scanner)
    log = UsualLog(findings=findings, run_id="", other_run_id="", **how)
    for text in earlier.splitlines():
        log.feed(read_line(text, number=1, file=""))
    scanner.leave_out(each for each in findings if kind_of(each, "") in log.usual)
    return scanner


@pytest.mark.parametrize(
    ("failed", "earlier", "how", "cause"),
    [
        pytest.param(RETRY, OTHER, {}, None, id="an earlier run printed it"),
        pytest.param(RETRY, "hello", {}, "disk_full", id="it did not"),
        pytest.param(RETRY, OTHER, {"well_until": 0.0}, "disk_full", id="nothing followed it"),
        pytest.param(
            RETRY, f"{OTHER}\n{STEPS}", {"well_until": 0.0}, None, id="steps followed it there"
        ),
        pytest.param(TRACEBACK, TRACEBACK, {}, "user_code_exception", id="the process ended by it"),
        pytest.param(
            f"{TRACEBACK}\n" + "working\n" * 20, TRACEBACK, {}, None, id="the process went on"
        ),
        pytest.param(
            "NVRM: Xid (PCI:0000:41:00): 79, x",
            "NVRM: Xid (PCI:0000:41:00): 79, x",
            {},
            "gpu_xid",
            id="hardware",
        ),
        pytest.param(
            "exits with return code = -9",
            "exits with return code = -0",
            {},
            "host_oom",
            id="another number, another sign",
        ),
    ],
)
def test_what_is_left(failed: str, earlier: str, how: dict[str, float], cause: str | None) -> None:
    found = verdict_of(without_usual(failed, earlier, **how))
    assert (found.cause.id if found else None) == cause
