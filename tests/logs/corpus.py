"""Write log files as the agents do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from clusterrun.logformat.lines import LogLine, Stream
from clusterrun.logs.files import find_files
from clusterrun.logs.merge import merge_sources
from clusterrun.logs.sources import EVERYTHING, Query, Source, sources_of
from clusterrun.rundir.paths import RunPaths

T0 = 1_700_000_000_000_000


def raw(time_us: int, rank: int | None, stream: str, text: bytes | str) -> bytes:
    body = text.encode() if isinstance(text, str) else text
    return f"{time_us} {'-' if rank is None else rank} {stream} ".encode() + body + b"\n"


def write_log(paths: RunPaths, attempt: int, node: str, lines: Iterable[bytes]) -> Path:
    """Append to a node's log of an attempt, and start the attempt if it is new."""
    paths.attempt(attempt).mkdir(parents=True, exist_ok=True)
    path = paths.log(attempt, node)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(b"".join(lines))
    return path


def write_side_file(paths: RunPaths, attempt: int, node: str, lines: Iterable[bytes]) -> None:
    """Append to the side file of errors; each line's text begins with its class and offset."""
    with paths.log_errors(attempt, node).open("ab") as file:
        file.write(b"".join(lines))


def line(
    time_us: int,
    node: str,
    rank: int | None,
    stream: str,
    text: bytes,
    *,
    offset: int = 0,
) -> LogLine:
    return LogLine(
        epoch_us=time_us,
        node=node,
        rank=rank,
        stream=Stream(stream.lower()),
        text=text,
        partial=stream.isupper(),
        offset=offset,
    )


def choose_sources(
    paths: RunPaths, attempt: int, query: Query, nodes: frozenset[str] | None = None
) -> list[Source]:
    return sources_of(find_files(paths, attempt, nodes), query)


def everything(paths: RunPaths, attempt: int = 1) -> list[LogLine]:
    """Read all lines of an attempt as `logs -a -n all` does."""
    return list(merge_sources(choose_sources(paths, attempt, EVERYTHING)))


def texts(lines: Iterable[object]) -> list[str]:
    return [line.text.decode() for line in lines if isinstance(line, LogLine)]
