"""What a Slurm site offers this user, whether a job fits there, and why sbatch refuses a job."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from clusterrun.backends.slurm.query import SEPARATOR, TTL_S, cached, parse_clock, printed, rows
from clusterrun.backends.slurm.reasons import Use
from clusterrun.errors import SchedulerUnreachableError, SubmissionError, UsageError, shortened
from clusterrun.health.examine import join_some
from clusterrun.launch.plan import Plan
from clusterrun.shared import shell
from clusterrun.shared.amounts import clock
from clusterrun.shared.finding import Finding, fail, note, ok, skip
from clusterrun.shared.hostlist import named, parse_hostlist
from clusterrun.shared.wording import count

REASON_LETTERS: Final = 100
_LIST: Final = "list the partitions: sinfo -s"
_GPUS: Final = re.compile(r"\bgpu:(?:([^:,()]+):)?([0-9]+)")
# What sinfo prints of the partitions that the user may see. The reason comes last: it is free text.
_FIELDS: Final = {
    **{"partition": "%P", "availability": "%a", "limit": "%l", "size": "%s"},
    **{"root_only": "%r", "count": "%D", "state": "%T", "gres": "%G", "cpus": "%c"},
    **{"memory": "%m", "features": "%f", "nodes": "%N", "reason": "%E"},
}

# States of sinfo; the first that matches counts, any other is busy, also nodes that are planned for
# a job ("-"). Marks: "*" does not respond, "$" is reserved, "~" is powered down, starts on demand.
_USES: Final = (
    (r".*\*|(down|drain(ed|ing)|fail(ing)?|error|inval)\b.*", Use.OUT),
    (r".*\$|maint|reserved", Use.RESERVED),
    (r"idle~?", Use.IDLE),
    (r"mixed.*", Use.PARTLY),
)


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of a partition with one configuration and state; None means no limit, or unknown."""

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
    nodes: str  # a host list
    reason: str  # why they are down or drained

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
        return cached((slurm_cluster or "", program, *words), TTL_S, ask, str)
    except SchedulerUnreachableError:
        return ""


def parse_sinfo(text: str) -> list[NodeGroup]:
    """Parse sinfo's lines.

    >>> line = "gpu*|up|1:00:00|4|no|2|idle|gpu:h100:4(S:0)|64|512000|(null)|n[1-2]|none"
    >>> (group,) = parse_sinfo(line)
    >>> group.partition, group.limit_s, group.most_nodes, group.gpus, group.use.value
    ('gpu', 3600, 4, (('h100', 4),), 'idle')
    """
    return [
        NodeGroup(
            partition=row["partition"].removesuffix("*"),
            is_default=row["partition"].endswith("*"),
            is_up=row["availability"] == "up" and row["root_only"] != "yes",
            limit_s=parse_clock(row["limit"]),
            most_nodes=_number(row["size"].rpartition("-")[2]),  # of "1-4"
            count=int(row["count"]),
            state=row["state"],
            gres=row["gres"].replace("(null)", ""),
            cpus=_number(row["cpus"]),
            memory_mb=_number(row["memory"]),
            features=frozenset(row["features"].replace("(null)", "").split(",")),
            nodes=row["nodes"],
            reason="" if row["reason"] in ("none", "(null)") else row["reason"],
        )
        for row in rows(text, _FIELDS)
        if row["count"].isdecimal()
    ]


def _number(text: str) -> int | None:
    digits = text.removesuffix("+")
    return int(digits) if digits.isdecimal() and digits.isascii() else None


def kinds(groups: Iterable[NodeGroup]) -> list[NodeGroup]:
    """Return one group for all nodes of a partition with the same GPUs, CPUs and memory."""
    found: dict[tuple[object, ...], NodeGroup] = {}
    for each in groups:
        kind = (each.partition, each.gres, each.cpus, each.memory_mb)
        before = found[kind].count if kind in found else 0
        # State, features, nodes and reason are those of the last group alone: no caller reads them.
        found[kind] = dataclasses.replace(each, count=each.count + before)
    return [*found.values()]


