"""Write files for the reading core, and make its blocks small enough that their edges matter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

from hypothesis import strategies as st

from clusterrun.logformat.lines import LogLine, Stream, parse_line
from clusterrun.logs import merge
from clusterrun.logs import sources as sources_module
from clusterrun.logs.sources import FileKind, LogFile, Source
from clusterrun.shared.hostlist import natural_key
from tests.logs.corpus import T0, raw


def write(directory: Path, node: str, content: bytes, kind: FileKind = FileKind.LOG) -> LogFile:
    path = directory / f"{node}.{kind.value}"
    path.write_bytes(content)
    return LogFile(node=node, path=path, kind=kind)


def whole(
    file: LogFile,
    *,
    takes: Callable[[int | None, Stream], bool] = lambda rank, stream: True,
    wants: Callable[[LogLine], bool] | None = None,
    literals: tuple[bytes, ...] = (),
) -> Source:
    return Source(
        file=file,
        start=0,
        end=file.path.stat().st_size,
        takes=takes,
        wants=wants,
        literals=literals,
    )


def newest(sources: Iterable[Source], count: int) -> Iterable[LogLine]:
    return list(merge.find_newest(sources, count))


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
            (merge, "MAX_HELD_BYTES", held_bytes),
            (merge, "_FIRST_BYTES", size),
            (merge, "_BLOCK_BYTES", 2 * size),
            (sources_module, "_BLOCK_BYTES", size),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


TEXTS = st.one_of(
    st.binary(max_size=20).map(lambda text: text.replace(b"\n", b"")),
    st.sampled_from([b"", b"x" * 60, b"\0" * 9, b"loss=1.5", b" 3 o x", b"\xff\xfe"]),
)
TORN = st.one_of(
    st.binary(max_size=24).map(lambda text: text.replace(b"\n", b"")),
    st.sampled_from([b"", b"\0" * 40, b"1700", b"%d 3" % T0, b"%d 3 ox" % T0, b"%d x o t" % T0]),
).map(lambda text: text + b"\n")
RANKS = st.none() | st.integers(0, 3)
STREAMS = st.sampled_from("oelaOEg")
NODES = st.sampled_from(["n1", "n2", "n10", "gpu-a", "n1.site"])


@st.composite
def contents(draw: st.DrawFn, *, is_torn: bool = True) -> bytes:
    """Draw the contents of a file: times that never run backwards, and damage."""
    lines = []
    time_us = T0
    for _ in range(draw(st.integers(0, 25))):
        if is_torn and draw(st.integers(0, 5)) == 0:
            lines.append(draw(TORN))
            continue
        time_us += draw(st.sampled_from([0, 0, 0, 1, 1, 5, 40]))
        lines.append(raw(time_us, draw(RANKS), draw(STREAMS), draw(TEXTS)))
    content = b"".join(lines)
    cut = draw(st.integers(0, 12)) if is_torn and draw(st.booleans()) else 0
    content = content[: len(content) - cut]
    return content.removesuffix(b"%d 3 o" % T0)  # what is left of a torn line may look whole


CORPORA = st.dictionaries(NODES, contents(), min_size=1, max_size=4)


def parsed(content: bytes, node: str) -> list[LogLine]:
    """Read a file line by line: a line without a head has the time of the one before it."""
    lines, offset, near_us = [], 0, 0
    for part in content.split(b"\n"):
        if part:
            line = parse_line(part, node=node, offset=offset, near_us=near_us)
            near_us = max(near_us, line.epoch_us)
            lines.append(line._replace(epoch_us=near_us))
        offset += len(part) + 1
    return lines


def merged(corpus: Mapping[str, bytes]) -> list[LogLine]:
    """Sort all lines at once."""
    lines = [line for node in corpus for line in parsed(corpus[node], node)]
    return sorted(lines, key=lambda line: (line.epoch_us, natural_key(line.node), line.offset))


def as_whole(line: LogLine) -> LogLine:
    """Return a piece that was chosen by its text as a line."""
    return line._replace(text=line.text + "…".encode(), partial=False) if line.partial else line
