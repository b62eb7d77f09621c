from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.errors import UsageError
from clusterrun.shared.amounts import (
    clock,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_seconds,
    parse_slurm_minutes,
)

MINUTES = {
    **{"30": 30, "0030": 30, "90:00": 90, "0:01": 1, "1:00:01": 61, "2-0": 2880, "0-1": 60},
    **{"2-03:04": 2 * 1440 + 3 * 60 + 4, "2-03:04:05": 2 * 1440 + 3 * 60 + 5, " 1:00:00 ": 60},
    **{"1h": 60, "36H": 2160, "1h30m": 90, "1.5h": 90, "2d 12h": 3600, "90 minutes": 90, "61s": 2},
}
ENDLESS = ("UNLIMITED", "infinite", "Unlimited", "0", "00:00:00", "-1")
NO_LIMIT = (
    *("", "abc", "1:2:3:4", "1-", "-5", "1h30", "h", "1w", "1-2:3:4:5", "٣٠", "1\n2"),
    *("25:99", "1:90:00", "1-0:60"),
)


def test_each_format_is_read_as_whole_minutes_and_all_else_refused() -> None:
    assert {text: parse_slurm_minutes(text) for text in MINUTES} == MINUTES
    for text in ENDLESS:
        with pytest.raises(UsageError, match="means no limit") as caught:
            parse_slurm_minutes(text)
        assert "backfilled" in caught.value.hints[0]
    for text in NO_LIMIT:
        with pytest.raises(UsageError, match="is not a time limit"):
            parse_slurm_minutes(text)
    for text in ("", "m", "-1", "10 fortnights", "1h30", "1:2:3:4", "NaN"):
        with pytest.raises(UsageError, match="is not a time span"):
            parse_seconds(text)


@given(st.integers(min_value=1, max_value=10**6))
def test_a_limit_and_a_span_differ_in_bare_numbers_only(number: int) -> None:
    hours = f"{number // 60}:{number % 60}:00"
    for text in (f"{number}m", f"{number}:00", hours, f"{number * 60}s"):
        assert parse_slurm_minutes(text) * 60 == parse_seconds(text)
    assert parse_slurm_minutes(str(number)) == number == parse_seconds(str(number))


@given(st.integers(min_value=1, max_value=10**8))
def test_what_is_written_is_read_back(number: int) -> None:
    assert parse_slurm_minutes(clock(60 * number)) == number
    assert parse_seconds(format_seconds(number)) == number


@given(st.integers(0, 10**5), st.integers(0, 10**5), st.integers(0, 59), st.integers(0, 59))
def test_a_limit_is_never_shorter_than_what_was_written(d: int, h: int, m: int, s: int) -> None:
    seconds = ((d * 24 + h) * 60 + m) * 60 + s
    if seconds:
        minutes = parse_slurm_minutes(f"{d}-{h}:{m}:{s}")
        assert (minutes - 1) * 60 < seconds <= minutes * 60


@given(st.text())
def test_any_text_is_a_time_a_size_or_a_usage_error(text: str) -> None:
    for parse in (parse_slurm_minutes, parse_seconds, parse_bytes):
        with contextlib.suppress(UsageError):
            assert parse(text) >= 0


# Sizes


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


@given(st.integers(0, 10**9), st.sampled_from("kmbt"))
def test_a_unit_is_read_in_either_case(number: int, unit: str) -> None:
    assert parse_count(f"{number}{unit}") == parse_count(f"{number}{unit.upper()}")
