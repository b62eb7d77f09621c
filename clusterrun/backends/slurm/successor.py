"""Submit the next job of a run from inside its job.

It starts in seconds, while Slurm would hold a requeued job for two minutes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from clusterrun.backends.base import Submission
from clusterrun.backends.slurm.backend import SlurmBackend
from clusterrun.errors import ClusterrunError
from clusterrun.launch.plan import Plan
from clusterrun.rundir import record as records
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.hostlist import fold_hosts, parse_hostlist


def submit_successor(
    run_dir: Path, plan: Plan, nodes: Sequence[str], environ: Mapping[str, str]
) -> str:
    """Submit the job that continues a run after this one, and return its id.

    `nodes` are excluded in addition to the plan's. In a chain the successor is the next job, which
    is already queued. Raises ClusterrunError; then the record is unchanged and there is no new job.
    """
    record = records.register_run(run_dir, environ)
    backend = SlurmBackend(slurm_cluster=record.slurm_cluster)
    # An option on the command line replaces the script's.
    planned = plan.directive("exclude")
    exclude = fold_hosts([*(parse_hostlist(planned) if planned else ()), *nodes])
    if record.chain_length:
        if not record.chained_job_ids:
            raise ClusterrunError(f"all {record.chain_length} jobs of the chain are used")
        job_id = record.chained_job_ids[0]
        if exclude:
            backend.scontrol("update", f"JobId={job_id}", f"ExcNodeList={exclude}")
        records.update(record.paths, lambda now: records.continued_by(now, job_id))
        return job_id
    # Slurm keeps the job of a lost node for minutes. The successor excludes that node and need
    # not wait: this job's agents have exited by now.
    after = "" if nodes else environ["SLURM_JOB_ID"]
    new = backend.submit_again(plan, record, after=after, exclude=exclude)
    _remember(record, new, backend)
    return new.job_id


def _remember(record: JobRecord, new: Submission, backend: SlurmBackend) -> None:
    """Record the new job; cancel it if that fails, since no command could find it."""
    try:
        records.update(record.paths, lambda now: records.continued_by(now, new.job_id))
        records.link_job(record.runs_dir, new.job_id, record.paths)
    except (OSError, ClusterrunError) as error:
        with contextlib.suppress(ClusterrunError):
            backend.cancel([new.job_id])
        with contextlib.suppress(OSError, ClusterrunError):
            records.update(record.paths, lambda _: record)
        raise ClusterrunError(f"cannot write {record.paths.record}", cause=str(error)) from error
