"""Why a job waits and what would start sooner: situations, and what sinfo and scontrol print."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clusterrun.backends.base import SchedulerJob
from clusterrun.backends.slurm.outlook import NodeRequest, of_nodes, of_reservations, request_of
from clusterrun.backends.slurm.reasons import FactKind, Outlook, Sooner, Use
from clusterrun.backends.slurm.site import NodeGroup, node_groups, parse_sinfo
from clusterrun.launch.plan import Directive
from clusterrun.shared.state import JobState

from .builders import make_plan
from .conftest import Stubs

# A site with H100 and A100 nodes, a partition of short jobs, and one for root.
SITE = """\
gpu*|up|1-00:00:00|1-infinite|no|1|idle|gpu:h100:8(S:0-1)|64|512000|ib,h100|node1|none
gpu*|up|1-00:00:00|1-infinite|no|2|mixed|gpu:h100:8(S:0-1)|64|512000|ib,h100|node[2-3]|none
gpu*|up|1-00:00:00|1-infinite|no|1|allocated|gpu:h100:8|64|512000|ib,h100|node4|none
gpu*|up|1-00:00:00|1-infinite|no|4|idle|gpu:a100:4|64|512000|ib|node[11-14]|none
short|up|1:00:00|1-4|no|6|idle~|gpu:h100:8|64|512000|ib,h100|node[21-26]|none
long|up|infinite|1-infinite|no|3|idle|gpu:h100:8|32|256000|h100|node[31-33]|none
root|up|infinite|1-infinite|yes|9|idle|gpu:h100:8|64|512000|ib,h100|node[41-49]|none
off|down|infinite|1-infinite|no|9|idle|gpu:h100:8|64|512000|ib,h100|node[51-59]|none
"""
GROUPS = parse_sinfo(SITE)
ASKED = NodeRequest(partitions=("gpu",), nodes=3, limit_s=7200, gpus=8, gpu_type="h100")


def look(code: str = "Resources", groups: list[NodeGroup] = GROUPS, **changes: object) -> Outlook:
    return of_nodes(code, replace(ASKED, **changes), groups)


def kinds(found: Outlook) -> list[FactKind]:
    return [fact.kind for fact in found.facts]


def partition(name: str, idle: int, limit_s: int | None = None) -> Sooner:
    return Sooner(partition=name, idle=idle, limit_s=limit_s)


DAY = 86_400
FEWER = Sooner(idle=1, nodes=1)
SHORT = partition("short", 6, 3600)
LONG = partition("long", 3)


def test_what_would_start_sooner() -> None:
    day = Sooner(limit_s=DAY)
    five = Sooner(idle=5, nodes=5)
    table: list[tuple[dict[str, object], tuple[Sooner, ...]]] = [
        ({"limit_s": 3600}, (FEWER, partition("short", 6), LONG)),
        ({"limit_s": None}, (day, replace(FEWER, limit_s=DAY), LONG, SHORT)),
        ({"gpus": 4}, (FEWER, LONG, SHORT)),
        ({"cpus": 64}, (FEWER, SHORT)),
        ({"memory_mb": 300_000}, (FEWER, SHORT)),
        ({"features": ("ib",)}, (FEWER, SHORT)),
        ({"nodes": 4}, (FEWER, SHORT)),
        ({"nodes": 5}, (FEWER,)),
        ({"spare_nodes": 1}, (LONG, SHORT)),
        ({"exclude": frozenset({"node1"})}, (LONG, SHORT)),
        ({"exclude": frozenset({"node31", "node32", "node5"})}, (FEWER, SHORT)),
        ({"is_exact": False}, ()),
        ({"partitions": ("gone",)}, ()),
        ({"partitions": ("gpu", "short")}, (LONG,)),
        ({"gpus": 0, "gpu_type": "", "nodes": 6}, (five,)),
    ]
    assert [
        (row, look(**row).sooner) for row, wanted in table if look(**row).sooner != wanted
    ] == []


def test_behind_other_jobs_fewer_nodes_and_its_own_idle_nodes_do_not_count() -> None:
    alias = [replace(group, partition="alias") for group in GROUPS if group.partition == "gpu"]
    assert look("Priority", [*GROUPS, *alias], gpus=4, gpu_type="", nodes=3).sooner == (LONG, SHORT)


def test_what_a_partition_does_not_have_is_told_in_numbers() -> None:
    table: list[tuple[dict[str, object], FactKind, int | None, int]] = [
        ({"nodes": 9}, FactKind.TOO_MANY_NODES, 9, 4),
        ({"partitions": ("short",), "limit_s": 60, "nodes": 5}, FactKind.TOO_MANY_NODES, 5, 4),
        ({"limit_s": 172_800}, FactKind.TOO_LONG, 172_800, 86_400),
        ({"limit_s": None}, FactKind.TOO_LONG, None, 86_400),
        ({"gpu_type": "b200"}, FactKind.TOO_MANY_NODES, 3, 0),
        ({"gpus": 16}, FactKind.TOO_MANY_NODES, 3, 0),
    ]
    for changes, *wanted in table:
        (fact,) = [fact for fact in look(**changes).facts if fact.kind is not FactKind.NODES]
        assert [fact.kind, fact.asked, fact.limit] == wanted, changes


def test_nodes_that_are_down_are_named_if_they_are_missing() -> None:
    rows = """\
