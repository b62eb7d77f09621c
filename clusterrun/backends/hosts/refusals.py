"""Draft."""

from clusterrun.errors import SchedulerUnreachableError


def why(host, rc, stderr):
    return SchedulerUnreachableError(f"{host}: {rc}", cause=stderr)
