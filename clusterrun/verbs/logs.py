"""Read the log lines of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from clusterrun.logformat.lines import LogLine
from clusterrun.logs.merge import find_newest, merge_sources
from clusterrun.logs.sources import Query, find_files, sources_of
from clusterrun.verbs.find import Which, find_record


def read_logs(
    job: Which | None = None,
    *,
    ranks: Collection[int] | None = None,
    nodes: Collection[str] | None = None,
    tail: int | None = None,
    attempt: int | None = None,
    errors: bool = False,
) -> Iterator[LogLine]:
    """Yield the log lines of a run's newest attempt, from all nodes, merged by time.

    If `ranks` is None, include all ranks, the launcher and the agents. `errors` selects error
    lines, with at most 20 repeats of a rank's line. Lines of the stream GAP report lost bytes.
    Raises JobNotFoundError.
    """
    paths = find_record(job).paths
    number = paths.newest_attempt() if attempt is None else attempt
    files = find_files(paths, number, None if nodes is None else frozenset(nodes))
    query = Query(ranks=None if ranks is None else frozenset(ranks), errors=errors)
    chosen = sources_of(files, query)
    return merge_sources(chosen) if tail is None else iter(find_newest(chosen, tail))
