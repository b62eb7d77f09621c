"""Cut lines come together again, by rank and stream, and no byte is lost on the way."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.logformat.lines import Gap, LogLine
from clusterrun.logs import views
from clusterrun.logs.views import JsonView, RawView, View
from clusterrun.rundir.paths import RunPaths
from tests.logs.corpus import T0, line


class Joined(View):
    """A view, and the lines that it has shown since it was last asked."""

    def __init__(self, *, exact: bool = False) -> None:
        super().__init__(write=lambda text: None, exact=exact)
        self._shown: list[LogLine] = []

    def _show_line(self, line: LogLine) -> None:
        self._shown.append(line)

    def _show_gap(self, line: LogLine, gap: Gap) -> None:
        raise AssertionError(gap)

    def take(self) -> list[LogLine]:
        found, self._shown = self._shown, []
        return found


def fed(view: Joined, *lines: LogLine) -> list[tuple[bytes, bool]]:
    view.show_all(lines)
    return [(entry.text, entry.partial) for entry in view.take()]


def piece(stream: str, text: bytes, *, rank: int = 0, node: str = "n1") -> LogLine:
    return line(T0, node, rank, stream, text)


def test_pieces_are_joined_by_rank_and_stream() -> None:
    view = Joined()
    assert fed(view, piece("O", b"one "), piece("o", b"other", rank=1), piece("E", b"err ")) == [
        (b"other", False)
    ]
    assert fed(view, piece("O", b"long "), piece("e", b"or"), piece("o", b"line")) == [
        (b"err or", False),
        (b"one long line", False),
    ]
    view.drain()
    assert view.take() == []


def test_a_joined_line_is_where_it_began_and_when_its_last_piece_was_written() -> None:
    view = Joined()
    view.show(line(T0, "n1", 0, "O", b"a", offset=7))
    view.show(line(T0 + 9, "n1", 0, "o", b"b", offset=70))
    assert view.take() == [line(T0 + 9, "n1", 0, "o", b"ab", offset=7)]


def test_an_endless_progress_bar_takes_no_memory() -> None:
    view = Joined()
    for i in range(10_000):
        fed(view, piece("O", b"%7d %%\r" % i))
    assert view._held_bytes < 50
    assert fed(view, piece("o", b"done")) == [(b"done", False)]


def test_lines_without_end_take_bounded_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "HELD_BYTES", 100)
    view = Joined(exact=True)
    given_back = fed(view, *(piece("O", b"x" * 30, rank=rank) for rank in range(1000)))
    assert view._held_bytes <= 100
    view.drain()
    assert len(given_back) + len(view.take()) == 1000
    assert view._held_bytes == 0


SOURCES = list(itertools.product(("n1", "n2"), (0, 1), "oe"))
_actions = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(SOURCES), st.booleans(), st.binary(max_size=5)), st.just("pause")
    ),
    max_size=40,
)


@given(_actions)
def test_bytes_of_each_source_stay_whole_and_in_order(actions: list[object]) -> None:
    view = Joined(exact=True)
    came: dict[object, bytes] = dict.fromkeys(SOURCES, b"")
    went = came.copy()
    for action in actions:
        if isinstance(action, tuple):
            (node, rank, stream), cut, text = action
            came[node, rank, stream] += text + (b"" if cut else b"\n")
            letter = stream.upper() if cut else stream
            view.show(line(T0, node, rank, letter, text))
        else:
            view.pause()
    view.drain()
    for entry in view.take():
        source = (entry.node, entry.rank, entry.stream.value)
        went[source] += entry.text + (b"" if entry.partial else b"\n")
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


# How lines look to programs


class Objects:
    def __init__(self) -> None:
        self._written: list[bytes] = []
        self.view = JsonView(
            write=self._written.append,
            paths=RunPaths(root=Path("/run")),
            procs_per_node=8,
            attempt=2,
        )

    def take(self) -> list[dict[str, Any]]:
        self.view.drain()
        taken = [json.loads(text) for text in self._written]
        self._written.clear()
        return taken


def test_an_object_has_every_field_in_this_order() -> None:
    objects = Objects()
    objects.view.show(line(T0 + 204_113, "n3", 13, "E", b"caf\xe9 \x1b[1m", offset=17))
    (data,) = objects.take()
    assert list(data.items()) == [
        ("type", "line"),
        ("ts", "2023-11-14T22:13:20.204113Z"),
        ("node", "n3"),
        ("rank", 13),
        ("local_rank", 5),
        ("stream", "err"),
        ("attempt", 2),
        ("level", None),
        ("text", "caf� \x1b[1m"),
        ("file", "logs/a2/n3.log"),
        ("offset", 17),
        ("partial", True),
    ]


def test_lines_of_errors_are_told_from_others_for_each_source() -> None:
    objects = Objects()
    texts = b"Traceback (most recent call last):", b'  File "a.py"', b"KeyError: 1", b"fine"
    for text in texts:
        for rank in (0, 1):
            objects.view.show(line(T0, "n1", rank, "e", text if rank else b"fine"))
    levels = [(data["rank"], data["level"]) for data in objects.take()]
    assert [level for rank, level in levels if rank == 1] == ["error", "error", "error", None]
    assert [level for rank, level in levels if rank == 0] == [None] * 4


def test_a_new_attempt_ends_the_lines_of_the_last() -> None:
    objects = Objects()
    objects.view.show(line(T0, "n1", 0, "O", b"a"))
    objects.view.start_attempt(3)
    objects.view.show(line(T0, "n1", 0, "o", b"b"))
    assert [(d["attempt"], d["file"], d["text"], d["partial"]) for d in objects.take()] == [
        (2, "logs/a2/n1.log", "a", True),
        (3, "logs/a3/n1.log", "b", False),
    ]


def test_lost_bytes_are_an_object_in_their_place() -> None:
    objects = Objects()
    objects.view.show(line(T0, "n1", 3, "O", b"begun"))
    objects.view.show(line(T0, "n1", 3, "g", b"o 1048576 disk full"))
    objects.view.show(line(T0, "n1", None, "z", b"0 done"))
    begun, gap = objects.take()
    assert (begun["text"], begun["partial"]) == ("begun", True)
    assert gap == {
        "type": "gap",
        "ts": "2023-11-14T22:13:20.000000Z",
        "node": "n1",
        "rank": 3,
        "stream": "out",
        "bytes": 1048576,
        "reason": "disk full",
    }


@given(st.lists(st.binary()))
def test_every_line_is_an_object_of_its_own_whatever_its_bytes(texts: list[bytes]) -> None:
    objects = Objects()
    for text in texts:
        objects.view.show(line(T0, "n1", 0, "o", text))
    assert [data["text"] for data in objects.take()] == [
        t.decode("utf-8", "replace") for t in texts
    ]
