"""What `status` prints about one job that waits, and how often it asks Slurm for that."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable

import pytest

from clusterrun.backends.slurm import query
from clusterrun.errors import Exit
from tests.cli.conftest import CommandLine
from tests.cli.runs import ended, events, queue, running, submitted
from tests.patience import wait_for
from tests.terminals import Terminal, terminal

SINFO = """\
main*|up|1-00:00:00|1-infinite|no|2|idle|gpu:h100:8|64|512000|(null)|node[1-2]|none
main*|up|1-00:00:00|1-infinite|no|5|allocated|gpu:h100:8|64|512000|(null)|node[3-7]|none
main*|up|1-00:00:00|1-infinite|no|2|drained|gpu:h100:8|64|512000|(null)|node[8-9]|Xid 79
a b|up|1:00:00|1-infinite|no|8|idle|gpu:h100:8|64|512000|(null)|node[11-18]|none"""
RESERVATION = (
    "ReservationName=maint StartTime=4000000000 EndTime=4000003600 Nodes=node[1-9] "
    "PartitionName=(null) Flags=MAINT,IGNORE_JOBS"
)
ASKED = ("-N8", "--gpus-per-node", "8", "--set", "slurm.gpu_type=h100", "train.py")

Waits = Callable[..., None]


@pytest.fixture
def waits(here: CommandLine) -> Waits:
    def put(reason: str, limit: str = "2:00:00", nodes: int = 8, partition: str = "main") -> None:
        row = f"4711|PENDING||0:00|{limit}|N/A|N/A|{partition}|{nodes}|{reason}"
        queue(here, row)
        here.program("sinfo", f"echo '{SINFO}'")
        here.program("scontrol", f"echo '{RESERVATION}'")
        query.forget()

    submitted(here, "4711", *ASKED)
    assert here.asked("squeue").count("--noheader") == 1  # whether the job can start
    for program in ("squeue", "sacct"):
        (here.bin / f"{program}.argv").unlink()
    return put


def asked(here: CommandLine) -> int:
    """Count the calls of Slurm's programs: each has one of these words."""
    programs = [*map(here.asked, ("squeue", "sinfo", "sacct"))]
    words = [word for argv in programs for word in argv]
    return words.count("--noheader") + here.asked("scontrol").count("show")


def test_a_job_that_waits_for_nodes(here: CommandLine, waits: Waits) -> None:
    waits("Resources")
    said = here("status", "4711")
    assert (said.code, said.err) == (0, "")
    expected = """\
waits      waiting for free nodes
           needs 8 nodes with h100 GPUs; partition 'main' has 9: 2 idle, 5 busy, 2 down or drained
           node[8-9] are drained: Xid 79
sooner     2 nodes are idle now: clusterrun resubmit 4711 --nodes 2
           8 nodes are idle now in partition 'a b', for at most 01:00:00: \
clusterrun resubmit 4711 --partition 'a b' --time 01:00:00
           resubmit starts a new run; to end this job: clusterrun cancel 4711
"""
    assert expected in said.out
    assert asked(here) == 2
    here("status", "4711")
    assert asked(here) == 2  # both answers are kept for some seconds


@pytest.mark.parametrize(("reason", "is_told"), [("PartitionNodeLimit", True), ("Priority", False)])
def test_submit_warns_of_a_job_that_will_not_start(
    here: CommandLine, reason: str, *, is_told: bool
) -> None:
    here.slurm()
    row = f"4712|PENDING||0:00|1:00|N/A|N/A|main|50|{reason}"
    here.program("sinfo", f"echo '{SINFO}'")
    here.program("squeue", f"echo '{row}'")
    here.program("sbatch", "echo 4712")
    said = here("submit", "-N50", "train.py")
    assert (said.code, said.out) == (0, "Submitted batch job 4712\n")
    warning = "warning: job 4712 is pending: requests more nodes than the partition allows"
    assert (warning in said.err, "50 nodes requested" in said.err) == (is_told, is_told)


