"""Events are read by their fields, whatever else stands in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterrun.rundir.events import Event, EventType, parse, read, read_ends, read_last

STEP = {"type": "step", "step": 7, "total": 9, "node": "n1", "attempt": 2, "ts": 5}


def test_the_order_of_the_keys_does_not_count() -> None:
    wanted = Event(at=5.0, type=EventType.STEP, attempt=2, node="n1", step=7, total=9)
    for keys in (sorted(STEP), sorted(STEP, reverse=True)):
        assert parse(json.dumps({key: STEP[key] for key in keys}).encode()) == wanted


@pytest.mark.parametrize(
    "change",
    [{"ts": "x"}, {"ts": None}, {"attempt": True}, {"attempt": "1"}, {"type": "own"}, {"type": []}],
)
def test_what_is_no_event_is_none(change: dict[str, Any]) -> None:
    assert parse(json.dumps({**STEP, **change}).encode()) is None


def test_a_field_of_another_type_is_none() -> None:
    found = parse(json.dumps({**STEP, "step": "many", "total": 1.5}).encode())
    assert found is not None
    assert (found.step, found.total) == (None, None)


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "n1.jsonl"
    line = json.dumps(STEP).encode()
    path.write_bytes(b"\n".join((line, b'{"type": "step"', b"\xff", b"[" * 9999, line, b'{"ty')))
    assert [event.step for event in read(path, (EventType.STEP,))] == [7, 7]
    assert list(read(path, (EventType.PEAKS,))) == []
    assert list(read(tmp_path / "missing", (EventType.STEP,))) == []
    assert [event.step for event in read_ends(path, 2)] == [7, 7]
    assert list(read_ends(path, 1)) == []


def test_what_an_attempt_wrote_last_is_found_before_a_later_attempt(tmp_path: Path) -> None:
    path, note = tmp_path / "n1.jsonl", {**STEP, "type": "note", "note": {"text": "x"}}
    rows = [{**row, "attempt": n} for n in (1, 2, 3) for row in (*[STEP] * 9000, note)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for attempt in (1, 2, 3):
        assert [event.note for event in read_last(path, attempt, EventType.NOTE)] == [note["note"]]
    assert list(read_last(tmp_path / "none", 1, EventType.NOTE)) == []
