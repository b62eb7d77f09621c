"""Choose where a job runs, and find the backend of one that ran."""

from __future__ import annotations

from dataclasses import dataclass

from clusterrun import shell
from clusterrun.backends.base import Backend
from clusterrun.backends.local import LocalBackend
from clusterrun.backends.slurm import SlurmBackend
from clusterrun.errors import UsageError
from clusterrun.paths import RunsDir
from clusterrun.record import JobRecord
from clusterrun.spec import Cluster


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Where a job will run, and a line about it that the user should see (empty: none)."""

    cluster: Cluster
    note: str = ""


def choose(cluster: Cluster) -> Choice:
    """Decide between Slurm and this machine: `auto` takes Slurm where sbatch is found.

    Raises UsageError where Slurm is wanted and sbatch is not found.
    """
    has_slurm = shell.find("sbatch") is not None
    if cluster is Cluster.SLURM and not has_slurm:
        raise UsageError(
            "sbatch was not found on this machine",
            hint="go to a login node of the cluster, or run here with --cluster local",
        )
    if cluster is Cluster.AUTO and not has_slurm:
        note = "sbatch was not found: the job runs on this machine (--cluster local)"
        return Choice(cluster=Cluster.LOCAL, note=note)
    return Choice(cluster=Cluster.SLURM if cluster is Cluster.AUTO else cluster)


def backend(cluster: Cluster, runs_dir: RunsDir, *, keep_sbatch_env: bool = False) -> Backend:
    """Return the backend that submits; `cluster` has been chosen."""
    if cluster is Cluster.LOCAL:
        return LocalBackend(runs_dir=RunsDir(root=runs_dir.root.absolute()))
    return SlurmBackend(keep_sbatch_env=keep_sbatch_env)


def backend_of(record: JobRecord) -> Backend:
    """Return the backend that knows the job of a record; equal ones are asked together."""
    if record.cluster is Cluster.LOCAL:
        return LocalBackend(runs_dir=record.runs_dir)
    return SlurmBackend(slurm_cluster=record.slurm_cluster)
