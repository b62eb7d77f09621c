"""What a Slurm site offers this user: nodes, accounts, and why sbatch refuses a job."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from clusterrun.backends import cache
from clusterrun.backends.slurm.query import SEPARATOR, parse_clock, printed
from clusterrun.backends.slurm.reasons import Use
from clusterrun.errors import SchedulerUnreachableError, SubmissionError, UsageError
from clusterrun.launch.plan import Plan
from clusterrun.shared import shell
from clusterrun.shared.durations import clock
from clusterrun.shared.hostlist import parse_hostlist
from clusterrun.shared.wording import count

_GPUS: Final = re.compile(r"\bgpu:(?:([^:,()]+):)?([0-9]+)")
# What sinfo prints of the partitions that the user may see. The reason comes last: it is free text.
_FIELDS: Final = {
    **{"partition": "%P", "availability": "%a", "limit": "%l", "size": "%s"},
    **{"root_only": "%r", "count": "%D", "state": "%T", "gres": "%G", "cpus": "%c"},
    **{"memory": "%m", "features": "%f", "nodes": "%N", "reason": "%E"},
}


# States of sinfo; the first that matches counts, any other is busy. Marks after a state: "*" does
# not respond, "$" is reserved, "-" is planned, "~" is powered down and starts on demand.
_USES: Final = (
    (r".*\*|(down|drain(ed|ing)|fail(ing)?|error|inval)\b.*", Use.OUT),
    (r".*\$|maint|reserved", Use.RESERVED),
    (r".*-|planned", Use.PLANNED),
    (r"idle~?", Use.IDLE),
    (r"mixed.*", Use.PARTLY),
)


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of a partition with one configuration and state; None means no limit, or unknown.

    `nodes` is a host list, `reason` is why they are down or drained.
    """

    partition: str
    is_default: bool
    is_up: bool
    limit_s: int | None
    most_nodes: int | None
    count: int
    state: str
    gres: str
    cpus: int | None
    memory_mb: int | None
    features: frozenset[str]
    nodes: str
    reason: str

    @property
    def gpus(self) -> tuple[tuple[str, int], ...]:
        """The GPUs of a node, by type ("" if the site names none)."""
        return tuple((kind, int(number)) for kind, number in _GPUS.findall(self.gres))

    @property
    def use(self) -> Use:
        """What the nodes are used for; a state that is not known counts as busy."""
        return next((use for form, use in _USES if re.fullmatch(form, self.state)), Use.BUSY)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the nodes; () if they can't be read."""
        with contextlib.suppress(UsageError):
            return tuple(parse_hostlist(self.nodes))
        return ()


def node_groups(slurm_cluster: str | None) -> list[NodeGroup]:
    """Ask sinfo once about all partitions; reuse an answer of the last 10 s.

    Return nothing if it doesn't answer. Skip lines of another shape (the rest of a reason,
    `CLUSTER: x`).
    """
    wanted = ("--noheader", "--exact", f"--format={SEPARATOR.join(_FIELDS.values())}")
    return parse_sinfo(answer(slurm_cluster, "sinfo", *wanted))


def answer(slurm_cluster: str | None, program: str, *words: str) -> str:
    """Return what a command of Slurm prints, or printed in the last 10 s; "" if it fails."""

    ask = partial(printed, slurm_cluster, program, *words)
    try:
        return cache.through((slurm_cluster or "", program, *words), cache.TTL_S, ask, str)
    except SchedulerUnreachableError:
        return ""


