"""Choose the backend of a job."""

from __future__ import annotations

from clusterrun.backends.base import Backend
from clusterrun.backends.hosts.backend import HostsBackend
from clusterrun.backends.local.backend import LocalBackend
from clusterrun.backends.slurm.backend import SlurmBackend
from clusterrun.config.spec import Cluster
from clusterrun.errors import UsageError
from clusterrun.rundir.paths import RunsDir
from clusterrun.rundir.record import JobRecord
from clusterrun.shared import shell


def backend(
    cluster: Cluster, runs_dir: RunsDir, *, keep_sbatch_env: bool = False, is_shared: bool = False
) -> Backend:
    """Return the backend to submit to. Raises UsageError for Slurm without sbatch.

    `is_shared`: a first host that does not see `runs_dir` is refused.
    """
    if cluster is Cluster.LOCAL:
        return LocalBackend(runs_dir=RunsDir(root=runs_dir.root.absolute()))
    if cluster.is_hosts:
        return HostsBackend(runs_dir=RunsDir(root=runs_dir.root.absolute()), is_shared=is_shared)
    refuse_missing_slurm()
    return SlurmBackend(keep_sbatch_env=keep_sbatch_env)


def refuse_missing_slurm() -> None:
    """Raise UsageError if sbatch is not found."""
    if shell.find("sbatch") is None:
        raise UsageError(
            "sbatch was not found on this machine",
            hint="use a login node of the cluster, or run here with --cluster local",
        )


def backend_of(record: JobRecord) -> Backend:
    """Return the backend of a recorded job."""
    if record.cluster is Cluster.LOCAL:
        return LocalBackend(runs_dir=record.runs_dir)
    if record.cluster.is_hosts:
        return HostsBackend(runs_dir=record.runs_dir)
    return SlurmBackend(slurm_cluster=record.slurm_cluster)
