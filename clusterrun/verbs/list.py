"""List the runs of a project."""

from __future__ import annotations

from collections.abc import Sequence

from clusterrun.backends import select
from clusterrun.backends.hosts import homes
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.rundir.record import JobRecord, list_records
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
    return _statuses(found[:limit])


def _statuses(found: Sequence[JobRecord]) -> list[JobStatus]:
    """Return the status of each run; hosts that have run directories are asked for theirs."""
    here = iter(statuses([each for each in found if each.home is None], select.backend_of))
    there = iter(homes.ask([each for each in found if each.home]))
    return [next(there if each.home else here) for each in found]