def parse_sinfo(text: str) -> list[NodeGroup]:
    """Parse sinfo's lines.

    >>> line = "gpu*|up|1:00:00|4|no|2|idle|gpu:h100:4(S:0)|64|512000|(null)|n[1-2]|none"
    >>> (group,) = parse_sinfo(line)
    >>> group.partition, group.limit_s, group.most_nodes, group.gpus, group.use.value
    ('gpu', 3600, 4, (('h100', 4),), 'idle')
    """
    rows = (line.split(SEPARATOR, len(_FIELDS) - 1) for line in text.splitlines())
    found = (dict(zip(_FIELDS, row, strict=True)) for row in rows if len(row) == len(_FIELDS))
    return [
        NodeGroup(
            partition=row["partition"].removesuffix("*"),
            is_default=row["partition"].endswith("*"),
            is_up=row["availability"] == "up" and row["root_only"] != "yes",
            limit_s=parse_clock(row["limit"]),
            most_nodes=_number(row["size"].rpartition("-")[2]),
            count=int(row["count"]),
            state=row["state"],
            gres=row["gres"].replace("(null)", ""),
            cpus=_number(row["cpus"]),
            memory_mb=_number(row["memory"]),
            features=frozenset(row["features"].replace("(null)", "").split(",")),
            nodes=row["nodes"],
            reason="" if row["reason"] in ("none", "(null)") else row["reason"],
        )
        for row in found
        if row["count"].isdecimal()
    ]


def _number(text: str) -> int | None:
    digits = text.removesuffix("+")
    return int(digits) if digits.isdecimal() and digits.isascii() else None


def kinds(groups: Iterable[NodeGroup]) -> list[NodeGroup]:
    """Return the nodes of each partition with one configuration as one group, in any state."""
    found: dict[tuple[object, ...], NodeGroup] = {}
    for each in groups:
        kind = (each.partition, each.gres, each.cpus, each.memory_mb)
        before = found[kind].count if kind in found else 0
        found[kind] = dataclasses.replace(each, count=each.count + before)
    return [*found.values()]


def associations(user: str) -> list[tuple[str, str]]:
    """Return the accounts that the user may charge, each with its only partition, or "".

    Return nothing if there is no accounting.
    """
    words = ("show", "assoc", f"user={user}", "format=account,partition", "-nP")
    lines = answer(None, "sacctmgr", *words).splitlines()
    found = (line.partition(SEPARATOR) for line in lines)
    return [(account, partition) for account, _, partition in found if account]


# Why sbatch refuses a job


SITE_RULES = "list what you may use: sacctmgr show associations user=$USER format=account,qos"

# Parts of sbatch's messages, any of which matches, and what to do; the first match wins.
HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("nvalid account", "nvalid qos", "Access/permission denied", "violates accounting"),
        SITE_RULES,
    ),
    (("unrecognized option", "invalid option"), "check what you passed with --sbatch-arg"),
    (("reservation is invalid",), "list them: scontrol show reservations"),
    (("Invalid feature", "Invalid node name"), "list nodes and features: sinfo -o '%N %f'"),
    (("ependency",), "name a job that exists, as afterok:JOBID"),
    (("Invalid --time",), "write --time as minutes, HH:MM:SS or D-HH:MM:SS"),
)

# Parts of sbatch's messages for more nodes, GPUs, CPUs or memory than a partition has.
TOO_MUCH: Final = (
    *("node configuration", "can not be satisfied", "Node count specification"),
    *("partition configuration", "processors requested than permitted"),
)


def refused(done: shell.Completed, plan: Plan) -> SubmissionError:
    """Return the error of a refused submission, with sbatch's message as its cause."""
    words = done.stderr.strip()
    return SubmissionError(
        "sbatch refused the job",
        cause=words or f"sbatch exited with status {done.rc} and no message",
        hint=tuple(_hints(words, plan)),
    )


def _hints(words: str, plan: Plan) -> Iterator[str]:
    groups = kinds(node_groups(plan.directive("clusters")))
    asked = (plan.directive("partition") or "").split(",")
    here = [each for each in groups if each.partition in asked or asked == [""]]
    if "nvalid partition" in words:
        if names := sorted({each.partition for each in groups}):
            yield f"choose one of the partitions here: {', '.join(names)}"
    elif any(part in words for part in TOO_MUCH):
        for each in ([each for each in here if each.is_default] or here)[:5]:
            yield (
                f"partition '{each.partition}' has {count(each.count, 'node')} with "
                f"{each.gres or 'no GPUs'}, {each.cpus} CPUs and {each.memory_mb} MB"
            )
    elif "time limit" in words.lower():
        for name, limit_s in {each.partition: each.limit_s for each in here}.items():
            yield f"partition '{name}' allows at most {clock(limit_s) if limit_s else 'infinite'}"
    else:
        yield from [hint for parts, hint in HINTS if any(part in words for part in parts)][:1]
