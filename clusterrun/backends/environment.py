"""The environment and directory of a submission, without variables that must not reach a job."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from clusterrun.errors import ClusterrunError
from clusterrun.launch.plan import Plan
from clusterrun.shared.given import as_given

# Variables of Slurm, MPI and other launchers that silently change or break a launch.
# `as_given` removes what clusterrun itself adds to a job.
SCRUBBED_PREFIXES = (
    *("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCONTROL_"),
    "SINFO_",
    *("PMI", "PET_", "TORCHELASTIC_", "SUBMITIT_", "CLUSTERRUN_LOCAL_", "CLUSTERRUN_HOSTS_"),
)
SCRUBBED = {
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK", "CLUSTERRUN_BATCH_PID"),
    "CLUSTERRUN_STAGED_AT",
}
# SLURM_CONF and SLURM_CONF_SERVER locate Slurm, SLURM_JWT identifies the user.
KEPT_PREFIXES = ("SLURM_CONF", "SLURM_JWT")

# Variables that sbatch reads, and the options that they set; they override the script's lines.
_ALIKE = (
    *("account", "clusters", "constraint", "cpus-per-gpu", "exclusive", "export", "gpus"),
    *("gpus-per-node", "gpus-per-task", "gres", "job-name", "mem-per-cpu", "mem-per-gpu"),
    *("open-mode", "output", "partition", "qos", "reservation", "signal"),
)
SBATCH_OPTIONS = {
    **{f"SBATCH_{option.upper().replace('-', '_')}": option for option in _ALIKE},
    "SBATCH_ARRAY_INX": "array",
    "SLURM_CLUSTERS": "clusters",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_NO_REQUEUE": "requeue",
    "SBATCH_REQUEUE": "no-requeue",
    "SBATCH_TIMELIMIT": "time",
}


class SbatchVariable(NamedTuple):
    """An SBATCH_* variable of the shell; `planned` is the value it would override, if any."""

    name: str
    value: str
    option: str
    planned: str | None


def scrubbed(environ: Mapping[str, str], *, keep: Collection[str] = ()) -> dict[str, str]:
    """Return the environment without what would disturb a job; `keep` names exceptions.

    Inside a job, start from what the job was given and what its script has set since.
    """
    return {
        name: value
        for name, value in as_given(environ).items()
        if name in keep or not _is_scrubbed(name)
    }


def _is_scrubbed(name: str) -> bool:
    is_kept = name.startswith(KEPT_PREFIXES)
    return not is_kept and (name in SCRUBBED or name.startswith(SCRUBBED_PREFIXES))


def sbatch_variables(plan: Plan, environ: Mapping[str, str]) -> tuple[SbatchVariable, ...]:
    """Return the variables that sbatch would read and that differ from the plan."""
    directives = {directive.name: directive.value or "yes" for directive in plan.directives}
    return tuple(
        SbatchVariable(name=name, value=value, option=option, planned=directives.get(option))
        for name, value in sorted(environ.items())
        if (option := SBATCH_OPTIONS.get(name, "" if name.startswith("SBATCH_") else None))
        is not None
        and directives.get(option) != value
    )


def working_directory(environ: Mapping[str, str]) -> Path:
    """Return the working directory under the name that the user's shell has for it.

    That may be a link that works on every node while its target exists only on this one.
    Raises ClusterrunError if the directory is gone.
    """
    try:
        real = os.getcwd()
    except OSError as error:
        raise ClusterrunError("the working directory no longer exists", cause=str(error)) from error
    named = environ.get("PWD", "")
    try:
        if os.path.isabs(named) and os.path.samefile(named, real):
            return Path(named)
    except OSError:
        pass
    return Path(real)
