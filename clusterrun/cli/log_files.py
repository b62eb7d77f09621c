"""The log files themselves: list them, name their directory, save what is chosen of them."""

from __future__ import annotations

from clusterrun.cli import output
from clusterrun.cli.log_reading import find_files
from clusterrun.cli.log_request import Request
from clusterrun.hostlist import fold_ranks
from clusterrun.logs.catalogue import Catalogue
from clusterrun.logs.files import Kind, file_size
from clusterrun.logs.index import count_lines


def print_path(request: Request) -> None:
    """Print the directory of the newest attempt's logs; of a foreign job each file."""
    paths = _paths(request)
    if request.form == "json":
        output.answer_json({"schema": "clusterrun.logs/1", "paths": paths})
        return
    for path in paths:
        output.answer(path)


def _paths(request: Request) -> list[str]:
    record = request.job.record
    if record is None:
        return [str(file.path) for file in find_files(request)]
    attempt = max(request.attempts, default=0)
    logs = record.paths.log(attempt, "any").parent if attempt else record.paths.logs_dir
    return [str(logs)]


def list_files(request: Request) -> None:
    """Print a table of the log files; of all attempts where none was named."""
    catalogue: Catalogue = request.catalogue
    newest = catalogue.newest_attempt()
    attempts = request.attempts if request.is_chosen else range(1, newest + 1)
    rows = [
        {
            "attempt": attempt,
            "node": file.node,
            "ranks": fold_ranks(file.ranks) if file.ranks else None,
            "lines": None if file.kind is Kind.PLAIN else count_lines(file),
            "size_bytes": file_size(file.path),
            "path": str(file.path),
        }
        for attempt in attempts
        for file in catalogue.files(attempt)
        if file.kind is not Kind.ERRORS
    ]
    if request.form == "json":
        output.answer_json({"schema": "clusterrun.logs/1", "files": rows})
        return
    cells = [["-" if value is None else str(value) for value in row.values()] for row in rows]
    output.answer_table(["ATTEMPT", "NODE", "RANKS", "LINES", "BYTES", "PATH"], cells)
