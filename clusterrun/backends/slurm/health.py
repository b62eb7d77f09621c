"""Checks of a Slurm site, and of a job's request against what it offers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
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


def _partitions(plan: Plan) -> dict[str, list[NodeGroup]]:
    """Return the nodes of the partitions that the job may run in: those it names, or the default.

    Slurm is asked once for all checks.
    """
    every, asked = node_groups(plan.directive("clusters")), plan.directive("partition")
    default = sorted({group.partition for group in every if group.is_default})
    names = asked.split(",") if asked else default
    return {name: [group for group in every if group.partition == name] for name in names}


def partition(plan: Plan) -> Finding:
    """Look for the partition of the job, and whether it is up."""
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
    named = ", ".join(here)
    if not up:
        return fail(name, f"partition {named} is down", _LIST)
    return ok(name, f"{named} is up, with {count(sum(group.count for group in up), 'node')}")


def nodes(plan: Plan) -> Finding:
    """Count the nodes of the job's partition that are down or drained, with their reasons."""
    name, here, wanted = "slurm.nodes", _partitions(plan), _nodes(plan)
    groups = [group for each in here.values() for group in each]
    if not groups:
        return skip(name, "the partition is unknown")
    every, out = _hosts(groups), _hosts(group for group in groups if group.use is Use.OUT)
    partition = ",".join(here)
    if not out:
        return ok(name, f"no node of {partition} is down or drained, of {len(every)}")
    left = max(len(_hosts(each) - out) for each in here.values())
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


def limits(plan: Plan) -> Finding:
    """Compare the nodes, time and GPUs of the job with what its partition allows."""
    name, here = "slurm.limits", _partitions(plan)
    if not any(here.values()):
        return skip(name, "the partition is unknown")
    found = {each: list(_excess(plan, groups, each)) for each, groups in here.items()}
    if all(found.values()):
        text, hint = next(iter(found.values()))[0]
        return fail(name, text, hint)
    fits = next(each for each, faults in found.items() if not faults)
    asked = count(_nodes(plan), "node")
    return ok(name, f"{fits} allows {asked}, and the time and GPUs of this job")


def _nodes(plan: Plan) -> int:
    text = plan.directive("nodes") or ""
    return int(text) if text.isdecimal() else plan.nodes


def _excess(plan: Plan, here: list[NodeGroup], name: str) -> Iterator[tuple[str, str]]:
    """Yield what the job asks beyond a partition, with a hint."""
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
