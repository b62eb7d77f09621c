"""Write log files as the agents do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from clusterrun.logformat.lines import RECORDS, STAMPED, LogLine, Stream, who_wrote
from clusterrun.logformat.symptoms import Classifier
from clusterrun.logs.merge import merge_sources
from clusterrun.logs.sources import EVERYTHING, Query, Source, find_files, sources_of
from clusterrun.rundir.paths import RunPaths

T0 = 1_700_000_000_000_000


def raw(time_us: int, rank: int | None, stream: str, text: bytes | str) -> bytes:
    body = text.encode() if isinstance(text, str) else text
    return f"{time_us} {'-' if rank is None else rank} {stream} ".encode() + body + b"\n"


def write_log(paths: RunPaths, attempt: int, node: str, lines: Iterable[bytes]) -> Path:
    """Append to a node's log of an attempt, start the attempt if it is new; write its side file."""
    paths.attempt(attempt).mkdir(parents=True, exist_ok=True)
    path = paths.log(attempt, node)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(b"".join(lines))
    paths.log_errors(attempt, node).write_bytes(b"".join(side_lines(path.read_bytes())))
    return path


def side_lines(log: bytes) -> Iterator[bytes]:
    """Yield the lines of a log's side file, none of them cut or left out."""
    classifier, offset = Classifier(), 0
    for text in log.splitlines(keepends=True):
        head = STAMPED.match(text)
        if head and text.endswith(b"\n"):
            rank, stream, _ = who_wrote(head)
            kind = classifier.classify((rank, stream), text[head.end() + 1 : -1])
            if kind or rank is None or stream in RECORDS:
                place = f" {kind or '-'} {offset}".encode()
                yield text[: head.end()] + place + text[head.end() :]
        offset += len(text)


def line(
    time_us: int, node: str, rank: int | None, stream: str, text: bytes, *, offset: int = 0
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
