"""Write files for the reading core, and make its blocks small enough that their edges matter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

from clusterrun.logformat.lines import LogLine, Stream
from clusterrun.logs import merge
from clusterrun.logs import sources as sources_module
from clusterrun.logs import tail as newest_module
from clusterrun.logs.files import FileKind, LogFile
from clusterrun.logs.sources import Part, Source


def write(directory: Path, node: str, content: bytes, kind: FileKind = FileKind.LOG) -> LogFile:
    path = directory / f"{node}.{kind.value}"
    path.write_bytes(content)
    return LogFile(node=node, path=path, kind=kind)


def whole(
    file: LogFile,
    *,
    part: Part = Part.ALL,
    takes: Callable[[int | None, Stream], bool] = lambda rank, stream: True,
    wants: Callable[[LogLine], bool] | None = None,
    literals: tuple[bytes, ...] = (),
) -> Source:
    return Source(
        file=file,
        start=0,
        end=file.path.stat().st_size,
        part=part,
        takes=takes,
        wants=wants,
        literals=literals,
    )


def newest(sources: Iterable[Source], count: int) -> Iterable[LogLine]:
    return newest_module.find_newest(sources, count).lines


def last(lines: Sequence[LogLine], count: int) -> list[LogLine]:
    """Take the last lines; pieces that continue each other count as one."""
    begun: set[object] = set()
    for start in range(len(lines), 0, -1):
        line = lines[start - 1]
        source = (line.node, line.rank, line.stream)
        count -= not (line.partial and source in begun)
        begun.add(source)
        if count < 0:
            return list(lines[start:])
    return list(lines)


def sources(directory: Path, corpus: Mapping[str, bytes]) -> list[Source]:
    return [whole(write(directory, node, content)) for node, content in corpus.items()]


@contextlib.contextmanager
def blocks_of(size: int, held_bytes: int = 1 << 26) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (merge, "_MIN_BLOCK_BYTES", size),
            (merge, "_MAX_BLOCK_BYTES", size),
            (merge, "_MAX_SKIP_BYTES", 4 * size),
            (merge, "_MAX_HELD_BYTES", held_bytes),
            (newest_module, "_FIRST_BYTES", size),
            (newest_module, "_BLOCK_BYTES", 2 * size),
            (newest_module, "_MAX_BLOCK_BYTES", 4 * size),
            (sources_module, "_LOOK_BYTES", size),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield
