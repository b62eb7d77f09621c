"""Explain why sbatch refused a job, with its own message and what this cluster has."""

from __future__ import annotations

from typing import Final

from clusterrun.backends.slurm.site import partition_rows
from clusterrun.errors import SubmissionError
from clusterrun.launch.plan import Plan
from clusterrun.shared import shell
from clusterrun.shared.wording import count

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


def explained(done: shell.Completed, plan: Plan) -> SubmissionError:
    """Return the error of a refused submission, with sbatch's message as its cause."""
    words = done.stderr.strip()
    return SubmissionError(
        "sbatch refused the job",
        cause=words or f"sbatch exited with status {done.rc} and no message",
        hint=tuple(_hints(words, plan)),
    )


def _hints(words: str, plan: Plan) -> list[str]:
    if "nvalid partition" in words:
        names = sorted({row.name for row in partition_rows()})
        return [f"choose one of the partitions here: {', '.join(names)}"] if names else []
    if any(part in words for part in TOO_MUCH):
        return [*_what_there_is(plan), _what_was_asked(plan)]
    if "time limit" in words.lower():
        return [
            f"partition '{row.name}' allows at most {row.limit}"
            for row in partition_rows(plan.directive("partition"))
        ]
    return [hint for parts, hint in HINTS if any(part in words for part in parts)][:1]


def _what_there_is(plan: Plan) -> list[str]:
    rows = partition_rows(plan.directive("partition"))
    default = [row for row in rows if row.is_default]
    return [
        f"partition '{row.name}' has {count(row.nodes, 'node')} with {row.gres or 'no GPUs'}, "
        f"{row.cpus} CPUs and {row.memory_mb} MB"
        for row in (default or rows)[:5]
    ]


def _what_was_asked(plan: Plan) -> str:
    memory = plan.directive("mem")
    request = plan.directive("gpus-per-node") or plan.directive("gres") or ""
    kind = request.removeprefix("gpu:").rpartition(":")[0]
    of_kind = f" of type {kind}" if kind else ""
    each = [f"{count(plan.gpus_per_node, 'GPU')}{of_kind}"] if plan.gpus_per_node else []
    each += [f"{memory} of memory"] if memory else []
    asked = f"you requested {count(plan.nodes, 'node')}"
    return f"{asked} with {' and '.join(each)} each" if each else asked
