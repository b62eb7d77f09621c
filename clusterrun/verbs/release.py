"""Release a requeued job now: by default Slurm holds it for two minutes."""

from __future__ import annotations

import time
from collections import Counter

from clusterrun.backends import select
from clusterrun.backends.status import JobStatus
from clusterrun.errors import ClusterrunError

RETRY_S = 5.0
TRIES = 6


class Release:
    """Releases the user's own job, once for each time that it was requeued.

    Slurm refuses until the job's last processes have ended; later calls try again.
    """

    def __init__(self) -> None:
        self._tries: Counter[tuple[str, int]] = Counter()
        self._next_try = 0.0

    def __call__(self, job: JobStatus) -> bool:
        """Release the job if it is held; return whether that worked."""
        record = job.record
        wait = (record.job_id, job.attempt)
        if not job.is_held or not record.is_own or self._tries[wait] >= TRIES:
            return False
        if time.monotonic() < self._next_try:
            return False
        self._next_try = time.monotonic() + RETRY_S
        self._tries[wait] += 1
        try:
            is_released = select.backend_of(record).release(record.job_id)
        except ClusterrunError:  # then it starts two minutes later
            return False
        if is_released:
            self._tries[wait] = TRIES
        return is_released
