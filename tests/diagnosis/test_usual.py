"""What earlier runs printed when they went well is no cause; the rest still is."""

from __future__ import annotations

from clusterrun.diagnosis.weigh import verdict_of
from clusterrun.verbs.diagnose import doubtful, shape_of, usual_among
from tests.diagnosis.test_examples import scanned

RETRY = "fetch of shard 17 by pid 905: Connection timed out: No space left on device"
OTHER = "fetch of shard 3 by pid 77123: Connection timed out: No space left on device"
TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\nKeyError: 3'
XID = "NVRM: Xid (PCI:0000:41:00): 79, x"
TABLE = {
    "an earlier run printed it": (RETRY, OTHER, None),
    "it did not": (RETRY, "hello", "disk_full"),
    "the process ended by it": (TRACEBACK, TRACEBACK, "user_code_exception"),
    "the process went on": (f"{TRACEBACK}\n" + "working\n" * 20, TRACEBACK, None),
    "hardware": (XID, XID, "gpu_xid"),
    "another number, another sign": (
        "exits with return code = -9",
        "exits with return code = -0",
        "host_oom",
    ),
}


def test_what_is_left() -> None:
    wrong = []
    for name, (failed, earlier, cause) in TABLE.items():
        scanner = scanned(failed)
        found = {each: shape_of(each.line.text, "") for each in doubtful(scanner)}
        scanner.leave_out(usual_among(found, ((text, "") for text in earlier.splitlines())))
        verdict = verdict_of(scanner)
        wrong += [name] * ((verdict.cause.id if verdict else None) != cause)
    assert wrong == []
