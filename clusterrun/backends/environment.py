"""The environment of a submission: what of the submitting shell must not reach a job."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from clusterrun.launch.plan import Plan
from clusterrun.shared.given import as_given

# Another scheduler's view and what other launchers leave in a shell: each of these has changed or
# broken a launch without a word. What clusterrun itself adds to a job is known without a list.
SCRUBBED_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SBATCH_",
    "SRUN_",
    "SALLOC_",
    "SQUEUE_",
    "SACCT_",
    "SCONTROL_",
    "PMI",
    "PET_",
    "TORCHELASTIC_",
    "SUBMITIT_",
    "CLUSTERRUN_LOCAL_",
)
SCRUBBED = frozenset(
    {
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_NAME",
        "ROLE_WORLD_SIZE",
        "CUDA_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "ZE_AFFINITY_MASK",
        "CLUSTERRUN_BATCH_PID",
    }
)
KEPT_PREFIXES = ("SLURM_CONF",)  # SLURM_CONF and SLURM_CONF_SERVER: where Slurm is
KEPT = frozenset({"SLURM_JWT"})  # who the user is, at sites with tokens

# What sbatch reads from the environment, before the script's own lines, and the option it sets.
SBATCH_OPTIONS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_CLUSTERS": "clusters",
    "SLURM_CLUSTERS": "clusters",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_CPUS_PER_GPU": "cpus-per-gpu",
    "SBATCH_EXCLUSIVE": "exclusive",
    "SBATCH_EXPORT": "export",
    "SBATCH_GPUS": "gpus",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_GPUS_PER_TASK": "gpus-per-task",
    "SBATCH_GRES": "gres",
    "SBATCH_JOB_NAME": "job-name",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu",
    "SBATCH_MEM_PER_GPU": "mem-per-gpu",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_NO_REQUEUE": "requeue",
    "SBATCH_OPEN_MODE": "open-mode",
    "SBATCH_OUTPUT": "output",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_REQUEUE": "no-requeue",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_SIGNAL": "signal",
    "SBATCH_TIMELIMIT": "time",
}


@dataclass(frozen=True, kw_only=True)
class SbatchVariable:
    """An SBATCH_* variable of the shell; `planned` is what it would override, None if nothing."""

    name: str
    value: str
    option: str
    planned: str | None


def scrubbed(
    environ: Mapping[str, str], *, keep: Collection[str] = (), keep_sbatch: bool = False
) -> dict[str, str]:
    """Return the environment without what would leak into a job; `keep` names exceptions.

    Inside a job it is the one that the job was given, and what its script has set since.
    """
    return {
        name: value
        for name, value in as_given(environ).items()
        if name in keep
        or not _is_scrubbed(name)
        or (keep_sbatch and (name.startswith("SBATCH_") or name in SBATCH_OPTIONS))
    }


def _is_scrubbed(name: str) -> bool:
    if name in KEPT or name.startswith(KEPT_PREFIXES):
        return False
    return name in SCRUBBED or name.startswith(SCRUBBED_PREFIXES)


def sbatch_variables(plan: Plan, environ: Mapping[str, str]) -> tuple[SbatchVariable, ...]:
    """List the variables that sbatch would read, each with the planned value it would override."""
    directives = {directive.name: directive.value or "yes" for directive in plan.directives}
    return tuple(
        SbatchVariable(name=name, value=value, option=option, planned=directives.get(option))
        for name, value in sorted(environ.items())
        if (option := SBATCH_OPTIONS.get(name, "" if name.startswith("SBATCH_") else None))
        is not None
        and directives.get(option) != value
    )
