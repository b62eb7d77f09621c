"""The format of one line, and which lines a view wants."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.logformat import lines
from clusterrun.logformat.lines import LogLine, parse_line
from clusterrun.logs import text
from tests.logs.corpus import line, raw


@pytest.mark.parametrize("module", [lines, text])
def test_examples_in_the_docstrings_hold(module: object) -> None:
    result = doctest.testmod(module)
    assert result.attempted >= 1
    assert result.failed == 0


def parse(content: bytes) -> LogLine:
    return parse_line(content, node="n1", offset=7, near_us=5)


@given(
    st.integers(10**15, 10**16 - 1),
    st.none() | st.integers(0, 10**9 - 1),
    st.sampled_from("oelaOELA"),
    st.binary().filter(lambda text: b"\n" not in text),
)
def test_every_stamped_line_is_read_back(
    time_us: int, rank: int | None, stream: str, text: bytes
) -> None:
    written = raw(time_us, rank, stream, text).removesuffix(b"\n")
    assert parse(written) == line(time_us, "n1", rank, stream, text, offset=7)


@pytest.mark.parametrize(
    "torn",
    [
        b"",
        b"170000",
        b"1700000000000000",
        b"1700000000000000 0",
        b"1700000000000000 0 x text",
        b"1700000000000000 -1 o text",
        b"1700000000000000 0 oo text",
        b" 0 o text",
        b"17000000000000000 0 o in a far year",
        b"170000000000000 0 o in a year long ago",
        b"1700000000000000 1234567890 o text",
        b"\x00\x00\x00",
        "١٧ 0 o digits of another script".encode(),
    ],
)
def test_a_line_without_its_head_is_kept_whole(torn: bytes) -> None:
    assert parse(torn) == line(5, "n1", None, "l", torn, offset=7)


@given(st.binary())
def test_no_bytes_raise(content: bytes) -> None:
    assert isinstance(parse(content), LogLine)


def test_an_empty_text_is_a_line_with_and_without_its_space() -> None:
    assert parse(b"1700000000000000 3 o ") == parse(b"1700000000000000 3 o")
    assert parse(b"1700000000000000 3 o").text == b""
