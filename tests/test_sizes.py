from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.errors import UsageError
from clusterrun.shared.sizes import format_bytes, parse_bytes, parse_count

SIZES = {
    **{"1": 1, "7B": 7, "2k": 2048, "2KB": 2000, "3MiB": 3 << 20, "3mib": 3 << 20, "4 G": 4 << 30},
    **{" 1TiB ": 1 << 40, "79.5GiB": 159 << 29},
}


def test_each_unit_is_read_in_any_case_and_all_else_refused() -> None:
    assert {text: parse_bytes(text) for text in SIZES} == SIZES
    for text in ("", "G", ".5G", "-1", "1 2", "1Gib2", "1X", "unlimited", "٣"):
        with pytest.raises(UsageError, match="is not a size") as caught:
            parse_bytes(text)
        assert caught.value.hints == ("write 4096 (bytes), 64KiB, 200M or 1GiB",)
    counts = ("", "k", "1,000", "8BB", "8q", "-1", "inf", "٣", "1 0")
    assert {parse_count(text) for text in counts} == {None}


@given(st.integers(min_value=0, max_value=10**14))
def test_written_sizes_are_read_back(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size


@given(st.text())
def test_any_text_is_a_size_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_bytes(text) >= 0


@given(st.integers(0, 10**9), st.sampled_from("kmbt"))
def test_a_unit_is_read_in_either_case(number: int, unit: str) -> None:
    assert parse_count(f"{number}{unit}") == parse_count(f"{number}{unit.upper()}")
