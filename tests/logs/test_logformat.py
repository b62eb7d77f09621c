"""The format of one line, and which lines a view wants."""

from __future__ import annotations

import re

from hypothesis import assume, given
from hypothesis import strategies as st

from clusterrun.logformat.lines import STAMPED, LogLine, parse_line
from clusterrun.logformat.literals import required_literals
from clusterrun.logs.merge import find_stretches
from tests.logs.corpus import line, raw
from tests.logs.reading import contents


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


TORN = (
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
)


def test_a_line_without_its_head_is_kept_whole() -> None:
    for torn in TORN:
        assert parse(torn) == line(5, "n1", None, "l", torn, offset=7)


LITERALS = (
    (rb"RuntimeError", (b"RuntimeError",)),
    (rb"NCCL (WARN|INFO)", (b"NCCL ",)),
    (rb"a(?:bc)d", (b"abcd",)),
    (rb"\bfoo\b bar$", (b"foo bar",)),
    (rb"loss=(nan|inf)", (b"loss=",)),
    (rb"(?:cuda|nccl|gloo)", (b"cuda", b"nccl", b"gloo")),
    (rb"(?:error){2,}", (b"error",)),
    (rb"x+yz", (b"yz",)),
    (rb"colou?r", (b"colo",)),
    (rb"(?!not)this", (b"this",)),
    (rb"\d+", ()),
    (rb"", ()),
    (rb"(?:abc)?", ()),
    (rb"abc|", ()),
    (rb"abc|\d", ()),
    (rb"(?i)error", ()),
    (rb"(?i:error) 7", (b" 7",)),
    (rb"step [0-9]+", (b"step ",)),
    (rb"(a)\1bc", (b"bc",)),
    (b"\xc3\xa9t\xc3\xa9", ("été".encode(),)),
)


def test_literals_of() -> None:
    for pattern, literals in LITERALS:
        assert required_literals([re.compile(pattern)]) == literals, pattern


def test_more_literals_than_are_worth_a_search_are_none() -> None:
    assert required_literals([re.compile(b"|".join(b"%d%da" % (i, i) for i in range(20)))]) == ()


_atoms = st.sampled_from(
    rb"a b ab c abc . [ab] [^a] \d \b ^ \. (?i:ab) (?=a) (?!b) (?:a) (b)".split()
)
_sequences = st.recursive(
    _atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map(b"".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: b"(" + b"|".join(parts) + b")"),
        st.tuples(inner, st.sampled_from([b"?", b"*", b"+", b"{2}", b"+?", b"{0,2}"])).map(
            lambda pair: b"(?:" + pair[0] + b")" + pair[1]
        ),
    ),
    max_leaves=6,
)
_patterns = st.lists(_sequences, min_size=1, max_size=4).map(b"".join)
_texts = st.lists(st.sampled_from([b"a", b"b", b"ab", b"c", b"A", b"B", b".", b"1"])).map(b"".join)


@given(st.lists(_patterns, min_size=1, max_size=2), _texts)
def test_every_match_contains_one_of_the_literals(sources: list[bytes], text: bytes) -> None:
    patterns = [re.compile(source) for source in sources]
    literals = required_literals(patterns)
    assume(literals)
    for pattern in patterns:
        for match in pattern.finditer(text):
            assert any(literal in match[0] for literal in literals)


@given(contents(), st.lists(st.sampled_from([b"x", b"loss", b" 3 o", b"\0\0"]), min_size=1))
def test_stretches_are_the_lines_with_a_literal_each_from_a_line_with_a_head(
    content: bytes, literals: list[bytes]
) -> None:
    found = find_stretches(content, tuple(literals))
    covered = b"".join(content[start:end] for start, end in found)
    ends = [0, *(end for _, end in found)]
    assert all(start >= end for (start, _), end in zip(found, ends, strict=False))
    for start, end in found:
        assert start == 0 or content[start - 1 : start] == b"\n"
        assert end == len(content) or content[end - 1 : end] == b"\n"
        assert STAMPED.match(content, start) or start in ends or start == 0
    for part in content.splitlines(keepends=True) if b"\r" not in content else []:
        if any(literal in part for literal in literals):
            assert part in covered
