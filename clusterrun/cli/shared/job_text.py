"""What is printed of a job by more than one verb: its failure, where it runs, why it waits."""

from __future__ import annotations

from datetime import datetime

from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared.times import SECONDS_A_DAY
from clusterrun.config.spec import Cluster
from clusterrun.errors import UsageError
from clusterrun.rundir.outcome import Cause, Outcome
from clusterrun.shared.hostlist import fold_hosts, parse_hostlist


def failure_text(failure: Outcome) -> str:
    """Name the failure that ended an attempt, on one line."""
    how = f"exit {failure.code}" if failure.code else ""
    if failure.signal:  # a rank's message names its signal
        how = "" if failure.cause is Cause.SIGNAL else f"killed by signal {failure.signal}"
    who = _who(failure) if failure.message else ""  # else the reason names it
    message = " ".join((failure.message or failure.reason).split())
    return ": ".join(part for part in (who, how, message) if part)


def _who(failure: Outcome) -> str:
    if failure.rank is None:
        return f"node {failure.node}" if failure.node else ""
    return f"rank {failure.rank}" + (f" on {failure.node}" if failure.node else "")


def where_or_why(job: JobStatus) -> str:
    """Say where a job runs, or why it waits."""
    if job.pending is None:
        is_local = job.record.cluster is Cluster.LOCAL
        return f"{nodelist(job)} (simulated nodes)" if is_local and job.nodelist else nodelist(job)
    start = f"; starts about {_local(job.expected_start)}" if job.expected_start else ""
    return f"{job.pending.text}{start}"


def nodelist(job: JobStatus) -> str:
    """Name the hosts of a job in Slurm's short form, each once: simulated nodes share one."""
    try:
        return fold_hosts(parse_hostlist(job.nodelist))
    except UsageError:
        return job.nodelist


def _local(epoch_s: float) -> str:
    then = datetime.fromtimestamp(epoch_s)
    is_near = abs((then - datetime.now()).total_seconds()) < SECONDS_A_DAY / 2
    return f"{then:%H:%M}" if is_near else f"{then:%Y-%m-%d %H:%M}"
