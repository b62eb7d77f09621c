"""List the runs of a project."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain

from clusterrun.backends import select
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.errors import ClusterrunError, NotAdoptedError, UsageError
from clusterrun.rundir.record import JobRecord, list_records
from clusterrun.verbs.config import load_spec
from clusterrun.verbs.find import is_elsewhere, places_of_runs


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
    there = iter(_ask_homes([each for each in found if each.home]))  # hosts know their runs
    return [next(there if each.home else here) for each in found]


def list_on_hosts(known: Sequence[JobStatus]) -> tuple[list[JobStatus], list[ClusterrunError]]:
    """Add the other runs that the configured hosts have; also return why hosts did not answer."""
    from clusterrun.backends.hosts import homes  # slow to import

    resolved = load_spec()
    spec = resolved.spec
    if not spec.hosts:
        raise UsageError("no hosts are configured", hint="list them as hosts: in clusterrun.yaml")
    own = (job for job in known if job.record.home and not is_elsewhere(job.record))
    named = (resolved.origins[key] for key in ("hosts", "launch.python"))
    foreign = [each for each in named if each.where and not (each.is_of_user or each.is_of_site)]
    if foreign and all(isinstance(job.error, NotAdoptedError) for job in own):
        raise UsageError(
            f"{foreign[0]} names the hosts, and you have no run on hosts in this project",
            hint="if you trust it, name them yourself: CLUSTERRUN_HOSTS and CLUSTERRUN_PYTHON",
        )
    found, errors = homes.runs_on(spec.hosts, spec.python or sys.executable)
    by_id = {job.record.run_id: job for job in (*found, *known)}
    return sorted(by_id.values(), key=lambda job: job.record.age_key, reverse=True), errors


def _ask_homes(found: Sequence[JobRecord]) -> list[JobStatus]:
    if not found:
        return []
    from clusterrun.backends.hosts import homes

    return homes.ask(found)
