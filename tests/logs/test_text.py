"""How lines look to people."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.logs import text as texts
from clusterrun.logs.text import clock_time, strip_controls, utc_time
from clusterrun.logs.views import BAR_PAUSES, QUIET_PAUSES, SHOWN_BYTES, TextView, node_colour
from tests.logs.corpus import T0, line


class View:
    """A view, and what it has written since it was last asked."""

    def __init__(self, *, nodes: tuple[str, ...] = (), world_size: int = 1, **style: Any) -> None:
        self._written: list[bytes] = []
        self.view = TextView(
            write=self._written.append, nodes=nodes, world_size=world_size, **style
        )

    def take(self) -> list[str]:
        texts = [text.decode() for text in self._written]
        self._written.clear()
        return texts

    def show(self, *lines: tuple[int | None, str, bytes], node: str = "n1") -> list[str]:
        for entry in lines:
            self.view.show(line(T0, node, *entry))
        return self.take()

    def pause(self) -> list[str]:
        self.view.pause()
        return self.take()

    def drain(self) -> list[str]:
        self.view.drain()
        return self.take()


def test_prefixes_are_aligned_and_mark_stderr_without_colour() -> None:
    view = View(nodes=("n1", "n10"), world_size=16)
    assert view.show((0, "o", b"a"), (13, "e", b"b"), (None, "l", b"c")) == [
        "n1:0   | a\n",
        "n1:13  ! b\n",
        "n1     | c\n",
    ]


def test_hostile_names_of_nodes_reach_no_terminal() -> None:
    assert View().show((0, "o", b"a"), node="n\x1b[2J\udcff") == ["n?:0 | a\n"]


def test_colour_comes_from_the_name_of_the_node_and_red_is_for_stderr() -> None:
    assert View(colour=True).show((0, "e", b"\x1b[1mbold")) == [
        f"\x1b[{node_colour('n1')}mn1:0\x1b[0m \x1b[31m!\x1b[0m \x1b[1mbold\x1b[0m\n"
    ]


# Times


@pytest.fixture
def east_of_greenwich(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("TZ", "UTC-02")
    time.tzset()
    texts._moment.cache_clear()
    yield
    monkeypatch.undo()
    time.tzset()
    texts._moment.cache_clear()


@pytest.mark.usefixtures("east_of_greenwich")
def test_times_are_of_the_local_zone() -> None:
    assert View(time_chars=12).show((0, "o", b"a")) == ["00:13:20.000 n1:0 | a\n"]
    assert clock_time(T0 + 1_234_567) == "00:13:21.234"
    assert utc_time(T0) == "2023-11-14T22:13:20.000000Z"


def test_times_that_nobody_knows_are_dashes() -> None:
    assert (clock_time(0), utc_time(0)) == ("--:--:--.---", None)


# Control sequences and colours


CONTROLLED = (
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
)


def test_control_sequences_never_reach_the_terminal() -> None:
    for text, plain in CONTROLLED:
        assert strip_controls(text, keep_colours=False) == plain


@given(st.text(st.sampled_from("\x1b[]P0123;?mJHa\x07\x9b\x9c\\\r\x08 \t")))
def test_no_control_character_is_left_but_whole_colours_and_tabs(text: str) -> None:
    assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", strip_controls(text, keep_colours=False))
    rest = re.sub(r"\x1b\[[0-9;:]*m", "", strip_controls(text, keep_colours=True))
    assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", rest)


# Cut lines and progress bars


def test_a_line_whose_end_does_not_come_is_shown_with_a_mark() -> None:
    view = View()
    assert view.show((0, "O", b"Password: ")) == []
    waiting = [view.pause() for _ in range(QUIET_PAUSES + 2)]
    assert waiting == [[]] * QUIET_PAUSES + [["n1:0 | Password: …\n"], []]
    assert view.show((0, "o", b"rest")) == ["n1:0 | rest\n"]
    assert view.show((0, "O", b"killed he")) == []
    assert view.drain() == ["n1:0 | killed he…\n"]


def test_a_progress_bar_that_goes_on_and_on_is_shown_from_time_to_time() -> None:
    view = View()
    told: list[str] = []
    for percent in range(4 * (BAR_PAUSES + 1)):
        assert view.show((0, "E", b"\r%d %%" % percent)) == []
        told += view.pause()
    assert told == [f"n1:0 ! {percent} %…\n" for percent in (50, 101, 152, 203)]


def test_a_progress_bar_in_pieces_can_be_looked_at_without_a_mark() -> None:
    view = View(world_size=16)
    view.show((3, "E", b"\r\x1b[32m10 %"), (3, "E", b"\r20 %"))
    assert view.view.unfinished() == "n1:3  ! 20 %"
    assert view.show((3, "e", b"\rdone")) == ["n1:3  ! done\n"]
    assert view.view.unfinished() is None


def test_a_long_line_is_cut_and_says_by_how_much() -> None:
    view = View()
    pieces = [(0, "O", b"x" * 40_000)] * 3
    assert view.show(*pieces, (0, "o", b"end")) == [
        f"n1:0 | {'x' * SHOWN_BYTES}…[+{120_003 - SHOWN_BYTES:,} bytes]\n"
    ]
    assert view.show((0, "o", b"y" * (SHOWN_BYTES + 1))) == [
        f"n1:0 | {'y' * SHOWN_BYTES}…[+1 bytes]\n"
    ]


@given(st.lists(st.text("ab\r", min_size=1), min_size=1))
def test_a_progress_bar_in_pieces_shows_what_it_would_in_one(pieces: list[str]) -> None:
    view = View()
    for piece in pieces:
        assert view.show((0, "O", piece.encode())) == []
    last = "".join(pieces).rstrip("\r").rpartition("\r")[2]
    assert view.show((0, "o", b"")) == [f"n1:0 | {last}\n"]


# Lost bytes, and copies


def test_lost_bytes_are_told_in_their_place_and_end_the_line() -> None:
    view = View(world_size=16)
    lines = (3, "O", b"begun"), (3, "g", b"o 1048576 the disk\x1b[2J was full"), (3, "o", b"next")
    assert view.show(*lines) == [
        "n1:3  | begun…\n",
        "n1:3  ~ 1,048,576 bytes of stdout lost: the disk was full\n",
        "n1:3  | next\n",
    ]


def test_copies_are_one_line_that_says_how_many_and_how_far_apart() -> None:
    view = View(nodes=("n1", "n10"), world_size=80, dedup=True)
    for rank in range(7):
        view.view.show(line(T0 + 50_000 * rank, "n1", rank, "e", b"aborted on rank %d" % rank))
    assert view.drain() == ["[7 ranks] ! aborted on rank <n>   (first n1:0, last +0.3 s)\n"]


def test_copies_of_a_traceback_are_one_block() -> None:
    view = View(world_size=8, dedup=True)
    own = [b"Traceback (most recent call last):", b'  File "a.py", line 1', b"KeyError: 'a'"]
    other = [own[0], b'  File "a.py", line 2', b"RuntimeError: rank %d aborted"]
    for text in own:
        view.show((0, "e", text))
    for text in other:  # the ranks write at once
        view.show(*((rank, "e", text.replace(b"%d", b"%d" % rank)) for rank in (1, 2, 3)))
    assert view.drain() == [
        "n1:0 ! Traceback (most recent call last):\n",
        'n1:0 !   File "a.py", line 1\n',
        "n1:0 ! KeyError: 'a'\n",
        "[3 ranks] ! Traceback (most recent call last):\n",
        '[3 ranks] !   File "a.py", line 2\n',
        "[3 ranks] ! RuntimeError: rank <n> aborted\n",
    ]
