"""What a Slurm site offers this user: partitions, accounts, and why sbatch refuses a job."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from clusterrun.backends.environment import scrubbed
from clusterrun.errors import ClusterrunError, SubmissionError, UsageError
from clusterrun.launch.plan import Plan
from clusterrun.shared import shell
from clusterrun.shared.durations import parse_slurm_minutes
from clusterrun.shared.wording import count

TIMEOUT_S: Final = 5.0
_GPUS: Final = re.compile(r"\bgpu:(?:([^:,()]+):)?([0-9]+)")
_PARTITION_FIELDS: Final = ("%P", "%D", "%G", "%c", "%m", "%l")  # as PartitionRow


def gpus_of(gres: str) -> tuple[tuple[str, int], ...]:
    """Return the GPUs of a node, by type ("" if the site names none)."""
    return tuple((kind, int(number)) for kind, number in _GPUS.findall(gres))


@dataclass(frozen=True, kw_only=True)
class PartitionRow:
    """A partition's nodes of one kind; texts are as sinfo prints them."""

    name: str
    is_default: bool
    nodes: int
    gres: str
    cpus: str
    memory_mb: str
    limit: str

    @property
    def gpus(self) -> tuple[tuple[str, int], ...]:
        """The GPUs of a node, by type ("" if the site names none).

        >>> row = PartitionRow(name="g", is_default=True, nodes=2, gres="gpu:h100:4(S:0-1)",
        ...                    cpus="64", memory_mb="512000", limit="infinite")
        >>> row.gpus
        (('h100', 4),)
        """
        return gpus_of(self.gres)

    @property
    def limit_minutes(self) -> int | None:
        """The time limit; None if there is none."""
        try:
            return parse_slurm_minutes(self.limit)
        except UsageError:
            return None


@dataclass(frozen=True, kw_only=True)
class Association:
    """An account that the user may charge; in one partition only, if that is named."""

    account: str
    partition: str


def partition_rows(name: str | None = None) -> list[PartitionRow]:
    """Ask sinfo once, about one partition or all; return nothing if it doesn't answer."""
    only = [f"--partition={name}"] if name else []
    argv = ["sinfo", "--noheader", f"--format={'|'.join(_PARTITION_FIELDS)}", *only]
    lines = (line for line in _lines(argv) if len(line) == len(_PARTITION_FIELDS))
    return [
        PartitionRow(
            name=name.rstrip("*"),
            is_default=name.endswith("*"),
            nodes=int(nodes) if nodes.isdigit() else 0,
            gres="" if gres == "(null)" else gres,
            cpus=cpus,
            memory_mb=memory,
            limit=limit,
        )
        for name, nodes, gres, cpus, memory, limit in lines
    ]


def associations(user: str) -> list[Association]:
    """Ask sacctmgr once; return nothing if there is no accounting."""
    argv = ["sacctmgr", "show", "assoc", f"user={user}", "format=account,partition", "-nP"]
    found = (line for line in _lines(argv) if len(line) == 2 and line[0])
    return [Association(account=account, partition=partition) for account, partition in found]


def _lines(argv: list[str]) -> list[list[str]]:
    try:
        done = shell.run(argv, env=scrubbed(os.environ), timeout_s=TIMEOUT_S, tries=1)
    except ClusterrunError:
        return []
    return [line.split("|") for line in done.stdout.splitlines()] if done.rc == 0 else []


# Why sbatch refuses a job


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


def refused(done: shell.Completed, plan: Plan) -> SubmissionError:
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
        rows = partition_rows(plan.directive("partition"))
        return [
            f"partition '{row.name}' has {count(row.nodes, 'node')} with {row.gres or 'no GPUs'}, "
            f"{row.cpus} CPUs and {row.memory_mb} MB"
            for row in ([row for row in rows if row.is_default] or rows)[:5]
        ]
    if "time limit" in words.lower():
        return [
            f"partition '{row.name}' allows at most {row.limit}"
            for row in partition_rows(plan.directive("partition"))
        ]
    return [hint for parts, hint in HINTS if any(part in words for part in parts)][:1]
