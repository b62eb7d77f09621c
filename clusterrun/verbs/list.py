"""List the runs of a project."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import chain

from clusterrun.backends import select
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.config import Resolved
from clusterrun.config.settings import BUILT_IN
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.rundir.known_homes import known_homes
from clusterrun.rundir.record import JobRecord, list_records
from clusterrun.verbs.config import load_spec
from clusterrun.verbs.find import own_runs, places_of_runs


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
    _refuse_foreign(resolved)
    found, errors = homes.runs_on(spec.hosts, spec.python or sys.executable)
    by_id = {job.record.run_id: job for job in (*found, *known)}
    return sorted(by_id.values(), key=lambda job: job.record.age_key, reverse=True), errors


def _refuse_foreign(resolved: Resolved) -> None:
    """Refuse hosts and a Python that a project names, unless this user uses hosts in it."""
    own = os.path.realpath(own_runs().root)
    if any(run.startswith(f"{own}/") for run in known_homes()):
        return
    for key in ("hosts", "launch.python"):
        origin = resolved.origins[key]
        if not (origin.is_of_user or origin.is_of_site or origin == BUILT_IN):
            raise UsageError(
                f"{origin} names {key}, and you have not submitted to hosts from this project",
                hint="if you trust it, name them yourself: CLUSTERRUN_HOSTS and CLUSTERRUN_PYTHON",
            )


def _ask_homes(found: Sequence[JobRecord]) -> list[JobStatus]:
    if not found:
        return []
    from clusterrun.backends.hosts import homes

    return homes.ask(found)
