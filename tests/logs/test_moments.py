"""Moments as people write them on the command line."""

from __future__ import annotations

import json
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.errors import UsageError
from clusterrun.logs.moments import parse_moment, step_finder
from clusterrun.rundir.paths import RunPaths

ZONE = timezone(timedelta(hours=2))
NOW = datetime(2026, 8, 1, 12, 0, 30, tzinfo=ZONE)


def no_steps(step: int) -> int:
    raise AssertionError(step)


def moment(text: str) -> datetime:
    epoch_us = parse_moment(text, now=NOW, find_step=no_steps)
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
    "text", ["", "10", "yesterday", "25:00", "12:60", "2026-13-01", "-5m", "step:", "step:x", "5w"]
)
def test_other_texts_are_no_moments(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        moment(text)
    assert caught.value.message == f"'{text}' is not a time"
    assert "step:4000" in caught.value.hints[0]


def test_a_time_without_a_zone_is_this_machines_with_its_summer_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        found = parse_moment("2026-07-01T12:00", now=datetime(2026, 1, 1), find_step=no_steps)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert found == datetime(2026, 7, 1, 10, tzinfo=timezone.utc).timestamp() * 1_000_000


def test_an_age_is_time_that_has_passed_whatever_the_clocks_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        now = datetime(2026, 3, 29, 3, 30)  # the clock went from 02:00 to 03:00
        found = parse_moment("2h", now=now, find_step=no_steps)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert found == datetime(2026, 3, 28, 23, 30, tzinfo=timezone.utc).timestamp() * 1_000_000


def test_an_age_may_be_longer_than_any_log() -> None:
    assert parse_moment("999999999999d", now=NOW, find_step=no_steps) < 0


@given(st.text(max_size=30))
def test_any_text_is_a_moment_or_a_usage_error(text: str) -> None:
    try:
        moment(text)
    except UsageError:
        pass
    except AssertionError:
        assert text.strip().startswith("step:")


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Leave events behind as the agents do: a step a second at most, other events between."""
    paths = RunPaths(root=tmp_path)
    paths.events_dir.mkdir()
    events: list[dict[str, object]] = [{"ts": 5.0, "type": "started", "attempt": 1, "node": "n1"}]
    for attempt, ts, step in ((1, 10.5, 0), (1, 11.5, 40), (1, 12.5, 80), (2, 20.0, 60)):
        about = {"attempt": attempt, "node": "n1", "rank": 0, "step": step, "total": 100}
        event = {"ts": ts, "type": "step", **about, "metrics": {"step": 7}}
        events.append(event if step != 40 else dict(reversed(event.items())))  # in any order
    text = "".join(json.dumps(event) + "\n" for event in events)
    paths.events("n1").write_text(text + '{"ts": 30.0, "type": "st')
    paths.events("a0").write_text('{"ts": 1.0, "type": "started", "attempt": 1, "node": "a0"}\n')
    return paths


def test_since_a_step_begins_before_that_step(paths: RunPaths) -> None:
    find = step_finder(paths, 1, before=True)
    assert [find(step) for step in (0, 40, 41, 80)] == [0, 10_500_000, 11_500_000, 11_500_000]


def test_until_a_step_ends_where_it_was_reached(paths: RunPaths) -> None:
    find = step_finder(paths, 1, before=False)
    assert [find(step) for step in (0, 40, 41)] == [10_500_000, 11_500_000, 12_500_000]
    assert step_finder(paths, 2, before=False)(50) == 20_000_000


def test_a_step_that_was_not_reached_is_told(paths: RunPaths) -> None:
    with pytest.raises(UsageError, match="step 81 was not reached; the newest reported step is"):
        step_finder(paths, 1, before=True)(81)
    with pytest.raises(UsageError, match="attempt 3 reported no step"):
        step_finder(paths, 3, before=True)(1)
