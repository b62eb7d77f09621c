"""Look for pitfalls of a launch in its script, before it is queued."""

from __future__ import annotations

from pathlib import Path

from clusterrun.config.choices import Device
from clusterrun.config.settings import Resolved
from clusterrun.launch.plan import Plan
from clusterrun.linting.rule import Launch, lint
from clusterrun.shared.finding import Finding


def find_pitfalls(
    job: Resolved, plan: Plan, source: bytes | None, *, of_many_ranks: bool = False
) -> tuple[Finding, ...]:
    """Return the pitfalls of a launch; only those of its settings if its script is not here.

    `of_many_ranks`: if the job sets no size, look for those of two nodes with two ranks each.
    """
    spec = job.spec
    named = _deepspeed_file(plan)
    launch = Launch(
        nodes=plan.nodes,
        ranks_per_node=plan.procs_per_node,
        has_gpus=plan.device is Device.CUDA,
        is_simulated=bool(spec.cluster.scheduler.is_this_machine),
        strategy=plan.strategy.value,
        max_restarts=plan.max_restarts or 0,
        shared_port=0 if spec.exclusive else plan.main_process_port,
        args=tuple(spec.args),
        setup=plan.setup,
        missing=(named,) if named and _is_missing(job.cwd / named) else (),
        is_missing=lambda path: _is_missing(job.cwd / path),
    )
    if of_many_ranks and is_unsized(job, plan):
        has_gpus = spec.device is not Device.CPU
        launch = launch._replace(nodes=2, ranks_per_node=2, has_gpus=has_gpus, is_sized=False)
    return lint(source or b"", launch)


def is_unsized(job: Resolved, plan: Plan) -> bool:
    """Return whether nothing sets the size of a job."""
    spec = job.spec
    is_unset = spec.nodes is spec.gpus_per_node is spec.nproc_per_node is None
    return is_unset and plan.nodes * plan.procs_per_node == 1


def _deepspeed_file(plan: Plan) -> str:
    """Return the DeepSpeed JSON that an accelerate YAML names; "" if the job does not read it."""
    if not plan.accelerate_text or plan.deepspeed:
        return ""
    import yaml  # slow to import

    from clusterrun.shared.bounded_yaml import BoundedLoader

    found = yaml.load(plan.accelerate_text, Loader=BoundedLoader)
    section = found.get("deepspeed_config") if isinstance(found, dict) else None
    named = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    return named if isinstance(named, str) else ""


def _is_missing(path: Path) -> bool:
    """Return whether a file does not exist, and its directory, which may be on the nodes, does."""
    try:
        path.stat()
    except FileNotFoundError:
        return path.parent.is_dir()
    except (OSError, ValueError):
        pass
    return False


def place(finding: Finding, script: str) -> str:
    """Return the file and line of a finding, or that it is a setting of the job."""
    return f"{script}:{finding.line}" if finding.line else "the job's settings"
