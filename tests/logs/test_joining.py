"""Cut lines come together again, by rank and stream, and no byte is lost on the way."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from clusterrun.logformat.lines import LogLine
from clusterrun.logs.views import Joiner, RawView
from tests.logs.corpus import T0, line


def fed(joiner: Joiner, *lines: LogLine) -> list[tuple[bytes, bool]]:
    found = [joiner.feed(entry) for entry in lines]
    return [(entry.text, entry.partial) for entry in found if entry]


def piece(stream: str, text: bytes, *, rank: int = 0, node: str = "n1") -> LogLine:
    return line(T0, node, rank, stream, text)


def test_pieces_are_joined_by_rank_and_stream() -> None:
    joiner = Joiner()
    assert fed(joiner, piece("O", b"one "), piece("o", b"other", rank=1), piece("E", b"err ")) == [
        (b"other", False)
    ]
    assert fed(joiner, piece("O", b"long "), piece("e", b"or"), piece("o", b"line")) == [
        (b"err or", False),
        (b"one long line", False),
    ]
    assert list(joiner.drain()) == []


def test_a_joined_line_is_where_it_began_and_when_its_last_piece_was_written() -> None:
    joiner = Joiner()
    joiner.feed(line(T0, "n1", 0, "O", b"a", offset=7))
    assert joiner.feed(line(T0 + 9, "n1", 0, "o", b"b", offset=70)) == line(
        T0 + 9, "n1", 0, "o", b"ab", offset=7
    )


def test_an_endless_progress_bar_takes_no_memory() -> None:
    joiner = Joiner()
    for i in range(10_000):
        fed(joiner, piece("O", b"%7d %%\r" % i))
    assert joiner._held_bytes < 50
    assert fed(joiner, piece("o", b"done")) == [(b"done", False)]


def test_lines_without_end_take_bounded_memory_together() -> None:
    joiner = Joiner(exact=True, most_held=100)
    given_back = fed(joiner, *(piece("O", b"x" * 30, rank=rank) for rank in range(1000)))
    assert joiner._held_bytes <= 100
    assert len(given_back) + len(list(joiner.drain())) == 1000
    assert joiner._held_bytes == 0


SOURCES = list(itertools.product(("n1", "n2"), (0, 1), "oe"))
_actions = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(SOURCES), st.booleans(), st.binary(max_size=5)),
        st.just("pause"),
    ),
    max_size=40,
)


@given(_actions)
def test_bytes_of_each_source_stay_whole_and_in_order(actions: list[object]) -> None:
    joiner = Joiner(exact=True)
    came: dict[object, bytes] = dict.fromkeys(SOURCES, b"")
    went = came.copy()

    def give(entry: LogLine | None) -> None:
        if entry:
            source = (entry.node, entry.rank, entry.stream.value)
            went[source] += entry.text + (b"" if entry.partial else b"\n")

    for action in actions:
        if isinstance(action, tuple):
            (node, rank, stream), cut, text = action
            came[node, rank, stream] += text + (b"" if cut else b"\n")
            letter = stream.upper() if cut else stream
            give(joiner.feed(line(T0, node, rank, letter, text)))
        else:
            for entry in joiner.pause():
                give(entry)
    for entry in joiner.drain():
        give(entry)
    assert went == came


@given(st.lists(st.tuples(st.sampled_from("oOeEg"), st.integers(0, 2)), max_size=9))
def test_raw_lines_are_the_same_many_at_once_as_one_by_one(heads: list[tuple[str, int]]) -> None:
    lines = [piece(s, b"o %d gone" % i, rank=r) for i, (s, r) in enumerate(heads)]
    written: list[list[bytes]] = [[], []]
    one, many = (RawView(write=to.append, note=lambda text: None) for to in written)
    for entry in lines:
        one.show(entry)
    for start in range(0, len(lines), 3):
        many.show_all(lines[start : start + 3])
    assert b"".join(written[0]) == b"".join(written[1])


def test_raw_tells_lost_bytes_beside_the_rest() -> None:
    written: list[bytes] = []
    told: list[str] = []
    view = RawView(write=written.append, note=told.append)
    view.show(piece("O", b"begun", rank=3))
    view.show(piece("g", b"o 5 disk full", rank=3))
    view.show(line(T0, "n1", None, "z", b"0 done"))
    assert (b"".join(written), told) == (b"begun", ["n1:3 ~ 5 bytes of stdout lost: disk full"])