def associations(user: str) -> list[tuple[str, str]]:
    """Return the user's accounts, each with its only partition, or ""; [] without accounting."""
    words = ("show", "assoc", f"user={user}", "format=account,partition", "-nP")
    found = (line.partition(SEPARATOR) for line in answer(None, "sacctmgr", *words).splitlines())
    return [(account, partition) for account, _, partition in found if account]


# Why sbatch refuses a job

# Patterns of sbatch's messages, and what to do; the first that is found counts.
HINTS: Final = {
    r"nvalid (account|qos)|Access/permission denied|violates accounting": "list what you may use: "
    "sacctmgr show associations user=$USER format=account,qos",
    r"(unrecognized|invalid) option": "check what you passed with --sbatch-arg",
    r"reservation is invalid": "list the reservations: scontrol show reservations",
    r"Invalid (feature|node name)": "list nodes and features: sinfo -o '%N %f'",
    r"ependency": "name an existing job, e.g. afterok:JOBID",
    r"Invalid --time": "write --time as minutes, HH:MM:SS or D-HH:MM:SS",
}

# Of sbatch's messages for more nodes, GPUs, CPUs or memory than a partition has.
TOO_MUCH: Final = (
    r"(node|partition) configuration|can not be satisfied|Node count specification"
    r"|processors requested than permitted"
)


def refused(done: shell.Completed, plan: Plan) -> SubmissionError:
    """Return the error of a refused submission, with sbatch's message as its cause."""
    words = done.stderr.strip()
    cause = words or f"sbatch exited with status {done.rc} and no message"
    return SubmissionError("sbatch refused the job", cause=cause, hint=tuple(_hints(words, plan)))


def _hints(words: str, plan: Plan) -> Iterator[str]:
    """Yield what to do by sbatch's message: what the site has and allows, or a fixed hint."""
    groups = kinds(node_groups(plan.directive("clusters")))
    asked = plan.directive("partition")
    here = [each for each in groups if not asked or each.partition in asked.split(",")]
    if "nvalid partition" in words:
        if names := sorted({each.partition for each in groups}):
            yield f"choose one of the partitions here: {', '.join(names)}"
    elif re.search(TOO_MUCH, words):
        for each in ([group for group in here if group.is_default] or here)[:5]:
            yield (
                f"partition '{each.partition}' has {count(each.count, 'node')} with "
                f"{each.gres or 'no GPUs'}, {each.cpus} CPUs and {each.memory_mb} MB"
            )
    elif "time limit" in words.lower():
        for name, limit in {each.partition: each.limit_s for each in here}.items():
            yield f"the time limit of partition '{name}' is {clock(limit) if limit else 'infinite'}"
    else:
        yield from [hint for form, hint in HINTS.items() if re.search(form, words)][:1]


# Checks of the site, and of a job's request


def controller(plan: Plan) -> Finding:
    """Check that slurmctld answers."""
    name, later = "slurm.controller", "try again later; check slurmctld with: scontrol ping"
    try:
        lines = printed(plan.directive("clusters"), "scontrol", "ping").splitlines()
    except SchedulerUnreachableError as error:
        return fail(name, f"slurmctld does not answer: {error.cause}", error.hint or later)
    up = [line for line in lines if line.endswith(" UP")]
    if not up:
        return fail(name, lines[0] if lines else "scontrol ping printed nothing", later)
    return ok(name, up[0])


def _partitions(plan: Plan) -> dict[str, list[NodeGroup]]:
    """Return the nodes of the partitions that the job names, or of the default partition."""
    every, asked = node_groups(plan.directive("clusters")), plan.directive("partition")
    default = sorted({group.partition for group in every if group.is_default})
    names = asked.split(",") if asked else default
    return {name: [group for group in every if group.partition == name] for name in names}


def partition(plan: Plan) -> Finding:
    """Check that the partition of the job exists and is up."""
    name, here = "slurm.partition", _partitions(plan)
    known = sorted({group.partition for group in node_groups(plan.directive("clusters"))})
    if not known:
        return skip(name, "sinfo did not answer")
    if not here:
        text = "there is no default partition"
        return fail(name, text, f"name one with --partition: {', '.join(known)}")
    if missing := [each for each, groups in here.items() if not groups]:
        text = f"there is no partition '{missing[0]}'"
        return fail(name, text, f"choose one with --partition: {', '.join(known)}")
    up = [group for groups in here.values() for group in groups if group.is_up]
    names = ", ".join(here)
    if not up:
        return fail(name, f"partition {names} is down", _LIST)
    return ok(name, f"{names} is up, with {count(sum(group.count for group in up), 'node')}")


