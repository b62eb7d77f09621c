"""List the runs of a project."""

from __future__ import annotations

from clusterrun.backends import select
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.rundir.record import list_records
from clusterrun.verbs.find import places_of_runs


def list_jobs(*, limit: int | None = None) -> list[JobStatus]:
    """Return the status of each run of this project, newest first; outside a project, of all runs.

    `limit` is the largest number of runs to return.
    """
    own, *others = places_of_runs()
    found = list_records(own)
    if not found:
        known = [record for place in others for record in list_records(place)]
        found = sorted(known, key=lambda record: record.age_key, reverse=True)
    return statuses(found[:limit], select.backend_of)