def test_what_keeps_a_job_from_starting_is_told_with_numbers(
    here: CommandLine, waits: Waits
) -> None:
    many = "10 nodes with h100 GPUs requested, partition 'main' offers at most 9"
    long = "--time 2-00:00:00, partition 'main' allows 1-00:00:00"
    drained = "node[8-9] are drained: Xid 79"
    table: list[tuple[str, dict[str, object], list[str]]] = [
        ("PartitionNodeLimit", {"nodes": 10}, [many]),
        ("PartitionNodeLimit", {}, [drained]),
        ("PartitionTimeLimit", {"limit": "2-00:00:00"}, [long]),
        ("BadConstraints", {"partition": "gone"}, []),
        ("ReqNodeNotAvail, UnavailableNodes:node[8-9]", {}, [drained]),
    ]
    for calls, (reason, changes, facts) in enumerate(table, start=1):
        waits(reason, **changes)
        said = here("status", "4711").out
        assert [fact for fact in facts if f"           {fact}\n" not in said] == []
        assert asked(here) == 2 * calls


def test_a_reservation_ahead(here: CommandLine, waits: Waits) -> None:
    waits("ReqNodeNotAvail, May be reserved for other job", limit="UNLIMITED")
    said = here("status", "4711").out
    assert "maintenance reservation 'maint' of node[1-9]: from 2096-" in said
    assert "with a time limit of" in said
    assert (asked(here), here.asked("sinfo")) == (2, [])


def test_other_reasons_cost_no_second_call(here: CommandLine, waits: Waits) -> None:
    reasons = ("Dependency", "JobHeldUser", "QOSMaxJobsPerUserLimit", "None", "SomethingNew")
    for calls, reason in enumerate(reasons, start=1):
        waits(reason)
        assert "sooner" not in here("status", "4711").out
        assert asked(here) == calls


def test_a_job_that_runs_and_a_list_cost_no_second_call(here: CommandLine, waits: Waits) -> None:
    waits("Resources")
    listed = json.loads(here("list", "--json").out)["jobs"][0]["reason"]
    assert (listed["facts"], listed["sooner"], asked(here)) == ([], [], 1)
    queue(here, f"{running()}|main|8")
    query.forget()
    here("status", "4711")
    assert (asked(here), here.asked("sinfo")) == (2, [])


def test_without_an_answer_the_status_is_as_before(here: CommandLine, waits: Waits) -> None:
    for body in ("exit 1", "echo x|y", "echo Socket timed out >&2; exit 1"):
        waits("Resources")
        here.program("sinfo", body)
        said = here("status", "4711")
        assert (said.code, said.err) == (Exit.OK, "")
        assert "waits      waiting for free nodes\nworld      8 nodes x 8 ranks\n" in said.out


WAITS = (
    ("status", "--wait", "4711"),
    ("logs", "--follow", "4711"),
    ("cancel", "--checkpoint", "4711"),
)


def rows_left(shown: Terminal) -> list[str]:
    """Return the rows that are left at the end."""
    rows = re.sub(r"\x1b\[[0-9;]*m", "", shown.text()).replace("\r\n", "\n").split("\n")
    return [row.rpartition("\r\x1b[K")[2] for row in rows]


@pytest.mark.parametrize(("argv", "columns"), [*zip(WAITS, (20, 80, 80), strict=True)])
def test_a_wait_is_one_line_that_changes_until_something_else_is_said(
    here: CommandLine, argv: tuple[str, ...], columns: int
) -> None:
    root = submitted(here)
    queue(here, running())
    events(root, {"type": "started", "host": "node17"})
    text = "starting: 1 of 2 nodes, importing torch"
    if argv[0] == "cancel":
        text = "waiting for the checkpoint of job 4711"
    line = re.compile(rf"\r\x1b\[K({text[:12]}[^\r]*) … (\d+) s")
    with terminal(*argv, columns=columns) as shown:
        wait_for(lambda: len({*line.findall(shown.text())}) > 2, "the line", every_s=0)
        for begin, seconds in line.findall(shown.text()):
            assert begin == text[: columns - 6 - len(seconds)]
        ended(root, "COMPLETED", 0)
        assert shown.ended() == 0
        rows = rows_left(shown)
    assert not any("…" in row for row in rows), rows
    assert "" not in rows[:-1]


def test_ctrl_c_leaves_a_clean_line(here: CommandLine) -> None:
    root = submitted(here)
    queue(here, running())
    events(root, {"type": "started", "host": "node17"})
    for argv, said in zip(WAITS, ("interrupted", "job 4711 keeps running"), strict=False):
        with terminal(*argv) as shown:
            wait_for(lambda: "…" in shown.text(), "the line", every_s=0)
            shown.process.send_signal(signal.SIGINT)
            assert shown.ended() == 130
            assert rows_left(shown)[-2:] == [said, ""]
