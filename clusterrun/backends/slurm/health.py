"""Checks of a Slurm site, and of a job's request against what it offers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from clusterrun.backends.slurm.query import printed
from clusterrun.backends.slurm.reasons import Use
from clusterrun.backends.slurm.site import NodeGroup, node_groups
from clusterrun.errors import SchedulerUnreachableError, shortened
from clusterrun.health.compare import some
from clusterrun.launch.plan import Plan
from clusterrun.shared.durations import clock
from clusterrun.shared.finding import Finding, fail, note, ok, skip
from clusterrun.shared.hostlist import named
from clusterrun.shared.wording import count

NHC: Final = "NHC:"
REASON_LETTERS: Final = 100
_LIST: Final = "list the partitions: sinfo -s"


@dataclass
class Site:
    """The partitions of Slurm, for a job."""

    plan: Plan

    @cached_property
    def groups(self) -> list[NodeGroup]:
        """The nodes of all partitions."""
        return node_groups(self.plan.directive("clusters"))

    @cached_property
    def partitions(self) -> list[str]:
        """The partitions that the job may run in: those it names, or the default one."""
        if named := self.plan.directive("partition"):
            return named.split(",")
        return sorted({group.partition for group in self.groups if group.is_default})


def controller(plan: Plan) -> Finding:
    """Ask whether slurmctld answers."""
    name, later = "slurm.controller", "try again later; look at it with: scontrol ping"
    try:
        lines = printed(plan.directive("clusters"), "scontrol", "ping").splitlines()
    except SchedulerUnreachableError as error:
        return fail(name, f"slurmctld does not answer: {error.cause}", error.hint or later)
    up = [line for line in lines if line.endswith(" UP")]
    if not up:
        return fail(name, lines[0] if lines else "scontrol ping printed nothing", later)
    if down := [line for line in lines if line.endswith(" DOWN")]:
        return note(
            name, f"{up[0]}, but {down[0]}", "jobs are not affected; tell the administrator"
        )
    return ok(name, up[0])


def partition(site: Site) -> Finding:
    """Look for the partition of the job, and whether it is up."""
    name = "slurm.partition"
    if not site.groups:
        return skip(name, "sinfo did not answer")
    known = sorted({group.partition for group in site.groups})
    if not site.partitions:
        text = "there is no default partition"
        return fail(name, text, f"name one with --partition: {', '.join(known)}")
    if missing := [each for each in site.partitions if each not in known]:
        text = f"there is no partition '{missing[0]}'"
        return fail(name, text, f"choose one with --partition: {', '.join(known)}")
    up = [group for group in _groups(site) if group.is_up]
    named = ", ".join(site.partitions)
    if not up:
        return fail(name, f"partition {named} is down", _LIST)
    return ok(name, f"{named} is up, with {count(sum(group.count for group in up), 'node')}")


def _groups(site: Site) -> list[NodeGroup]:
    return [group for group in site.groups if group.partition in site.partitions]


def nodes(site: Site) -> Finding:
    """Count the nodes of the job's partition that are down or drained, with their reasons."""
    name, groups, wanted = "slurm.nodes", _groups(site), _nodes(site.plan)
    if not groups:
        return skip(name, "the partition is unknown")
    every, out = _hosts(groups), _hosts(group for group in groups if group.use is Use.OUT)
    partition = ",".join(site.partitions)
    if not out:
        return ok(name, f"no node of {partition} is down or drained, of {len(every)}")
    left = max(len(_hosts(x for x in groups if x.partition == p) - out) for p in site.partitions)
    text = f"{len(out)} of {count(len(every), 'node')} are down or drained: {_reasons(groups)}"
    if left < wanted <= len(every):
        text = f"{text}; {left} are left for a job of {wanted}"
        fewer = f"request fewer with --nodes {left}, or wait: " if left else "wait: "
        return fail(name, text, f"{fewer}sinfo -R -p {partition}")
    return note(name, text, f"look at the reasons with: sinfo -R -p {partition}")


def _hosts(groups: Iterable[NodeGroup]) -> set[str]:
    return {host for group in groups for host in group.hosts}


def _reasons(groups: Iterable[NodeGroup]) -> str:
    """Return why nodes are down or drained, the reason of most nodes first.

    That of the site's health check (LBNL NHC) is named as such.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for group in groups:
        if group.use is Use.OUT:
            origin = "the site's health check: " * group.reason.startswith(NHC)
            text = " ".join(group.reason.removeprefix(NHC).split()) or group.state
            found[f"{origin}{shortened(text, REASON_LETTERS)}"].update(group.hosts)
    ordered = sorted(found.items(), key=lambda each: (-len(each[1]), each[0]))
    return some([f"{text} ({named([*hosts])})" for text, hosts in ordered], 3)


def limits(site: Site) -> Finding:
    """Compare the nodes, time and GPUs of the job with what its partition allows."""
    name, groups = "slurm.limits", _groups(site)
    if not groups:
        return skip(name, "the partition is unknown")
    found = {each: list(_excess(site.plan, groups, each)) for each in site.partitions}
    if all(found.values()):
        text, hint = next(iter(found.values()))[0]
        return fail(name, text, hint)
    fits = next(each for each, faults in found.items() if not faults)
    asked = count(_nodes(site.plan), "node")
    return ok(name, f"{fits} allows {asked}, and the time and GPUs of this job")


def _nodes(plan: Plan) -> int:
    text = plan.directive("nodes") or ""
    return int(text) if text.isdecimal() else plan.nodes


def _excess(plan: Plan, groups: list[NodeGroup], name: str) -> Iterator[tuple[str, str]]:
    """Yield what the job asks beyond a partition, with a hint."""
    here = [group for group in groups if group.partition == name]
    nodes, wanted = sum(group.count for group in here), _nodes(plan)
    most = min(filter(None, (nodes, here[0].most_nodes if here else None)), default=0)
    if wanted > most:
        text = f"{wanted} nodes are requested; partition {name} allows {most}"
        yield text, f"request fewer with --nodes {most}" if most else _LIST
    limit = here[0].limit_s if here else None
    if limit and plan.time_minutes * 60 > limit:
        asked, allowed = clock(plan.time_minutes * 60), clock(limit)
        text = f"{asked} is requested; partition {name} allows {allowed}"
        yield text, f"request less with --time {allowed}"
    gpus = max((sum(number for _, number in group.gpus) for group in here), default=0)
    is_asked = any(line.name in ("gpus-per-node", "gres") for line in plan.directives)
    if is_asked and plan.gpus_per_node > gpus:
        text = f"{plan.gpus_per_node} GPUs per node are requested; nodes of {name} have {gpus}"
        yield text, f"request fewer with --gpus-per-node {gpus}" if gpus else _LIST
