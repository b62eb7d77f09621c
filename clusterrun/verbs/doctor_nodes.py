"""The checks of `doctor --nodes`: what its run found, as one list."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from clusterrun.health.compare import merged, to_exclude
from clusterrun.health.together import OF_ALL, UNSTARTED, of_group, of_nodes, unreported
from clusterrun.node.recovery.printed import last_reason, last_word, reason_of
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.finding import Finding, Severity, fail
from clusterrun.shared.hostlist import fold_hosts
from clusterrun.verbs.doctor import Probe, Subject, examine
from clusterrun.verbs.smoke import Smoke

HERE: Final = ("config.", "env.", "python.", "slurm.", "path.runs")


def examine_here(job: Subject, probes: Mapping[str, Probe]) -> list[Finding]:
    """Run the checks that concern this machine; the nodes run the others.

    Whether they see the directory of the runs will be known: a guess is only noted.
    """
    found = examine(job, {name: each for name, each in probes.items() if name.startswith(HERE)})
    return [
        dataclasses.replace(each, severity=Severity.NOTE)
        if each.id == "path.runs" and each.severity is Severity.FAIL
        else each
        for each in found
    ]


def findings(smoke: Smoke) -> tuple[list[Finding], str]:
    """Return what the nodes found, and a host list of those to leave out."""
    output = RunPaths(root=smoke.run_dir).batch_output
    if smoke.blocked:
        text = f"job {smoke.job_id} does not start: {smoke.blocked}"
        hint = "list the nodes with sinfo -N -l; request others, or fewer with --nodes"
        return _without_nodes(smoke, text, hint)
    if smoke.end is not None:
        reason = last_reason(output, 0, smoke.nodes) or last_word(output, or_any=True)
        why = reason or "no node has reported"
        text = f"job {smoke.job_id} is {smoke.end.value}: {why}"
        hint = f"read its output: clusterrun logs {smoke.job_id} --stream batch"
        return _without_nodes(smoke, text, hint)
    said = {node: reason_of(output, node) for node in smoke.nodes if node not in smoke.found}
    by_node = of_nodes(smoke.nodes, smoke.found, smoke.met, smoke.unstarted, said, smoke.waited_s)
    group = of_group(smoke.nodes, smoke.found, smoke.met)
    reports = {node: found[:1] for node, found in by_node.items()}
    others = {node: found[1:] for node, found in by_node.items() if node in smoke.found}
    own = {node: [each for each in found if each.id != OF_ALL] for node, found in by_node.items()}
    return [*merged(reports), *merged(others), *group], to_exclude(own)


def _without_nodes(smoke: Smoke, text: str, hint: str) -> tuple[list[Finding], str]:
    """Return why no node reported, and the nodes on which an earlier job could not start."""
    unstarted = [
        dataclasses.replace(unreported(node, UNSTARTED), nodes=(node,)) for node in smoke.unstarted
    ]
    return [*unstarted, fail("node.report", text, hint)], fold_hosts(smoke.unstarted)
