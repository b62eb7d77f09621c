"""Judge what the nodes of a smoke job found: each by itself, and against the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from clusterrun.health import storage
from clusterrun.health.check import Check, fail, note, ok, skip
from clusterrun.health.compare import differences, named
from clusterrun.health.medians import slow
from clusterrun.health.reports import GroupReport, NodeReport, Share
from clusterrun.health.storage import StorageRates
from clusterrun.shared.wording import count

LEAST_SENT: Final = 0.4  # of the median: other jobs also send; a port at a lower speed is far below
CLOCK_S: Final = 1.0  # logs of several nodes are hard to compare by eye beyond this
_LEAVE_OUT: Final = "leave it out with --exclude {}, and tell the administrator"


def of_nodes(
    nodes: Sequence[str], found: Mapping[str, NodeReport], group: GroupReport | None, unstarted: str
) -> dict[str, list[Check]]:
    """Return the checks of each node."""
    shares = group.shares if group else {}
    rates = {each: rate for each, report in found.items() if (rate := _rate(report, "cuda"))}
    sent = {node: share.sent for node, share in shares.items() if share.sent}
    checks: dict[str, list[Check]] = {}
    for node in nodes:
        report = found.get(node)
        checks[node] = [_reported(node, report, is_unstarted=node == unstarted)]
        if report is None:
            continue
        checks[node] += report.checks
        checks[node].append(_computed(node, report, slow(rates)))
        if share := shares.get(node):
            checks[node] += _shared(node, share, slow(sent, LEAST_SENT), is_alone=len(shares) < 2)
    return checks


def _reported(node: str, report: NodeReport | None, *, is_unstarted: bool) -> Check:
    name = "node.report"
    if report is not None:
        return ok(name, "reported")
    hint = f"look at it with: scontrol show node {node}; {_LEAVE_OUT.format(node)}"
    if is_unstarted:
        return fail(name, "Slurm could not start the job's script there", hint)
    return fail(name, "no report: it is stuck, or the job's environment does not start there", hint)


def _rate(report: NodeReport, kind: str = "") -> float | None:
    """Return the rate of a node's slowest device of a kind."""
    found = (report.computed or {}).items()
    rates = (each.get("tflops") for name, each in found if name.startswith(kind))
    return min((float(rate) for rate in rates if rate is not None), default=None)


def _computed(node: str, report: NodeReport, behind: Mapping[str, float]) -> Check:
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


_TRY: Final = "python -c 'import torch; print((torch.ones(9, 9) @ torch.ones(9, 9)).sum())'"


def _shared(
    node: str, share: Share, behind: Mapping[str, float], *, is_alone: bool
) -> Iterator[Check]:
    if share.visible is not None:
        yield Check.from_data(share.visible)
    if is_alone:
        yield skip("net.link", "no other node is there")
    elif share.link_error:
        text = f"it cannot send to {share.peer} at {share.link_error}"
        yield fail("net.link", text, f"try there: nc -vz {share.peer} PORT; see --port-range")
    elif share.sent is None:
        yield skip("net.link", "not measured")
    else:
        text = f"{share.sent:,.0f} MB/s to {share.peer} over TCP, all nodes at once"
        if node in behind:
            text = f"{text}: {behind[node]:.0%} of the median of the others"
            yield note("net.link", text, _LEAVE_OUT.format(node))
        else:
            yield ok("net.link", text)
    if share.reduce_error:
        yield fail("net.reduce", f"an all-reduce failed: {share.reduce_error}", _FIND)
    elif share.reduced_s is None:
        yield skip("net.reduce", "not measured")
    else:
        yield ok("net.reduce", f"an all-reduce of 4 MiB took {share.reduced_s * 1000:.0f} ms")


_FIND: Final = "look for net.link above; set NCCL_SOCKET_IFNAME, or --network-interface"


def of_group(found: Mapping[str, NodeReport], group: GroupReport | None) -> list[Check]:
    """Return the checks that compare nodes."""
    checks = differences({node: report.facts for node, report in found.items()})
    if group is None:
        return [*checks, fail("net.meet", "the nodes did not meet", "see node.report above")]
    if group.problem:
        return [*checks, fail("net.meet", group.problem, "see node.report above")]
    together = {node: _rates(share) for node, share in group.shares.items()}
    met = ok("net.meet", f"{count(len(group.shares), 'node')} met on a port of --port-range")
    return [*checks, met, _clock(group.shares), storage.rates(_rates(group.alone), together)]


def _rates(share: Share) -> StorageRates:
    return StorageRates(metadata=share.metadata, read=share.read)


def _clock(shares: Mapping[str, Share]) -> Check:
    name = "same.clock"
    off = {node: share.clock_s for node, share in shares.items() if abs(share.clock_s) > CLOCK_S}
    if len(shares) < 2:
        return skip(name, "there is only one node")
    if not off:
        return ok(name, f"all clocks are within {CLOCK_S:g} s")
    worst = max(off.values(), key=abs)
    side = "ahead of" if worst > 0 else "behind"
    text = f"{named(list(off))}: up to {abs(worst):.1f} s {side} the first node"
    return note(name, text, "tell the administrator; look there with: chronyc tracking")
