"""The environment and directory of a submission, without variables that must not reach a job."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from clusterrun.errors import ClusterrunError
from clusterrun.shared.given import STAGED_AT, as_given

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
    *("GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),
    STAGED_AT,
}
# SLURM_CONF and SLURM_CONF_SERVER locate Slurm, SLURM_JWT identifies the user.
KEPT_PREFIXES = ("SLURM_CONF", "SLURM_JWT")

SBATCH = ("SBATCH_", "SLURM_CLUSTERS")
"""What the variables begin with that sbatch reads as options; they override the script's lines."""


def scrubbed(environ: Mapping[str, str], *, keep: Collection[str] = ()) -> dict[str, str]:
    """Return the environment without the variables that would disturb a job, except `keep`.

    Inside a job, start from what the job was given and what its script has set since.
    """
    given = as_given(environ)
    disturbing = {name for name in given if name in SCRUBBED or name.startswith(SCRUBBED_PREFIXES)}
    kept = {name for name in given if name in keep or name.startswith(KEPT_PREFIXES)}
    removed = disturbing - kept
    return {name: value for name, value in given.items() if name not in removed}


def working_directory(environ: Mapping[str, str]) -> Path:
    """Return the working directory under the name that the user's shell has for it.

    That may be a link that works on every node while its target exists only on this one.
    Raises ClusterrunError if the directory is gone.
    """
    try:
        real = os.getcwd()
    except OSError as error:
        raise ClusterrunError("the working directory no longer exists", cause=str(error)) from error
    shell_name = environ.get("PWD", "")
    try:
        if os.path.isabs(shell_name) and os.path.samefile(shell_name, real):
            return Path(shell_name)
    except OSError:
        pass  # what $PWD names is gone, or cannot be reached
    return Path(real)
