"""Choose the backend of a job, and import only that one."""

from __future__ import annotations

import importlib
import typing

from clusterrun.backends.base import Backend, PerhapsSubmittedError, Submission, Where
from clusterrun.config.choices import Cluster
from clusterrun.errors import UsageError
from clusterrun.launch.plan import Plan
from clusterrun.rundir.create import remove_run
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.rundir.record import JobRecord
from clusterrun.shared import shell


def backend(cluster: Cluster, runs_dir: RunsDir, *, is_shared: bool = False) -> Backend:
    """Return the backend to submit to. Raises UsageError for Slurm without sbatch.

    If `is_shared`, the first host of a job on hosts must see `runs_dir`.
    """
    if cluster.scheduler.reads_sbatch:
        refuse_missing_slurm()
    here = RunsDir(root=runs_dir.root.absolute())
    return _of(cluster, Where(runs_dir=here, is_shared=is_shared))


def submit_or_remove(scheduler: Backend, plan: Plan, paths: RunPaths) -> Submission:
    """Submit a run; remove its directory if it is refused, unless it may be in the queue."""
    try:
        return scheduler.submit(plan, paths)
    except PerhapsSubmittedError:
        raise
    except BaseException:
        remove_run(paths)
        raise


def refuse_missing_slurm() -> None:
    """Raise UsageError if sbatch is not found."""
    if shell.find("sbatch") is None:
        hint = "use a login node of the cluster, or run here with --cluster local"
        raise UsageError("sbatch was not found on this machine", hint=hint)


def backend_of(record: JobRecord) -> Backend:
    """Return the backend of a recorded job."""
    where = Where(runs_dir=record.paths.runs_dir, slurm_cluster=record.slurm_cluster)
    return _of(record.cluster, where)


def _of(cluster: Cluster, where: Where) -> Backend:
    module = importlib.import_module(cluster.scheduler.module)
    return typing.cast(Backend, module.backend(where))
