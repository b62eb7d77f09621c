"""Look for pitfalls of a launch in its script, before it is queued."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from clusterrun.backends.environment import scrubbed
from clusterrun.config import Resolved
from clusterrun.config.spec import Cluster, Device
from clusterrun.launch.plan import Plan, Precision
from clusterrun.linting.lint import Pitfall, lint
from clusterrun.linting.rule import Launch
from clusterrun.linting.settings import section


def find_pitfalls(
    job: Resolved, plan: Plan, source: bytes | None, *, of_many_ranks: bool = False
) -> tuple[Pitfall, ...]:
    """Return the pitfalls of a launch; only those of its settings if its script is not here.

    `of_many_ranks`: if the job sets no size, look for those of two nodes with two ranks each.
    """
    launch = launch_of(job, plan)
    if of_many_ranks and is_unsized(job, plan):
        has_gpus = job.spec.device is not Device.CPU
        launch = launch._replace(nodes=2, ranks_per_node=2, has_gpus=has_gpus, is_sized=False)
    return lint(source or b"", launch)


def is_unsized(job: Resolved, plan: Plan) -> bool:
    """Return whether nothing sets the size of a job."""
    spec = job.spec
    is_unset = spec.nodes is spec.gpus_per_node is spec.nproc_per_node is None
    return is_unset and plan.nodes * plan.procs_per_node == 1


def launch_of(job: Resolved, plan: Plan) -> Launch:
    """Return what a plan gives the script."""
    spec = job.spec
    accelerate = _mapping(plan.accelerate_text)
    zero, missing = _deepspeed(job, plan, accelerate)
    interface = {"NCCL_SOCKET_IFNAME": plan.network_interface} if plan.network_interface else {}
    env = {**interface, **spec.network_env, **spec.env}
    gpu = spec.gpu_type or spec.gpu or ""
    is_quiet = plan.precision is not Precision.BF16  # otherwise, a note says so
    if gpu and is_quiet:
        from clusterrun.estimates.gpus import lacks_bf16  # slow to import

        is_quiet = bool(lacks_bf16(gpu))
    return Launch(
        nodes=plan.nodes,
        ranks_per_node=plan.procs_per_node,
        cpus_per_node=0 if spec.exclusive else int(plan.directive("cpus-per-task") or 0),
        has_gpus=plan.device is Device.CUDA,
        gpu_without_bf16=gpu.upper() if is_quiet else "",
        is_simulated=spec.cluster is Cluster.LOCAL,
        strategy=plan.strategy.value,
        max_restarts=plan.max_restarts or 0,
        shared_port=0 if spec.exclusive else plan.main_process_port,
        args=tuple(spec.args),
        env=env,
        inherited=scrubbed(os.environ),
        setup=plan.setup,
        deepspeed=zero,
        accelerate=accelerate,
        missing=missing,
        read=lambda path: _read(job.cwd / path),
        has_wandb_key=_may_have_wandb_key({**os.environ, **env}, plan.setup, job.cwd),
    )


def _mapping(text: str) -> dict[str, Any]:
    """Return an accelerate YAML that the plan has accepted; {} for none."""
    if not text:
        return {}
    import yaml  # slow to import

    from clusterrun.shared.bounded_yaml import BoundedLoader

    found = yaml.load(text, Loader=BoundedLoader)
    return found if isinstance(found, dict) else {}


def _deepspeed(
    job: Resolved, plan: Plan, accelerate: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the job's DeepSpeed JSON, and the file that accelerate's YAML names in vain."""
    named = section(accelerate, "deepspeed_config").get("deepspeed_config_file")
    if plan.deepspeed or not isinstance(named, str):
        return json.loads(plan.deepspeed or "{}"), ()
    found = _read(job.cwd / named)
    return found or {}, (named,) * (found is None)


def _read(path: Path) -> dict[str, Any] | None:
    """Return what a JSON file contains; {} if that is not known, None if there is no such file."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None if path.parent.is_dir() else {}  # perhaps the directory is on the nodes
    except (OSError, ValueError):  # DeepSpeed also reads HJSON
        return {}
    return found if isinstance(found, dict) else {}


_SETS_NO_KEY: Final = (
    r"(?:conda|venv|uv|modules): |(?:module|ml|ulimit|umask|cd|mkdir|echo|set) |export (?!\S*WANDB)"
)


def _may_have_wandb_key(environ: Mapping[str, str], setup: tuple[str, ...], cwd: Path) -> bool:
    """Return whether wandb may find a key, or may need none: a sourced file can set both."""
    if any(name.startswith("WANDB_") for name in environ):
        return True
    if not all(re.match(_SETS_NO_KEY, line) and "WANDB" not in line for line in setup):
        return True
    home = Path(environ.get("HOME", "/"))
    netrc = Path(environ.get("NETRC") or home / ".netrc")
    try:
        is_kept = bool(re.search("wandb|^default", netrc.read_text(), re.MULTILINE))
    except OSError as error:
        is_kept = not isinstance(error, FileNotFoundError)
    settings = (home / ".config/wandb", cwd / "wandb/settings", cwd / ".env")
    return is_kept or any(path.exists() for path in settings)


def in_words(finding: Pitfall, script: str) -> str:
    """Return a finding as one line.

    >>> from clusterrun.linting.rule import RULES
    >>> found = Pitfall(rule=RULES["fixed-port"], line=7, what="MASTER_PORT is set to 29500")
    >>> in_words(found, "train.py")[:58]
    'train.py:7: MASTER_PORT is set to 29500: two jobs on one n'
    """
    return f"{place(finding, script)}: {finding.what}: {finding.rule.reason}; {finding.rule.fix}"


def place(finding: Pitfall, script: str) -> str:
    """Return the file and line of a finding, or that it is a setting of the job."""
    return f"{script}:{finding.line}" if finding.line else "the job's settings"
