"""Query Slurm about its partitions' nodes and its reservations; for a job that waits."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from clusterrun.backends import cache
from clusterrun.backends.slurm.query import SEPARATOR, call, parse_clock, parse_time
from clusterrun.backends.slurm.site import gpus_of
from clusterrun.errors import SchedulerUnreachableError, UsageError
from clusterrun.shared.hostlist import parse_hostlist

TIMEOUT_S: Final = 5.0
# What sinfo prints. The reason comes last: it is free text.
FIELDS: Final = {
    **{"partition": "%P", "availability": "%a", "limit": "%l", "size": "%s", "groups": "%g"},
    **{"root_only": "%r", "count": "%D", "state": "%T", "gres": "%G", "cpus": "%c"},
    **{"memory": "%m", "features": "%f", "nodes": "%N", "reason": "%E"},
}
_STATE: Final = re.compile(r"([a-z_]+)(.*)", re.DOTALL)
_PAIR: Final = re.compile(r"(?:^| )(\w+)=(\S*)")


class Use(Enum):
    """What a node is used for now, whatever its kind."""

    IDLE = "idle"
    PARTLY = "partly in use"
    PLANNED = "planned for a job"
    BUSY = "busy"
    RESERVED = "reserved"
    OUT = "down or drained"


_USES: Final = {
    "idle": Use.IDLE,
    "mixed": Use.PARTLY,
    "planned": Use.PLANNED,
    **dict.fromkeys(("maint", "reserved"), Use.RESERVED),
    **dict.fromkeys(("down", "drained", "draining", "fail", "failing", "error", "inval"), Use.OUT),
}
# Suffixes of a state: "~" is powered down and starts on demand, "*" does not respond.
_STARTS: Final = ("", "~")


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of a partition with one configuration and state; None means no limit, or unknown.

    `nodes` is a host list, `reason` is why they are down or drained. `groups` may use the
    partition; it is empty if all may.
    """

    partition: str
    is_up: bool
    limit_s: int | None
    most_nodes: int | None
    groups: tuple[str, ...]
    is_root_only: bool
    count: int
    state: str
    gpus: tuple[tuple[str, int], ...]
    cpus: int | None
    memory_mb: int | None
    features: frozenset[str]
    nodes: str
    reason: str

    @property
    def use(self) -> Use:
        """What the nodes are used for; a state that is not known counts as busy.

        The state is `idle`, `mixed`, ...; a mark such as `*` (not responding) may follow.
        """
        match = _STATE.match(self.state)
        base, mark = (match[1], match[2]) if match else ("", "")
        use = _USES.get(base, Use.BUSY)
        if use is Use.OUT or "*" in mark:
            return Use.OUT
        if "$" in mark:
            return Use.RESERVED
        if "-" in mark:
            return Use.PLANNED
        return use if use is not Use.IDLE or mark in _STARTS else Use.BUSY

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the nodes; () if they can't be read."""
        with contextlib.suppress(UsageError):
            return tuple(parse_hostlist(self.nodes))
        return ()


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Nodes that Slurm keeps for somebody or for maintenance; `partition` may be empty."""

    name: str
    start: float
    end: float
    nodes: str
    partition: str
    is_maintenance: bool


def node_groups(slurm_cluster: str | None) -> list[NodeGroup]:
    """Ask sinfo once about all partitions; reuse an answer of the last 10 s.

    Return nothing if it doesn't answer.
    """
    wanted = ("--noheader", "--exact", f"--format={SEPARATOR.join(FIELDS.values())}")
    return parse_sinfo(_text(slurm_cluster, "sinfo", *wanted))


def reservations(slurm_cluster: str | None) -> list[Reservation]:
    """Ask scontrol once about all reservations, as `node_groups`."""
    return parse_reservations(_text(slurm_cluster, "scontrol", "--oneliner", "show", "reservation"))


def _text(slurm_cluster: str | None, program: str, *words: str) -> str:
    def ask() -> str:
        done = call(slurm_cluster, program, *words, tries=1, timeout_s=TIMEOUT_S)
        if done.rc != 0:
            raise SchedulerUnreachableError(f"{program} failed", cause=done.stderr.strip())
        return done.stdout

    try:
        return cache.text_through((slurm_cluster or "", program, *words), cache.TTL_S, ask)
    except SchedulerUnreachableError:
        return ""


def parse_sinfo(text: str) -> list[NodeGroup]:
    """Parse sinfo's lines; skip those of another shape (the rest of a reason, `CLUSTER: x`).

    >>> line = "gpu*|up|1:00:00|4|all|no|2|idle|gpu:h100:4(S:0)|64|512000|(null)|n[1-2]|none"
    >>> (group,) = parse_sinfo(line)
    >>> group.partition, group.limit_s, group.most_nodes, group.gpus, group.use.value
    ('gpu', 3600, 4, (('h100', 4),), 'idle')
    """
    rows = (line.split(SEPARATOR, len(FIELDS) - 1) for line in text.splitlines())
    found = (dict(zip(FIELDS, row, strict=True)) for row in rows if len(row) == len(FIELDS))
    return [_group(row) for row in found if row["count"].isdecimal()]


def _group(row: Mapping[str, str]) -> NodeGroup:
    groups, features, reason = row["groups"], row["features"], row["reason"]
    return NodeGroup(
        partition=row["partition"].removesuffix("*"),
        is_up=row["availability"] == "up",
        limit_s=parse_clock(row["limit"]),
        most_nodes=_number(row["size"].rpartition("-")[2]),
        groups=() if groups == "all" else tuple(groups.split(",")),
        is_root_only=row["root_only"] == "yes",
        count=int(row["count"]),
        state=row["state"],
        gpus=gpus_of(row["gres"]),
        cpus=_number(row["cpus"]),
        memory_mb=_number(row["memory"]),
        features=frozenset() if features == "(null)" else frozenset(features.split(",")),
        nodes=row["nodes"],
        reason="" if reason in ("none", "(null)") else reason,
    )


def _number(text: str) -> int | None:
    digits = text.removesuffix("+")
    return int(digits) if digits.isdecimal() and digits.isascii() else None


def parse_reservations(text: str) -> list[Reservation]:
    """Parse `scontrol --oneliner show reservation`; skip what has no times."""
    return list(_reservations(text))


def _reservations(text: str) -> Iterator[Reservation]:
    for line in text.splitlines():
        pairs = dict(_PAIR.findall(line))
        start, end = (parse_time(pairs.get(name, "")) for name in ("StartTime", "EndTime"))
        if not line.startswith("ReservationName=") or start is None or end is None:
            continue
        partition, nodes = pairs.get("PartitionName", ""), pairs.get("Nodes", "")
        yield Reservation(
            name=pairs["ReservationName"],
            start=start,
            end=end,
            nodes="" if nodes == "(null)" else nodes,
            partition="" if partition == "(null)" else partition,
            is_maintenance="MAINT" in pairs.get("Flags", "").split(","),
        )
