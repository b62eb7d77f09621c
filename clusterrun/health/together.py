"""Judge what the nodes of a run of `health.trial` found: alone, and against the others."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from clusterrun.health.compare import differences
from clusterrun.health.reports import GroupReport, NodeReport, Share
from clusterrun.shared.finding import Finding, fail, note, ok, skip
from clusterrun.shared.hostlist import named, natural_key
from clusterrun.shared.wording import count

CLOCK_S: Final = 1.0  # logs of several nodes are hard to compare by eye beyond this
_LEAST_OF_TWO: Final = 0.5  # of two nodes, either may be the slow one
OF_ALL: Final = "net.reduce"  # one node may make it fail on the others
_MEET: Final = "net.meet"
OTHER: Final = "choose a directory that all nodes share with --run-dir"
_TOGETHER: Final = (_MEET, "path.visible", OF_ALL)
_SOURCE: Final = re.compile(r"^\w+: (\[[^]]*\] )?")  # gloo's source file
UNSTARTED: Final = "Slurm could not start the job's script there"
_SILENT: Final = (
    "no report within {:.0f} s: it is stuck or very busy, or the job does not start there"
)
_LEAVE_OUT: Final = "leave it out with --exclude {}, and tell the administrator"
_TRY: Final = "python -c 'import torch; print((torch.ones(9, 9) @ torch.ones(9, 9)).sum())'"


def of_nodes(
    nodes: Sequence[str],
    found: Mapping[str, NodeReport],
    group: GroupReport | None,
    unstarted: Collection[str],
    said: Mapping[str, str],
    waited_s: float,
) -> dict[str, list[Finding]]:
    """Return the checks of each node.

    On `unstarted` Slurm could not start the job; `said`: why nodes did not take part. `waited_s`:
    for all of them.
    """
    shares = group.shares if group else {}
    found = {node: _with_all(report, shares.get(node)) for node, report in found.items()}
    rates = {each: rate for each, report in found.items() if (rate := _rate(report, "cuda"))}
    behind = slow(rates)
    seen, problem = _visible(shares), _reduce_problem(shares)
    checks: dict[str, list[Finding]] = {}
    for node in nodes:
        report = found.get(node)
        if report is None:
            words = UNSTARTED if node in unstarted else said.get(node, "")
            has_joined = node in shares
            checks[node] = [unreported(node, words, waited_s, has_joined=has_joined)]
            continue
        checks[node] = [ok("node.report", "reported")]
        computed = _computed(node, report, behind)
        checks[node] += [*report.checks, computed]
        if group and (share := shares.get(node)):
            is_lost = node in group.lost
            reduced = _reduced(share, problem, has_computed=not computed.fix)
            checks[node] += [_met(len(shares), is_lost=is_lost), seen[node], reduced]
        elif shares:
            checks[node] += [skip(name, "its ranks did not meet the others") for name in _TOGETHER]
    return checks


def unreported(
    node: str, words: str, waited_s: float = 0.0, *, has_joined: bool = False
) -> Finding:
    """Return the failure of a node that did not report; `words`: why, if that is known."""
    hint = f"look at it with: scontrol show node {node}; {_LEAVE_OUT.format(node)}"
    if words and words != UNSTARTED:
        hint = f"mend that, or leave it out with --exclude {node}"
    elif has_joined:
        words = "no report, but it answered the first node: what it writes is not seen here"
        hint = OTHER
    return fail("node.report", words or _SILENT.format(waited_s), hint)


def _with_all(report: NodeReport, share: Share | None) -> NodeReport:
    """Add what the other devices of the node computed."""
    if share is None or report.computed is None:
        return report
    return dataclasses.replace(report, computed={**report.computed, **share.computed})


def _rate(report: NodeReport, kind: str = "") -> float | None:
    """Return the rate of a node's slowest device of a kind."""
    found = (report.computed or {}).items()
    rates = (each.get("tflops") for name, each in found if name.startswith(kind))
    return min((float(rate) for rate in rates if rate is not None), default=None)


def _computed(node: str, report: NodeReport, behind: Mapping[str, float]) -> Finding:
    """Judge the matrix products: their result, and the rate against the other nodes' median."""
    name, found = "node.compute", report.computed
    if found is None:
        return fail(name, "torch did not answer in time", f"try there: {_TRY}")
    if errors := [
        f"{device}: {each['error']}" for device, each in found.items() if "error" in each
    ]:
        return fail(name, errors[0], f"try there: {_TRY}")
    rate = _rate(report) or 0.0
    text = f"a matrix product on {count(len(found), 'device')}: {rate:.3g} TFLOP/s"
    if node in behind:
        text = f"{text}, {behind[node]:.0%} of the median of the other nodes"
        return note(name, text, _LEAVE_OUT.format(node))
    return ok(name, text)


