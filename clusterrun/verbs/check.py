"""Look for pitfalls of a launch in its script, before it is queued."""

from __future__ import annotations

import dataclasses

from clusterrun.config import Resolved
from clusterrun.config.spec import Device, JobSpec, Strategy
from clusterrun.estimates.gpus import lacks_bf16
from clusterrun.launch.plan import Plan
from clusterrun.linting.lint import Pitfall, lint
from clusterrun.linting.rules import Launch

_WHOLE_MODEL = (Strategy.NONE, Strategy.DDP)


def find_pitfalls(
    job: Resolved, plan: Plan, source: bytes | None, *, of_many_ranks: bool = False
) -> tuple[Pitfall, ...]:
    """Return the pitfalls of a launch; () if the script is not here or not Python.

    `of_many_ranks`: if the job sets no size, look for those of two nodes with two ranks each.
    """
    launch = launch_of(job.spec, plan)
    is_unsized = job.spec.nodes is job.spec.gpus_per_node is job.spec.nproc_per_node is None
    if of_many_ranks and launch.world_size == 1 and is_unsized:
        launch = dataclasses.replace(launch, nodes=2, ranks_per_node=2)
    return () if source is None else lint(source, launch)


def launch_of(spec: JobSpec, plan: Plan) -> Launch:
    """Return what a plan gives the script."""
    return Launch(
        nodes=plan.nodes,
        ranks_per_node=plan.procs_per_node,
        cpus_per_node=int(plan.directive("cpus-per-task") or 0),
        has_gpus=plan.device is Device.CUDA,
        lacks_bf16=bool(lacks_bf16(spec.gpu_type or spec.gpu)),
        is_sharded=plan.strategy not in _WHOLE_MODEL,
        args=tuple(spec.args),
        env={**spec.network_env, **spec.env},
    )


def in_words(finding: Pitfall, script: str) -> str:
    """Return a finding as one line.

    >>> from clusterrun.linting.rules import RULES
    >>> found = Pitfall(rule=RULES["fixed-port"], line=7, what="MASTER_PORT is set to 29500")
    >>> in_words(found, "train.py")[:58]
    'train.py:7: MASTER_PORT is set to 29500: two jobs on one n'
    """
    return f"{place(finding, script)}: {finding.what}: {finding.rule.reason}; {finding.rule.fix}"


def place(finding: Pitfall, script: str) -> str:
    """Return the file and line of a finding, or that it is a setting of the job."""
    return f"{script}:{finding.line}" if finding.line else "the job's variables"