main|up|infinite|1-infinite|no|2|drained|(null)|64|512000|(null)|n[1-2]|bad | DIMM
main|up|infinite|1-infinite|no|1|down*|(null)|64|512000|(null)|n3|Not responding
main|up|infinite|1-infinite|no|1|idle|(null)|64|512000|(null)|n4|none
"""
    request = NodeRequest(partitions=("main",), nodes=2, limit_s=60)
    found = of_nodes("PartitionNodeLimit", request, parse_sinfo(rows))
    out = [(f.nodes, f.state, f.detail) for f in found.facts if f.kind is FactKind.NODES_OUT]
    assert out == [("n[1-2]", "drained", "bad | DIMM"), ("n3", "down*", "Not responding")]
    assert found.is_out
    assert not of_nodes("Resources", request, parse_sinfo(rows)).is_out
    assert not of_nodes("PartitionNodeLimit", replace(request, nodes=5), parse_sinfo(rows)).is_out
    assert kinds(of_nodes("Resources", replace(request, nodes=1), parse_sinfo(rows))) == [
        FactKind.NODES
    ]


def test_only_nodes_that_can_take_a_job_now_are_idle() -> None:
    table = {
        Use.IDLE: ("idle", "idle~"),
        Use.RESERVED: ("idle$", "maint", "reserved"),
        Use.OUT: ("idle*", "mixed*", "draining", "drained", "down$", "down*", "fail", "inval"),
        Use.PARTLY: ("mixed", "mixed-"),
        Use.BUSY: ("idle#", "idle-", "planned", "powering_down", "new", "allocated", ""),
    }
    rows = [(state, use) for use, states in table.items() for state in states]
    assert [row for row in rows if replace(GROUPS[0], state=row[0]).use is not row[1]] == []


HOSTILE = """\
CLUSTER: tuxA
gpu*|up|n/a||no|two|idle|gpu:8|64|1|(null)|n1|none
gpu*|up|n/a|?|no|2|idle|(null)|64+|x|(null)|n[1-|a\x1b[31m|b
the rest of a reason
||||||||||||||||
gpu*|up
"""


def test_what_sinfo_should_not_print_is_left_out() -> None:
    (group,) = parse_sinfo(HOSTILE)
    assert (group.limit_s, group.most_nodes, group.cpus, group.memory_mb) == (None, None, 64, None)
    assert (group.hosts, group.reason) == ((), "a\x1b[31m|b")
    request = NodeRequest(partitions=("gpu",), nodes=3, limit_s=None, exclude=frozenset({"n1"}))
    assert kinds(of_nodes("Resources", request, [group])) == [FactKind.TOO_MANY_NODES]
    assert of_nodes("Resources", request, []) == Outlook()


# Slurm 22.05 with SLURM_TIME_FORMAT=%s, and without (21.08 ignores it).
RESERVATIONS = """\
ReservationName=maint StartTime=10000 EndTime=13600 Duration=01:00:00 Nodes=node[3-4] NodeCnt=2 \
CoreCnt=128 Features=(null) PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=128 \
Users=root Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE
ReservationName=class StartTime=500 EndTime=9999 Nodes=node1 PartitionName=short Flags=SPEC_NODES
ReservationName=over StartTime=100 EndTime=900 Nodes=node2 PartitionName=(null) Flags=
ReservationName=odd StartTime=soon EndTime=Unknown
No reservations in the system
"""


def test_a_reservation_ahead_is_named_with_a_limit_that_ends_before_it() -> None:
    outlook = of_reservations(replace(ASKED, limit_s=7200), RESERVATIONS, now=4000.0)
    (fact,) = outlook.facts
    assert (fact.kind, fact.detail, fact.state) == (FactKind.RESERVATION, "maint", "maintenance")
    assert (fact.nodes, fact.start, fact.end) == ("node[3-4]", 10000.0, 13600.0)
    assert outlook.sooner == (Sooner(limit_s=5700),)
    assert of_reservations(replace(ASKED, limit_s=5000), RESERVATIONS, now=4000.0) == Outlook()
    short = replace(ASKED, partitions=("short",), limit_s=60)
    active = of_reservations(short, RESERVATIONS, now=4000.0)
    assert [fact.detail for fact in active.facts] == ["class"]
    assert active.sooner == ()
    soon = of_reservations(ASKED, RESERVATIONS, now=9800.0)
    assert (len(soon.facts), soon.sooner) == (1, ())


def test_a_sinfo_that_fails_leaves_nothing_and_is_asked_again(stubs: Stubs) -> None:
    for body in ("exit 1", "echo Unable to contact slurm controller >&2; exit 1"):
        stubs.add("sinfo", body)
        assert node_groups(None) == []
    stubs.add("sinfo", f"echo '{SITE}'")
    assert len(node_groups(None)) == len(GROUPS)


def test_the_request_is_that_of_the_plan(tmp_path: Path) -> None:
    table: list[tuple[dict[str, str], dict[str, object]]] = [
        ({"gres": "gpu:h100:8"}, {"gpu_type": "h100"}),
        ({"gres": "gpu:8"}, {"gpu_type": ""}),
        ({"gpus-per-node": "a100:8"}, {"gpu_type": "a100"}),
        ({"mem": "2G", "cpus-per-task": "16"}, {"memory_mb": 2048, "cpus": 16}),
        ({"mem": "4096"}, {"memory_mb": 4096}),
        ({"constraint": "ib&h-100"}, {"features": ("ib", "h-100"), "is_exact": True}),
        ({"constraint": "[a|b]*2"}, {"is_exact": False}),
        ({"nodelist": "node1"}, {"is_exact": False}),
        ({"exclude": "node[1-2]"}, {"exclude": frozenset({"node1", "node2"})}),
        ({"": "--mincpus=8"}, {"is_exact": False}),
    ]
    for directives, more in table:
        args = (directives.pop(""),) if "" in directives else ()
        lines = tuple(Directive(name=name, value=value) for name, value in directives.items())
        plan = make_plan(tmp_path, directives=lines, gpus_per_node=8, sbatch_args=args)
        about = {"partition": "a,b", "asked_nodes": 3, "limit_s": 60}
        job = SchedulerJob(job_id="7", state=JobState.PENDING, source="squeue", **about)
        found = request_of(job, plan)
        expected = {"partitions": ("a", "b"), "nodes": 3, "limit_s": 60, "gpus": 8} | more
        assert {name: getattr(found, name) for name in expected} == expected