def _met(number: int, *, is_lost: bool) -> Finding:
    if is_lost:
        hint = "look for a process that hangs there, or a link that is cut"
        return fail(_MEET, "it met the others, then it stopped answering", hint)
    if number < 2:
        return skip(_MEET, "no other node is there")
    return ok(_MEET, "met on a port of network.port_range")


def _visible(shares: Mapping[str, Share]) -> dict[str, Finding]:
    """Judge which nodes do not see the files of which others.

    A node that has its directory for itself sees none of the others, and none of them sees it.
    """
    name, most = "path.visible", (len(shares) + 1) // 2
    missed = {node: share.unseen for node, share in shares.items() if share.unseen is not None}
    if len(missed) < 2:
        return {node: skip(name, "no other node looked") for node in shares}
    unseen_by = Counter(node for missing in missed.values() for node in missing)
    hidden = {node for node, times in unseen_by.items() if times >= most}
    where = "in the directory of the runs"
    bad = dict.fromkeys(hidden, f"the others do not see what it writes {where}")
    for node, missing in missed.items():
        if theirs := set(missing) - (hidden if len(missing) < most else set()):
            bad[node] = (
                f"it does not see what {named(sorted(theirs, key=natural_key))} wrote {where}"
            )
    good = ok(name, f"the files of the other nodes are seen {where}")
    well = {node: good if node in missed else skip(name, "it did not look") for node in shares}
    return {**well, **{node: fail(name, text, OTHER) for node, text in bad.items()}}


def _reduce_problem(shares: Mapping[str, Share]) -> str:
    """Return the longest error for all: each node reports how it noticed the same."""
    errors = (share.reduce_error for share in shares.values())
    return _SOURCE.sub("", max(errors, key=len, default=""))


def _reduced(share: Share, problem: str, *, has_computed: bool) -> Finding:
    if share.reduce_error:
        text = f"an all-reduce failed: {problem}"
        hint = "name the interface with --set network.interface=NAME; look for a firewall"
        return fail(OF_ALL, text, hint)
    if share.reduced_s is None:
        return skip(OF_ALL, "not measured" if has_computed else "its matrix product failed")
    return ok(OF_ALL, f"an all-reduce of 4 MiB took {share.reduced_s * 1000:.0f} ms")


def of_group(
    nodes: Sequence[str], found: Mapping[str, NodeReport], group: GroupReport | None
) -> list[Finding]:
    """Return the checks that compare nodes."""
    checks = differences({node: report.facts for node, report in found.items()})
    if group is None:
        is_there = found.keys() & nodes[:1]
        why = (
            "torch does not start on the first node"
            if is_there
            else "the first node did not report"
        )
        return [*checks, skip(_MEET, why)]
    return [*checks, _clock(group.shares)]


def _clock(shares: Mapping[str, Share]) -> Finding:
    name = "same.clock"
    clocks = {node: share.clock_s for node, share in shares.items() if share.clock_s is not None}
    if len(clocks) < 2:
        return skip(name, "there is only one node")
    middle = statistics.median_low(clocks.values())
    ahead = {node: clock_s - middle for node, clock_s in clocks.items()}
    off = {node: seconds for node, seconds in ahead.items() if abs(seconds) > CLOCK_S}
    if not off:
        return ok(name, f"all clocks are within {CLOCK_S:g} s")
    worst = max(off.values(), key=abs)
    side = "ahead of" if worst > 0 else "behind"
    upto = "up to " if len(off) > 1 else ""
    text = f"{named(list(off))}: {upto}{abs(worst):.1f} s {side} the other nodes"
    return note(name, text, "tell the administrator; look there with: chronyc tracking")


def slow(values: Mapping[str, float], least: float = 0.75) -> dict[str, float]:
    """Return the nodes below `least` of the median of the others, with their share of it.

    The slowest comes first. Values that are not finite are left out.

    >>> slow({"n1": 100.0, "n2": 98.0, "n3": 50.0, "n4": 102.0})
    {'n3': 0.5}
    >>> slow({"n1": 100.0, "n2": 70.0})
    {}
    """
    ordered = sorted((value, node) for node, value in values.items() if math.isfinite(value))
    limit = least if len(ordered) > 2 else min(least, _LEAST_OF_TWO)
    found = {}
    for place, (value, node) in enumerate(ordered[: len(ordered) // 2]):
        middle = ordered[_middle_without(place, len(ordered))][0]
        if middle > 0 and value / middle < limit:
            found[node] = value / middle
    return found


def _middle_without(place: int, size: int) -> int:
    """Return the place of the (lower) median of a sorted list's other numbers."""
    middle = (size - 2) // 2
    return middle + (middle >= place)
