"""Requeue a job only once, and not after its run: Slurm 24.05 and newer also requeue jobs.

slurmctld requeues a job that ends within a preemption's GraceTime, with any exit status. If it was
requeued by hand instead, slurmctld requeues it when its next start ends (commit a689104d15).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from clusterrun.errors import ClusterrunError
from clusterrun.shared import shell

SINCE = (24, 5)
ASK_S = 10.0
_VERSION = re.compile(r"^SLURM_VERSION\s*=\s*(\d+)\.(\d+)", re.MULTILINE)
_BY_PARTITION = re.compile(r"^PreemptType\s*=\s*preempt/partition_prio", re.MULTILINE)
_IN_GRACE_TIME = re.compile(r"\bPreemptTime=\d")
_MAY_REQUEUE = re.compile(r"\bRequeue=1\b")
_RESTARTS = re.compile(r"\bRestarts=(\d+)")
_REQUEUES = re.compile(r"\bPreemptMode=\S*REQUEUE")


def requeues_itself(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm certainly requeues this job when it ends; False if unknown.

    Our requeue would then start the job again after its last end.
    """
    job = _job(environ.get("SLURM_JOB_ID", ""))
    if not (_IN_GRACE_TIME.search(job) and _MAY_REQUEUE.search(job)):
        return False
    try:
        config = _shown("config")
        version = _VERSION.search(config)
        if not version or (int(version[1]), int(version[2])) < SINCE:
            return False
        partition = _shown("partition", environ.get("SLURM_JOB_PARTITION", ""))
        return bool(_BY_PARTITION.search(config) and _REQUEUES.search(partition))
    except ClusterrunError:
        return False


def restarts(job_id: str) -> int:
    """Return how often a job was requeued; 0 if slurmctld does not answer."""
    found = _RESTARTS.search(_job(job_id))
    return int(found[1]) if found else 0


def stay_down(job_id: str, *, is_restarted: bool) -> str:
    """Keep Slurm from requeueing this job once it has ended; return why that failed."""
    if not is_restarted and not _IN_GRACE_TIME.search(_job(job_id)):
        return ""
    try:
        done = shell.run(["scontrol", "update", f"JobId={job_id}", "Requeue=0"])
    except ClusterrunError as error:
        return str(error)
    return done.stderr.strip() if done.rc else ""


def _job(job_id: str) -> str:
    """Return Slurm's record of a job; empty if slurmctld does not answer."""
    try:
        return _shown("job", job_id)
    except ClusterrunError:
        return ""


def _shown(*what: str) -> str:
    return shell.run(["scontrol", "--oneliner", "show", *what], timeout_s=ASK_S, tries=1).stdout
