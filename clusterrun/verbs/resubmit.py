"""Start a new run with the configuration of an earlier one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clusterrun.verbs.changes import Changed, change
from clusterrun.verbs.find import Which, locate
from clusterrun.verbs.render import Prepared, prepare
from clusterrun.verbs.submit import submit_prepared

if TYPE_CHECKING:
    from clusterrun.verbs.job import Job


def resubmit(job: Which | None = None, **settings: Any) -> Job:
    """Start a new run with the configuration of an earlier one; `settings` as for `resume`."""
    from clusterrun.verbs.job import Job  # imports submitit, which most commands never need

    prepared, _ = prepare_resubmit(job, flags=settings)
    return Job(submit_prepared(prepared))


def prepare_resubmit(
    job: Which | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    exclude_bad: bool = False,
) -> tuple[Prepared, Changed]:
    """Prepare a new run from an earlier run's configuration; `submit_prepared` starts it.

    Raises UsageError if the job cannot run.
    """
    changed = change(locate(job), flags or {}, overrides, exclude_bad=exclude_bad)
    return prepare(changed.resolved, is_again=True), changed
