"""How lines look to programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from clusterrun.logs.views import JsonView
from clusterrun.rundir.paths import RunPaths
from tests.logs.corpus import T0, line


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
