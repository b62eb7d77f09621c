"""A search on several processors finds what one finds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clusterrun.logs import narrow as narrowing
from clusterrun.logs.files import Kind, OpenFiles
from clusterrun.logs.lines import LogLine
from clusterrun.logs.merge import merge_sources
from clusterrun.logs.narrow import Tell, narrow, say_nothing
from clusterrun.logs.newest import newest
from clusterrun.logs.sources import Source
from tests.logs.corpus import T0, raw
from tests.logs.reading import blocks_of, whole, write
from tests.logs.strategies import CORPORA


class OneProcess:
    """Do the work of a pool here: other processes would not see the small sizes of the test."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> OneProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, act: Callable[..., object], items: Iterable[object]) -> Iterator[object]:
        return map(act, items)


def narrowed(
    sources: list[Source], *, piece: int, block: int, tell: Tell = say_nothing
) -> list[Source]:
    with (
        patch.object(narrowing, "ProcessPoolExecutor", OneProcess),
        patch.object(narrowing, "BIG_BYTES", -1),
        patch.object(narrowing, "_PIECE_BYTES", piece),
        patch.object(narrowing, "_BLOCK_BYTES", block),
        patch.object(narrowing.threading, "active_count", lambda: 1),
        patch.object(narrowing.os, "sched_getaffinity", lambda pid: {0, 1}),
    ):
        return narrow(sources, tell)


@given(
    CORPORA,
    st.sampled_from([(b"x",), (b"loss=", b"\0\0"), (b"nowhere",)]),
    st.integers(1, 300),
    st.integers(1, 100),
    st.integers(0, 9),
    st.sampled_from([Kind.LOG, Kind.PLAIN]),
)
@example(  # a block that ends in what looks like a whole head and is not
    corpus={"n1": b"%d - o \n%d 3 ox\n" % (T0, T0)},
    literals=(b"x",),
    piece=1,
    block=1,
    count=0,
    kind=Kind.LOG,
)
def test_what_is_narrowed_gives_the_same_lines(
    tmp_path_factory: pytest.TempPathFactory,
    corpus: dict[str, bytes],
    literals: tuple[bytes, ...],
    piece: int,
    block: int,
    count: int,
    kind: Kind,
) -> None:
    def wants(line: LogLine) -> bool:
        return any(literal in line.text for literal in literals)

    directory = tmp_path_factory.mktemp("logs")
    files = [write(directory, node, content, kind) for node, content in corpus.items()]
    plain = [whole(file, wants=wants) for file in files]
    searched = [replace(source, literals=literals) for source in plain]
    expected = list(merge_sources(plain))
    some = narrowed(searched, piece=piece, block=block)
    with blocks_of(block):
        assert list(merge_sources(some)) == expected
        assert newest(some, count) == expected[max(len(expected) - count, 0) :]


def test_where_nothing_can_match_nothing_is_read(tmp_path: Path) -> None:
    lines = [raw(T0 + i, 0, "o", "here" if i in (300, 301, 800) else "x" * 9) for i in range(1000)]
    size = len(lines[0])
    files = [write(tmp_path, "n1", b"".join(lines)), write(tmp_path, "n2", lines[0] * 99)]
    sources = [whole(file, literals=(b"here",)) for file in files]
    heard: list[tuple[int, int]] = []
    (found,) = narrowed(
        sources, piece=400 * size, block=10 * size, tell=lambda *bytes_: heard.append(bytes_)
    )
    total = sum(source.end for source in sources)
    assert heard[0] == (400 * size, total)
    assert heard[-1] == (total, total)
    assert found.file.node == "n1"
    assert found.stretches is not None
    assert sum(end - start for start, end in found.stretches) < 60 * size


def test_what_is_not_searched_for_literals_stays_as_it_is(tmp_path: Path) -> None:
    sources = [whole(write(tmp_path, "n1", raw(T0, 0, "o", "x") * 99))]
    assert narrowed(sources, piece=100, block=100) == sources


def test_damage_without_a_beginning_of_a_line_is_not_looked_through_for_each_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "n1", b"")
    os.truncate(file.path, 64 << 20)
    with file.path.open("ab") as log:
        log.write(b"\n" + raw(T0, 0, "o", "here"))
    read: list[int] = []
    original = OpenFiles.read

    def counted(self: OpenFiles, path: Path, offset: int, size: int) -> bytes:
        read.append(size)
        return original(self, path, offset, size)

    monkeypatch.setattr(OpenFiles, "read", counted)
    (found,) = narrowed([whole(file, literals=(b"here",))], piece=8 << 20, block=1 << 20)
    assert found.stretches is not None
    assert found.stretches[-1][1] == found.end
    assert sum(read) < 256 << 20


_SEARCH = """
import sys
from pathlib import Path
from clusterrun.logs import narrow, newest
from clusterrun.logs.files import LogFile
from clusterrun.logs.merge import merge_sources
from clusterrun.logs.sources import Source
narrow.BIG_BYTES = newest.BIG_BYTES = 0
narrow._PIECE_BYTES = 100_000
narrow.os.sched_getaffinity = lambda pid: {0, 1}
path = Path(sys.argv[1])
source = Source(file=LogFile(node="n1", path=path), start=0, end=path.stat().st_size,
    wants=lambda line: b"here" in line.text, literals=(b"here",))
(narrowed,) = narrow.narrow([source])
print(narrowed.stretches is not None)
print([line.text.decode() for line in merge_sources([source])])
print([line.text.decode() for line in newest.newest([source], 1)])
"""


def test_other_processes_do_the_search(tmp_path: Path) -> None:
    lines = [raw(T0 + i, 0, "o", "x" * 50) for i in range(5000)]
    for place in (7, 4990):
        lines[place] = raw(T0 + place, 0, "o", f"here {place}")
    path = write(tmp_path, "n1", b"".join(lines)).path
    argv = [sys.executable, "-c", _SEARCH, str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.splitlines() == ["True", "['here 7', 'here 4990']", "['here 4990']"]
    assert done.stderr == ""