def nodes(plan: Plan) -> Finding:
    """Count the nodes of the job's partition that are down or drained, with their reasons."""
    name, here, wanted = "slurm.nodes", _partitions(plan), _nodes_requested(plan)
    groups = [group for each in here.values() for group in each]
    if not groups:
        return skip(name, "the partition is unknown")
    every, out = _hosts(groups), _hosts(group for group in groups if group.use is Use.OUT)
    names, hint = ",".join(here), f"read the reasons: sinfo -R -p {','.join(here)}"
    if not out:
        return ok(name, f"0 of {count(len(every), 'node')} in {names} are down or drained")
    left = max(len(_hosts(each) - out) for each in here.values())
    text = f"{len(out)} of {count(len(every), 'node')} are down or drained: {_reasons(groups)}"
    if left < wanted <= len(every):  # `limits` reports a partition that is too small
        fewer = f"request fewer with --nodes {left}, or wait; " if left else "wait; "
        return fail(name, f"{text}; {left} are left for a job of {wanted}", fewer + hint)
    return note(name, text, hint)


def _hosts(groups: Iterable[NodeGroup]) -> set[str]:
    return {host for group in groups for host in group.hosts}


def _reasons(groups: Iterable[NodeGroup]) -> str:
    """Return why nodes are down or drained, the reason of most nodes first."""
    found: dict[str, set[str]] = defaultdict(set)
    for group in groups:
        if group.use is Use.OUT:
            text = " ".join(group.reason.split()) or group.state
            found[shortened(text, REASON_LETTERS)].update(group.hosts)
    ordered = sorted(found.items(), key=lambda each: (-len(each[1]), each[0]))
    return join_some([f"{text} ({named([*hosts])})" for text, hosts in ordered], 3)


def limits(plan: Plan) -> Finding:
    """Compare the nodes, time and GPUs of the job with what its partition allows."""
    name, here = "slurm.limits", _partitions(plan)
    if not any(here.values()):
        return skip(name, "the partition is unknown")
    excess = {each: list(_excess(plan, groups, each)) for each, groups in here.items()}
    allowing = [each for each, faults in excess.items() if not faults]
    if not allowing:
        first_partition, *_ = excess.values()
        text, hint = first_partition[0]
        return fail(name, text, hint)
    asked = count(_nodes_requested(plan), "node")
    return ok(name, f"{allowing[0]} allows {asked}, and the time and GPUs of this job")


def _nodes_requested(plan: Plan) -> int:
    text = plan.directive("nodes") or ""
    return int(text) if text.isdecimal() else plan.nodes


def _excess(plan: Plan, here: list[NodeGroup], name: str) -> Iterator[tuple[str, str]]:
    """Yield what the job requests beyond what a partition has or allows, each with a hint."""
    wanted, has = _nodes_requested(plan), sum(group.count for group in here)
    most_nodes = here[0].most_nodes if here else None
    most = min(filter(None, (has, most_nodes)), default=0)  # None and 0 are unknown
    if wanted > most:
        text = f"{wanted} nodes are requested; partition {name} allows {most}"
        yield text, f"request fewer with --nodes {most}" if most else _LIST
    limit = here[0].limit_s if here else None
    if limit and plan.time_minutes * 60 > limit:
        asked, allowed = clock(plan.time_minutes * 60), clock(limit)
        text = f"{asked} is requested; partition {name} allows {allowed}"
        yield text, f"request less with --time {allowed}"
    gpus = max((sum(number for _, number in group.gpus) for group in here), default=0)
    requests_gpus = any(line.name in ("gpus-per-node", "gres") for line in plan.directives)
    if requests_gpus and plan.gpus_per_node > gpus:
        text = f"{plan.gpus_per_node} GPUs per node are requested; nodes of {name} have {gpus}"
        yield text, f"request fewer with --gpus-per-node {gpus}" if gpus else _LIST
