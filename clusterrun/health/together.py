"""What the nodes of a run of `health.trial` found, a file for each: alone, and together."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clusterrun.health.compare import differences
from clusterrun.shared.files import read_json, write_whole
from clusterrun.shared.finding import Finding, fail, note, ok, skip
from clusterrun.shared.typed import decoded
from clusterrun.shared.wording import count

DIRECTORY: Final = "health"  # of the reports, in the run directory
_LEAST_OF_TWO: Final = 0.5  # of two nodes, either may be the slow one
OF_ALL: Final = "net.reduce"  # one node may make it fail on the others
_MEET: Final = "net.meet"
OTHER: Final = "choose a directory that all nodes share with --run-dir"
_SOURCE: Final = re.compile(r"^\w+: (\[[^]]*\] )?")  # gloo's source file
UNSTARTED: Final = "Slurm could not start the job's script there"
_SILENT: Final = (
    "no report within {:.0f} s: it is stuck or very busy, or the job does not start there"
)
_LEAVE_OUT: Final = "leave it out with --exclude {}, and tell the administrator"
_TRY: Final = "python -c 'import torch; print((torch.ones(9, 9) @ torch.ones(9, 9)).sum())'"


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What a node found. `is_done`: its script ends.

    `computed`: by device; None until it has computed. `has_measured`: with the others, after they
    met. `reduced_s`: the time of an all-reduce; `reduce_error` if it failed. Only the first node
    knows which nodes have `met`; None until then.
    """

    node: str
    checks: tuple[Finding, ...]
    facts: Mapping[str, str]
    computed: Mapping[str, Mapping[str, Any]] | None = None
    has_measured: bool = False
    reduced_s: float | None = None
    reduce_error: str = ""
    met: tuple[str, ...] | None = None
    is_done: bool = False


def write_node(run_dir: Path, report: NodeReport) -> None:
    """Write what a node found so far. Raises OSError."""
    directory = run_dir / DIRECTORY
    directory.mkdir(mode=0o700, exist_ok=True)
    write_whole(directory / f"{report.node}.json", json.dumps(dataclasses.asdict(report)))


def read_nodes(run_dir: Path) -> dict[str, NodeReport]:
    """Return the nodes' reports; leave out damaged ones."""
    found: dict[str, NodeReport] = {}
    for path in sorted((run_dir / DIRECTORY).glob("*.json")):
        try:
            found[path.stem] = decoded(NodeReport, {**(read_json(path) or {}), "node": path.stem})
        except ValueError:
            continue
    return found


def of_nodes(
    nodes: Sequence[str],
    found: Mapping[str, NodeReport],
    met: Collection[str] | None,
    unstarted: Collection[str],
    said: Mapping[str, str],
    waited_s: float,
) -> dict[str, list[Finding]]:
    """Return the checks of each node.

    `met`: the nodes that did so; None if none could. On `unstarted` Slurm could not start the job;
    `said`: why nodes did not take part. `waited_s`: for all of them.
    """
    rates = {each: rate for each, report in found.items() if (rate := _rate(report, "cuda"))}
    behind = slow(rates)
    errors = (report.reduce_error for report in found.values())
    problem = _SOURCE.sub("", max(errors, key=len, default=""))  # each noticed the same
    checks: dict[str, list[Finding]] = {}
    for node in nodes:
        report = found.get(node)
        if report is None:
            words = UNSTARTED if node in unstarted else said.get(node, "")
            has_joined = node in (met or ())
            checks[node] = [unreported(node, words, waited_s, has_joined=has_joined)]
            continue
        computed = _computed(node, report, behind)
        checks[node] = [ok("node.report", "reported"), *report.checks, computed]
        if met is not None:
            checks[node] += _joint(report, met, problem, has_computed=not computed.fix)
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


def _joint(
    report: NodeReport, met: Collection[str], problem: str, *, has_computed: bool
) -> list[Finding]:
    """Judge what a node did with the others."""
    if report.node not in met:
        return [skip(name, "its ranks did not meet the others") for name in (_MEET, OF_ALL)]
    if not report.has_measured:
        hint = "look for a process that hangs there, or a link that is cut"
        lost = fail(_MEET, "it met the others, then it stopped answering", hint)
        return [lost, skip(OF_ALL, "not measured")]
    well = ok(_MEET, "met on a port of network.port_range")
    own = well if len(met) > 1 else skip(_MEET, "no other node is there")
    if report.reduce_error:
        hint = "name the interface with --set network.interface=NAME; look for a firewall"
        return [own, fail(OF_ALL, f"an all-reduce failed: {problem}", hint)]
    if report.reduced_s is None:
        return [own, skip(OF_ALL, "not measured" if has_computed else "its matrix product failed")]
    text = f"an all-reduce of 4 MiB took {report.reduced_s * 1000:.0f} ms"
    return [own, ok(OF_ALL, text)]


def of_group(
    nodes: Sequence[str], found: Mapping[str, NodeReport], met: Collection[str] | None
) -> list[Finding]:
    """Return the checks that compare nodes."""
    checks = differences({node: report.facts for node, report in found.items()})
    is_there = found.keys() & nodes[:1]
    why = f"{'torch does not start on' if is_there else 'no report from'} the first node"
    return checks if met is not None else [*checks, skip(_MEET, why)]


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
        others = [other for other, _ in (*ordered[:place], *ordered[place + 1 :])]
        middle = others[(len(others) - 1) // 2]
        if middle > 0 and value / middle < limit:
            found[node] = value / middle
    return found
