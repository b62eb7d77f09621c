"""Explain why sbatch refused a job: its own words, and what this cluster has."""

from __future__ import annotations

import os

from clusterrun.backends.environment import scrubbed
from clusterrun.errors import ClusterrunError, SubmissionError
from clusterrun.launch.plan import Plan
from clusterrun.shared import shell
from clusterrun.shared.wording import count

SINFO_TIMEOUT_S = 5.0
SITE_RULES = "ask which you may use: sacctmgr show associations user=$USER format=account,qos"

# Words of sbatch, any of them, and what to do; the first match counts.
HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("nvalid account", "nvalid qos", "Access/permission denied", "violates accounting"),
        SITE_RULES,
    ),
    (("unrecognized option", "invalid option"), "check what you passed with --sbatch-arg"),
    (("reservation is invalid",), "list them: scontrol show reservations"),
    (("Invalid feature", "Invalid node name"), "list nodes and features: sinfo -o '%N %f'"),
    (("ependency",), "the job to wait for must exist; give it as afterok:JOBID"),
    (("Invalid --time",), "give --time as minutes, HH:MM:SS or D-HH:MM:SS"),
)


def explained(done: shell.Completed, plan: Plan) -> SubmissionError:
    """Make the error of a refused submission: sbatch's words are its cause."""
    words = done.stderr.strip()
    return SubmissionError(
        "sbatch refused the job",
        cause=words or f"sbatch ended with status {done.rc} and said nothing",
        hint=tuple(_hints(words, plan)),
    )


def _hints(words: str, plan: Plan) -> list[str]:
    if "nvalid partition" in words:
        names = sorted({row[0].rstrip("*") for row in _partitions(None)})
        return [f"partitions here: {', '.join(names)}"] if names else []
    if "node configuration" in words or "can not be satisfied" in words:
        return [*_what_there_is(plan), _what_was_asked(plan)]
    if "time limit" in words.lower():
        return [
            f"partition '{name.rstrip('*')}' allows at most {limit}"
            for name, _, _, _, _, limit in _partitions(plan.directive("partition"))
        ]
    return [hint for parts, hint in HINTS if any(part in words for part in parts)][:1]


def _what_there_is(plan: Plan) -> list[str]:
    rows = _partitions(plan.directive("partition"))
    default = [row for row in rows if row[0].endswith("*")]
    return [
        f"partition '{name.rstrip('*')}' has {count(nodes, 'node')} with "
        f"{'no GPUs' if gres in ('(null)', '') else gres}, "
        f"{cpus} CPUs and {memory} MB"
        for name, nodes, gres, cpus, memory, _ in (default or rows)[:5]
    ]


def _what_was_asked(plan: Plan) -> str:
    asked = f"you asked for {count(plan.nodes, 'node')}"
    return f"{asked} of {plan.gpus_per_node} GPUs" if plan.gpus_per_node else asked


def _partitions(name: str | None) -> list[list[str]]:
    """Ask sinfo for name, nodes, GPUs, CPUs, memory and time limit of one partition, or of all.

    Return nothing if sinfo doesn't answer.
    """
    argv = ["sinfo", "--noheader", "--format=%P|%D|%G|%c|%m|%l"]
    if name:
        argv.append(f"--partition={name}")
    try:
        done = shell.run(argv, env=scrubbed(os.environ), timeout_s=SINFO_TIMEOUT_S, tries=1)
    except ClusterrunError:
        return []
    rows = [line.split("|") for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == 6]
