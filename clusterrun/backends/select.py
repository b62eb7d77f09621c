"""Choose the backend of a job, and import only that one."""

from __future__ import annotations

from clusterrun.backends.base import Backend
from clusterrun.config.choices import Cluster
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
        return _local(RunsDir(root=runs_dir.root.absolute()))
    if cluster.is_hosts:
        return _hosts(RunsDir(root=runs_dir.root.absolute()), is_shared=is_shared)
    refuse_missing_slurm()
    return _slurm(keep_sbatch_env=keep_sbatch_env)


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
        return _local(record.runs_dir)
    if record.cluster.is_hosts:
        return _hosts(record.runs_dir)
    return _slurm(slurm_cluster=record.slurm_cluster)


def _local(runs_dir: RunsDir) -> Backend:
    from clusterrun.backends.local.backend import LocalBackend

    return LocalBackend(runs_dir=runs_dir)


def _hosts(runs_dir: RunsDir, *, is_shared: bool = False) -> Backend:
    from clusterrun.backends.hosts.backend import HostsBackend

    return HostsBackend(runs_dir=runs_dir, is_shared=is_shared)


def _slurm(*, slurm_cluster: str | None = None, keep_sbatch_env: bool = False) -> Backend:
    from clusterrun.backends.slurm.backend import SlurmBackend

    return SlurmBackend(slurm_cluster=slurm_cluster, keep_sbatch_env=keep_sbatch_env)
