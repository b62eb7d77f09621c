"""Lines with what the same source wrote before and after."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.logformat.lines import LogLine
from clusterrun.logs.context import Break, around, context_of, with_context
from clusterrun.logs.files import LogFile
from clusterrun.logs.merge import merge_sources
from clusterrun.logs.query import EVERYTHING
from clusterrun.logs.sources import sources_of
from tests.logs.corpus import T0, line, raw


def found(entries: Iterable[LogLine | Break]) -> list[str]:
    return ["--" if isinstance(e, Break) else e.text.decode() for e in entries]


def stream(*entries: tuple[int | None, str]) -> list[LogLine]:
    letters = {None: "l"}
    return [
        line(T0 + n, "n1", rank, letters.get(rank, "oe"[n % 2]), text.encode(), offset=n)
        for n, (rank, text) in enumerate(entries)
    ]


def is_hit(entry: LogLine) -> bool:
    return entry.text.startswith(b"!")


@pytest.mark.parametrize(
    ("texts", "count", "shown"),
    [
        ("a b !c d e", 1, "b !c d"),
        ("a b !c d e", 0, "!c"),
        ("!a b", 3, "!a b"),
        ("!a b c d !e", 1, "!a b -- d !e"),
        ("!a b c !d", 1, "!a b c !d"),
        ("!a b !c d", 1, "!a b !c d"),
        ("!a b !c", 0, "!a -- !c"),
        ("!a !b", 0, "!a !b"),
        ("a b", 2, ""),
    ],
)
def test_neighbours_come_with_a_line_and_stretches_are_parted(
    texts: str, count: int, shown: str, tmp_path: Path
) -> None:
    lines = stream(*((0, text) for text in texts.split()))
    assert found(with_context(lines, is_hit, count)) == shown.split()
    file = write(tmp_path, lines)
    hits = [entry for entry in everything(file) if is_hit(entry)]
    assert found(context_of(hits, {"n1": file}, count)) == shown.split()


def test_neighbours_are_of_the_same_rank_whatever_comes_between(tmp_path: Path) -> None:
    lines = stream((0, "a"), (1, "x"), (0, "!b"), (None, "y"), (1, "x"), (0, "c"), (1, "z"))
    assert found(with_context(lines, is_hit, 1)) == ["a", "!b", "c"]
    file = write(tmp_path, lines)
    hits = [entry for entry in everything(file) if is_hit(entry)]
    assert found(context_of(hits, {"n1": file}, 1)) == ["a", "!b", "c"]


def test_neighbours_of_the_launcher_are_its_own() -> None:
    lines = stream((None, "a"), (0, "x"), (None, "!b"))
    assert found(with_context(lines, is_hit, 1)) == ["a", "!b"]


def write(tmp_path: Path, lines: Iterable[LogLine]) -> LogFile:
    path = tmp_path / "n1.log"
    with path.open("wb") as file:
        for entry in lines:
            letter = entry.stream.value.upper() if entry.partial else entry.stream.value
            file.write(raw(entry.epoch_us, entry.rank, letter, entry.text))
    return LogFile(node="n1", path=path)


def everything(file: LogFile) -> list[LogLine]:
    return list(merge_sources(sources_of([file], EVERYTHING)))


@given(
    ranks=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    sizes=st.lists(st.sampled_from([0, 5, 3_000, 30_000]), min_size=30, max_size=30),
    place=st.integers(0, 29),
    count=st.integers(0, 5),
)
def test_a_file_is_read_around_a_line_as_if_it_were_read_whole(
    tmp_path_factory: pytest.TempPathFactory,
    ranks: list[int],
    sizes: list[int],
    place: int,
    count: int,
) -> None:
    entries = [
        line(T0 + n, "n1", rank, "oeOE"[n % 4], b"%d " % n + b"x" * sizes[n])
        for n, rank in enumerate(ranks)
    ]
    file = write(tmp_path_factory.mktemp("log"), entries)
    lines = everything(file)
    chosen = lines[place % len(lines)]
    mine = [entry for entry in lines if entry.rank == chosen.rank]
    at = mine.index(chosen)
    assert around(file, chosen, count) == (
        mine[max(at - count, 0) : at],
        mine[at + 1 : at + 1 + count],
    )


def test_nothing_is_looked_for_far_away(tmp_path: Path) -> None:
    lines = stream((0, "far"), *[(1, "x" * 60_000)] * 20, (0, "!here"), *[(1, "x" * 60_000)] * 20)
    file = write(tmp_path, [*lines, *stream((0, "far"))])
    (chosen,) = (entry for entry in everything(file) if entry.text == b"!here")
    assert around(file, chosen, 3) == ([], [])


def test_a_file_that_went_away_has_no_neighbours(tmp_path: Path) -> None:
    (chosen,) = stream((0, "a"))
    assert around(LogFile(node="n1", path=tmp_path / "gone.log"), chosen, 3) == ([], [])
