"""Have Slurm start a requeued job now: it would hold it back for two minutes."""

from __future__ import annotations

from clusterrun.backends import select
from clusterrun.backends.status import JobStatus
from clusterrun.errors import ClusterrunError
from clusterrun.record import current_user

HELD = "BeginTime"


def is_held(seen: JobStatus) -> bool:
    """Say whether a job has run, and waits for a time to come."""
    return seen.pending is not None and seen.pending.code == HELD and seen.attempt > 0


class Release:
    """Releases the user's own job, once for each time that it was requeued."""

    def __init__(self) -> None:
        self._tried: set[tuple[str, int]] = set()

    def __call__(self, seen: JobStatus) -> bool:
        """Say whether the job was held and has been released."""
        record = seen.record
        time = (record.job_id, seen.attempt)
        if not is_held(seen) or record.user != current_user() or time in self._tried:
            return False
        self._tried.add(time)
        try:
            return select.backend_of(record).release(record.job_id)
        except ClusterrunError:  # then it starts two minutes later
            return False
