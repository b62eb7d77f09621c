"""Judge what the nodes of a smoke job found: alone, and against the others."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from clusterrun.health import storage
from clusterrun.health.compare import differences
from clusterrun.health.medians import slow
from clusterrun.health.reports import GroupReport, NodeReport, Share
from clusterrun.health.storage import OTHER, StorageRates
from clusterrun.shared.finding import Finding, fail, note, ok, skip
from clusterrun.shared.hostlist import named
from clusterrun.shared.wording import count

LEAST_SENT: Final = 0.4  # of the median: other jobs also send; a port at a lower speed is far below
CLOCK_S: Final = 1.0  # logs of several nodes are hard to compare by eye beyond this
OF_ALL: Final = "net.reduce"  # one node may make it fail on the others
_MEET: Final = "net.meet"
_TOGETHER: Final = ("path.visible", "net.link", OF_ALL)
_SOURCE: Final = re.compile(r"^\w+: (\[[^]]*\] )?")  # gloo's source file
UNSTARTED: Final = "Slurm could not start the job's script there"
_SILENT: Final = (
    "no report within {:.0f} s: it is stuck, or the job's environment does not start there"
)
_LEAVE_OUT: Final = "leave it out with --exclude {}, and tell the administrator"
_TRY: Final = "python -c 'import torch; print((torch.ones(9, 9) @ torch.ones(9, 9)).sum())'"


def of_nodes(
    nodes: Sequence[str],
    found: Mapping[str, NodeReport],
    group: GroupReport | None,
    unstarted: str,
    said: Mapping[str, str],
    waited_s: float,
) -> dict[str, list[Finding]]:
    """Return the checks of each node.

    On `unstarted` Slurm could not start the job; `said`: why nodes did not take part. `waited_s`:
    for all of them.
    """
    shares = group.shares if group else {}
    rates = {each: rate for each, report in found.items() if (rate := _rate(report, "cuda"))}
    behind = slow(rates)
    seen, links, problem = _visible(shares), _links(shares), _reduce_problem(shares)
    checks: dict[str, list[Finding]] = {}
    for node in nodes:
        report = found.get(node)
        if report is None:
            words = UNSTARTED if node == unstarted else said.get(node, "")
            has_joined = node in shares
            checks[node] = [unreported(node, words, waited_s, has_joined=has_joined)]
            continue
        checks[node] = [ok("node.report", "reported")]
        computed = _computed(node, report, behind)
        checks[node] += [*(each for each in report.checks if group or each.id != _MEET), computed]
        if group and (share := shares.get(node)):
            is_lost = node in group.lost
            reduced = _reduced(share, problem, has_computed=not computed.fix)
            checks[node] += [_met(len(shares), is_lost=is_lost), seen[node], links[node], reduced]
        elif shares:
            checks[node] += [skip(name, "it did not meet the others") for name in _TOGETHER]
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
    name = "path.visible"
    if len(shares) < 2:
        return {node: skip(name, "no other node is there") for node in shares}
    missed = {node: share.unseen for node, share in shares.items() if share.unseen is not None}
    return {
        **{node: skip(name, "not measured") for node in shares},
        **storage.visible(missed, len(shares)),
        **{
            node: fail(name, f"it cannot write there: {share.store_error}", OTHER)
            for node, share in shares.items()
            if share.store_error
        },
    }


def _links(shares: Mapping[str, Share]) -> dict[str, Finding]:
    name = "net.link"
    if len(shares) < 2:
        return {node: skip(name, "no other node is there") for node in shares}
    behind = _slow_ends(shares)
    found = {node: _link(node, share, behind) for node, share in shares.items()}
    first = next(iter(shares))
    for node, share in shares.items():
        if not share.link_error:
            continue
        # All nodes have reached the first one. Another that is not reached is at fault itself.
        end, text = node, f"it cannot send to {share.peer} at {share.link_error}"
        if share.peer != first:
            end, text = share.peer, f"{node} cannot send to it at {share.link_error}"
        host, _, port = share.link_error.rpartition(": ")[0].rpartition(":")
        hint = (
            f"try on {node}: nc -vz {host} {port}; choose ports: --set network.port_range=LOW-HIGH"
        )
        found[end] = fail(name, text, hint)
    return found


def _link(node: str, share: Share, behind: Mapping[str, float]) -> Finding:
    if share.sent is None:
        return skip("net.link", "not measured")
    text = f"{share.sent:,.0f} MB/s to {share.peer} over TCP, all nodes at once"
    if node in behind:
        text = f"{behind[node]:.0%} of the median of the others; {text}"
        return note("net.link", text, _LEAVE_OUT.format(node))
    return ok("net.link", text)


def _slow_ends(shares: Mapping[str, Share]) -> dict[str, float]:
    """Return the nodes with a slow link, and its rate as a share of the others' median.

    A node that receives slowly also sends slowly if its own link is the slow one.
    """
    sent = {node: share.sent for node, share in shares.items() if share.sent}
    behind = slow(sent, LEAST_SENT)
    found: dict[str, float] = {}
    for node, part in behind.items():
        peer = shares[node].peer
        end = peer if peer in behind else node
        found[end] = min(part, found.get(end, part))
    return found


def _reduce_problem(shares: Mapping[str, Share]) -> str:
    """Return the longest error for all: each node reports how it noticed the same."""
    errors = (share.reduce_error for share in shares.values())
    return _SOURCE.sub("", max(errors, key=len, default=""))


def _reduced(share: Share, problem: str, *, has_computed: bool) -> Finding:
    if share.reduce_error:
        text = f"an all-reduce failed: {problem}"
        hint = "look for net.link above; name the interface with --set network.interface=NAME"
        return fail(OF_ALL, text, hint)
    if share.reduced_s is None:
        return skip(OF_ALL, "not measured" if has_computed else "its matrix product failed")
    return ok(OF_ALL, f"an all-reduce of 4 MiB took {share.reduced_s * 1000:.0f} ms")


def of_group(
    nodes: Sequence[str], found: Mapping[str, NodeReport], group: GroupReport | None
) -> list[Finding]:
    """Return the checks that compare nodes."""
    checks = differences({node: report.facts for node, report in found.items()})
    if group is None and not found.keys() & nodes[:1]:
        return [*checks, skip(_MEET, "the first node did not report")]
    if group is None or group.problem:
        problem = group.problem if group else "the nodes did not meet"
        return [*checks, fail(_MEET, problem, "choose ports: --set network.port_range=LOW-HIGH")]
    together = {node: _rates(share) for node, share in group.shares.items()}
    return [*checks, _clock(group.shares), storage.rates(_rates(group.alone), together)]


def _rates(share: Share) -> StorageRates:
    return StorageRates(metadata=share.metadata, read=share.read)


def _clock(shares: Mapping[str, Share]) -> Finding:
    name = "same.clock"
    if len(shares) < 2:
        return skip(name, "there is only one node")
    middle = statistics.median_low(share.clock_s for share in shares.values())
    ahead = {node: share.clock_s - middle for node, share in shares.items()}
    off = {node: seconds for node, seconds in ahead.items() if abs(seconds) > CLOCK_S}
    if not off:
        return ok(name, f"all clocks are within {CLOCK_S:g} s")
    worst = max(off.values(), key=abs)
    side = "ahead of" if worst > 0 else "behind"
    upto = "up to " if len(off) > 1 else ""
    text = f"{named(list(off))}: {upto}{abs(worst):.1f} s {side} the other nodes"
    return note(name, text, "tell the administrator; look there with: chronyc tracking")
