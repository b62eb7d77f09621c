"""Moments as people write them on the command line."""

from __future__ import annotations

import contextlib
import time
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.cli.logs.request import parse_moment
from clusterrun.errors import UsageError

ZONE = timezone(timedelta(hours=2))
NOW = datetime(2026, 8, 1, 12, 0, 30, tzinfo=ZONE)


def moment(text: str) -> datetime:
    epoch_us = parse_moment(text, NOW)
    return datetime.fromtimestamp(0, ZONE) + timedelta(microseconds=epoch_us)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("10m", "2026-08-01T11:50:30+02:00"),
        ("90s", "2026-08-01T11:59:00+02:00"),
        ("2d", "2026-07-30T12:00:30+02:00"),
        ("11:59", "2026-08-01T11:59:00+02:00"),
        ("9:05:07.25", "2026-08-01T09:05:07.250000+02:00"),
        ("12:01", "2026-07-31T12:01:00+02:00"),
        ("2026-07-01", "2026-07-01T00:00:00+02:00"),
        ("2026-07-01T12:30", "2026-07-01T12:30:00+02:00"),
        ("2026-07-01 12:30:15", "2026-07-01T12:30:15+02:00"),
        ("2026-07-01T10:30:15Z", "2026-07-01T12:30:15+02:00"),
        ("2026-07-01T12:41:15.204113Z", "2026-07-01T14:41:15.204113+02:00"),
        ("2026-07-01T10:30+05:30", "2026-07-01T07:00:00+02:00"),
    ],
)
def test_forms_of_a_moment(text: str, meant: str) -> None:
    assert moment(text) == datetime.fromisoformat(meant)


@pytest.mark.parametrize(
    "text", ["", "10", "yesterday", "25:00", "12:60", "2026-13-01", "-5m", "step:4", "5w"]
)
def test_other_texts_are_no_moments(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        moment(text)
    assert caught.value.message == f"'{text}' is not a time"
    assert "1h30m" in caught.value.hints[0]


def test_an_age_is_time_that_has_passed_whatever_the_clocks_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        now = datetime(2026, 3, 29, 3, 30)  # the clock went from 02:00 to 03:00
        found = parse_moment("2h", now)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert found == datetime(2026, 3, 28, 23, 30, tzinfo=timezone.utc).timestamp() * 1_000_000


@given(st.text(max_size=30))
def test_any_text_is_a_moment_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        moment(text)
