"""How lines look to people and to programs."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.logs.text import (
    SHOWN_BYTES,
    TextView,
    clock_time,
    json_line,
    last_state,
    node_colour,
    strip_controls,
)
from tests.logs.corpus import T0, line


def shown(view: TextView, *lines: tuple[int | None, str, bytes], node: str = "n1") -> list[str]:
    return [text for entry in lines for text in view.show(line(T0, node, *entry))]


def test_prefixes_are_aligned_and_mark_stderr_without_colour() -> None:
    view = TextView(nodes=["n1", "n10"], world_size=16)
    assert shown(view, (0, "o", b"a"), (13, "e", b"b"), (None, "l", b"c")) == [
        "n1:0   | a\n",
        "n1:13  ! b\n",
        "n1     | c\n",
    ]


def test_prefix_grows_for_a_longer_name_that_comes_late() -> None:
    view = TextView(nodes=[], world_size=100)
    assert shown(view, (0, "o", b"a")) == ["n1:0  | a\n"]
    assert shown(view, (99, "o", b"b"), node="n10") == ["n10:99 | b\n"]
    assert shown(view, (0, "o", b"c")) == ["n1:0   | c\n"]


def test_prefix_can_be_left_out() -> None:
    assert shown(TextView(nodes=[], world_size=1, prefix=False), (0, "o", b"  a")) == ["  a\n"]


def test_time_stands_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC-02")
    time.tzset()
    try:
        assert shown(TextView(nodes=[], world_size=1, timestamps=True), (0, "o", b"a")) == [
            "00:13:20.000 n1:0 | a\n"
        ]
        assert clock_time(T0 + 1_234_567) == "00:13:21.234"
        assert clock_time(0) == "--:--:--.---"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_colour_comes_from_the_name_of_the_node_and_red_is_for_stderr() -> None:
    view = TextView(nodes=[], world_size=1, colour=True)
    assert shown(view, (0, "e", b"\x1b[1mbold")) == [
        f"\x1b[{node_colour('n1')}mn1:0\x1b[0m \x1b[31m!\x1b[0m \x1b[1mbold\x1b[0m\n"
    ]


def test_colours_of_nodes_are_spread_and_never_red() -> None:
    colours = {node_colour(f"node{i:03}") for i in range(64)}
    assert len(colours) == 10
    assert not colours & {31, 91, 30, 37, 90, 97}
    assert node_colour("node001") == node_colour("node001")


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[38;2;1;2;3mrgb", "rgb"),
        ("\x1b[2J\x1b[Hcleared", "cleared"),
        ("\x1b[?1049hother screen", "other screen"),
        ("\x1b]0;title\x07a", "a"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;never ended", ""),
        ("\x1bP+q544e\x1b\\a", "a"),
        ("\x1bcreset", "reset"),
        ("\x1b(0lines", "lines"),
        ("a\x1b", "a"),
        ("a\x1b[", "a"),
        ("\x9b2Jc1", "2Jc1"),
        ("bell\x07 back\x08 nul\x00 del\x7f", "bell back nul del"),
        ("tab\tstays", "tab\tstays"),
        ("é 漢 🙂 stay", "é 漢 🙂 stay"),
    ],
)
def test_control_sequences_never_reach_the_terminal(text: str, plain: str) -> None:
    assert strip_controls(text, keep_colours=False) == plain


@given(st.text(st.sampled_from("\x1b[]P0123;?mJHa\x07\x9b\x9c\\\r\x08 \t")))
def test_no_control_character_is_left_but_whole_colours_and_tabs(text: str) -> None:
    plain = strip_controls(text, keep_colours=False)
    assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", plain)
    coloured = strip_controls(text, keep_colours=True)
    rest = re.sub(r"\x1b\[[0-9;:]*m", "", coloured)
    assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", rest)


def test_colours_stay_where_they_are_wanted_and_end_with_the_line() -> None:
    assert strip_controls("\x1b[31mred\x1b[2K", keep_colours=True) == "\x1b[31mred\x1b[0m"
    assert strip_controls("plain", keep_colours=True) == "plain"


def test_bytes_that_are_no_utf8_are_replaced() -> None:
    assert shown(TextView(nodes=[], world_size=1), (0, "o", b"a\xff\xc3b")) == ["n1:0 | a��b\n"]


@pytest.mark.parametrize(
    ("text", "state"),
    [("10%\r20%\r30%", "30%"), ("10%\r20%\r", "20%"), ("\rdone", "done"), ("\r", ""), ("a", "a")],
)
def test_a_progress_bar_shows_its_last_state(text: str, state: str) -> None:
    assert last_state(text) == state


def test_cut_lines_are_joined_by_rank_and_stream() -> None:
    view = TextView(nodes=[], world_size=1)
    assert shown(view, (0, "O", b"one "), (1, "o", b"other"), (0, "E", b"err ")) == [
        "n1:1 | other\n"
    ]
    assert shown(view, (0, "O", b"long "), (0, "e", b"or"), (0, "o", b"line")) == [
        "n1:0 ! err or\n",
        "n1:0 | one long line\n",
    ]
    assert list(view.drain()) == []


def test_a_line_whose_end_does_not_come_is_shown_with_a_mark() -> None:
    view = TextView(nodes=[], world_size=1)
    assert shown(view, (0, "O", b"Password: ")) == []
    assert [list(view.pause()) for _ in range(5)] == [[], [], [], ["n1:0 | Password: …\n"], []]
    assert shown(view, (0, "o", b"rest")) == ["n1:0 | rest\n"]
    assert shown(view, (0, "O", b"killed he")) == []
    assert list(view.drain()) == ["n1:0 | killed he…\n"]


def test_a_progress_bar_that_goes_on_and_on_is_shown_from_time_to_time() -> None:
    view = TextView(nodes=[], world_size=1)
    told: list[str] = []
    for percent in range(40):
        assert shown(view, (0, "E", b"\r%d %%" % percent)) == []
        told += view.pause()
    assert told == [f"n1:0 ! {percent} %…\n" for percent in (9, 19, 29, 39)]


def test_a_long_line_is_cut_and_says_by_how_much() -> None:
    view = TextView(nodes=[], world_size=1)
    pieces = [(0, "O", b"x" * 40_000)] * 3
    assert shown(view, *pieces, (0, "o", b"end")) == [
        f"n1:0 | {'x' * SHOWN_BYTES}…[+{120_003 - SHOWN_BYTES:,} bytes]\n"
    ]
    assert shown(view, (0, "o", b"y" * (SHOWN_BYTES + 1))) == [
        f"n1:0 | {'y' * SHOWN_BYTES}…[+1 bytes]\n"
    ]


@given(st.lists(st.text("ab\r", min_size=1), min_size=1))
def test_a_progress_bar_in_pieces_shows_what_it_would_in_one(pieces: list[str]) -> None:
    view = TextView(nodes=[], world_size=1)
    for piece in pieces:
        assert shown(view, (0, "O", piece.encode())) == []
    assert shown(view, (0, "o", b"")) == [f"n1:0 | {last_state(''.join(pieces))}\n"]


def test_an_endless_progress_bar_takes_no_memory() -> None:
    view = TextView(nodes=[], world_size=1)
    for i in range(10_000):
        shown(view, (0, "O", b"%7d %%\r" % i))
    (entry,) = view._open.values()
    assert len(entry.text) < 50
    assert shown(view, (0, "o", b"done")) == ["n1:0 | done\n"]


def test_json_has_every_field() -> None:
    text = json_line(
        line(T0 + 204_113, "n3", 13, "E", b"caf\xe9 \x1b[1m", offset=17),
        attempt=2,
        procs_per_node=8,
        path=Path("logs/a2/n3.log"),
    )
    assert text.endswith("\n")
    assert json.loads(text) == {
        "type": "line",
        "ts": "2023-11-14T22:13:20.204113Z",
        "node": "n3",
        "rank": 13,
        "local_rank": 5,
        "stream": "err",
        "attempt": 2,
        "text": "caf� \x1b[1m",
        "partial": True,
        "file": "logs/a2/n3.log",
        "offset": 17,
    }


def test_json_says_null_where_nothing_is_known() -> None:
    text = json_line(line(0, "n3", None, "a", b""), attempt=1, procs_per_node=0, path=Path("x"))
    data = json.loads(text)
    assert (data["ts"], data["rank"], data["local_rank"], data["stream"]) == (
        None,
        None,
        None,
        "agent",
    )
