"""Stamped lines: byte for byte what was written, cut only between characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from clusterrun.logformat.lines import LINE_BYTES
from clusterrun.node.forward.stamp import Loss, Piece, Rate, split_pieces, stamp, whole_characters

NOW_US = 1_700_000_000_123_456

_data = st.lists(
    st.binary(max_size=40)
    | st.sampled_from([b"\n", b"\n\n", b"\r", b"a\nb\n", "é漢🙂".encode()])
    | st.integers(-3, 3).map(lambda n: b"x" * (LINE_BYTES + n)),
    max_size=8,
).map(b"".join)


def test_a_line_carries_microseconds_rank_and_stream() -> None:
    lines = stamp(Piece(b"x\ny\n", is_cut=False), NOW_US, "3", "e")
    assert lines == b"1700000000123456 3 e x\n1700000000123456 3 e y\n"
    assert stamp(Piece(b"50 %", is_cut=True), 5, "-", "l") == b"0000000000000005 - L 50 %\n"


def test_the_beginning_of_a_line_is_taken_where_asked_for_but_for_half_a_character() -> None:
    assert split_pieces(b"a\nb\xe6\xbc", with_rest=True) == [
        Piece(b"a\n", is_cut=False),
        Piece(b"b", is_cut=True),
    ]


@given(_data, st.booleans())
def test_pieces_are_the_data_in_order(data: bytes, with_rest: bool) -> None:
    pieces = split_pieces(data, with_rest=with_rest)
    taken = b"".join(piece.text for piece in pieces)
    assert data.startswith(taken)
    left = data[len(taken) :]
    assert b"\n" not in left
    assert len(left) <= (3 if with_rest else LINE_BYTES)
    for text, is_cut in pieces:
        assert text
        assert b"\n" not in text if is_cut else text.endswith(b"\n")
        assert max(map(len, text.split(b"\n"))) <= LINE_BYTES


@given(st.text(max_size=20), st.integers(0, 80))
def test_whole_characters_can_be_read(text: str, end: int) -> None:
    data = text.encode()
    end = min(end, len(data))
    cut = whole_characters(data, end)
    assert end - 3 <= cut <= end
    data[:cut].decode()


# The cap on lines


def test_lines_beyond_the_rate_are_lost_until_the_next_second() -> None:
    rate, piece = Rate(2), Piece(b"a\nb\nc\n", is_cut=False)
    lost = "more than 2 lines/s"
    assert list(rate.allow(piece, 100.0)) == [Piece(b"a\nb\n", is_cut=False), Loss(2, lost)]
    assert list(rate.allow(piece, 100.5)) == [Loss(6, lost)]
    assert next(rate.allow(piece, 101.0)) == Piece(b"a\nb\n", is_cut=False)
    assert list(rate.allow(Piece(b"d", is_cut=True), 101.0)) == [Loss(1, lost)]


@given(data=st.lists(st.text(max_size=8) | st.just("\n"), max_size=30).map("".join))
def test_what_is_given_and_what_is_lost_add_up(data: str) -> None:
    rate, pieces = Rate(3), split_pieces(data.encode(), with_rest=True)
    parts = [part for piece in pieces for part in rate.allow(piece, 100.0)]
    assert sum(p.size if isinstance(p, Loss) else len(p.text) for p in parts) == len(data.encode())
    assert all(p.text for p in parts if isinstance(p, Piece))
