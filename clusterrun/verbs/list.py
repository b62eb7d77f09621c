"""List the runs of a project."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from clusterrun.backends import select
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.rundir.record import list_records
from clusterrun.verbs.find import places_of_runs


def list_jobs(*, limit: int | None = None) -> list[JobStatus]:
    """Return the status of each run of this project, newest first; outside a project, of all runs.

    `limit` is the largest number of runs to return.
    """
    own, *others = places_of_runs()
    found = list_records(own, limit, with_damaged=True)
    if not found:
        known = (list_records(place, limit, with_damaged=True) for place in others)
        found = sorted(chain(*known), key=lambda record: record.age_key, reverse=True)
    found = found[:limit]
    here = iter(statuses([each for each in found if each.home is None], select.backend_of))
    there: Iterator[JobStatus] = iter(())
    if apart := [each for each in found if each.home]:
        from clusterrun.backends.hosts import homes  # slow to import

        there = iter(homes.ask(apart))
    return [next(there if each.home else here) for each in found]
