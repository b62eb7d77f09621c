"""Lines that many ranks wrote alike become one, and nothing is hidden."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.logformat.lines import LogLine
from clusterrun.logs import dedup
from clusterrun.logs.dedup import QUIET_US, TRACEBACK_US, Copies, Dedup, Tracebacks
from tests.logs.corpus import T0, line

WORLD = 16


def members(copies: Copies) -> list[int]:
    """Return the ranks of copies."""
    return [rank for rank in range(copies.writers.bit_length()) if copies.writers >> rank & 1]


class Folded:
    """A dedup, and what it has written: `text`, or `[0 1 2] text` for folded lines."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.dedup = Dedup(write=self._write, world_size=WORLD)

    def _write(self, line: LogLine, body: str, copies: Copies | None) -> None:
        who = " ".join(map(str, members(copies))) if copies else ""
        label = f"[{who}] " if copies else f"{line.rank} "
        self.written.append(label + body)

    def feed(self, rank: int | None, text: str, *, ms: int = 0, stream: str = "o") -> None:
        node = f"n{rank}"
        self.dedup.feed(line(T0 + ms * 1000, node, rank, stream, b""), text)

    def drain(self) -> list[str]:
        self.dedup.drain()
        return self.take()

    def take(self) -> list[str]:
        taken = self.written.copy()
        self.written.clear()
        return taken


def fold(*lines: tuple[int, str]) -> list[str]:
    folded = Folded()
    for rank, text in lines:
        folded.feed(rank, text)
    return folded.drain()


def of(ranks: range, text: str) -> list[tuple[int, str]]:
    return [(rank, text.replace("@", str(rank))) for rank in ranks]


FOLDED = {
    "same": "same",
    "": "",
    "rank @ of 16": "rank <n> of 16",
    "free at 0x7f@a2b on 10.0.0.@ for 1.@e-05 s": "free at <n> on <n> for <n> s",
    "/proc/12@/maps 1,04@ KiB": "/proc/<n>/maps <n> KiB",
    "[rank@]: RuntimeError: rank @": "[rank<n>]: RuntimeError: rank <n>",
    'no File "a.py", line 12, in rank@': 'no File "a.py", line 12, in rank<n>',
}
KEPT = ["step @ done", "Step: @", "loss=@.5", "epoch @/10", "10%|#| 12/100 [@.2it/s]", "2.@ s/it"]
KEPT += ['  File "a.py", line @, in f', "@", "0.@ 17", "-@-"]


def test_copies_become_one_with_n_where_numbers_differ() -> None:
    for text, shown in FOLDED.items():
        assert fold(*of(range(4), text)) == [f"[0 1 2 3] {shown}"]


def test_numbers_that_matter_keep_lines_apart() -> None:
    for text in KEPT:
        assert fold(*of(range(4), text)) == [f"{rank} {t}" for rank, t in of(range(4), text)]
        equal = text.replace("@", "7")
        assert fold(*of(range(4), equal)) == [f"[0 1 2 3] {equal}"]


def test_fewer_than_three_copies_stay_where_they_were() -> None:
    assert fold((0, "a"), (1, "b"), (2, "a"), (3, "c")) == ["0 a", "1 b", "2 a", "3 c"]


def test_tracebacks_of_two_ranks_are_one() -> None:
    lost = 'Traceback:\n  File "a.py", line 3\nRuntimeError: lost [127.0.0.1]:@'
    assert fold((0, lost.replace("@", "36786")), (1, "a"), (2, lost.replace("@", "40112"))) == [
        "[0 2] " + lost.replace("@", "<n>"),
        "1 a",
    ]
    other = lost.replace("line 3", "line 4")
    assert fold((0, lost), (1, other)) == [f"0 {lost}", f"1 {other}"]


def test_what_two_agents_say_is_one_line() -> None:
    folded = Folded()
    for node in ("n1", "n2"):
        folded.dedup.feed(line(T0, node, None, "a", b""), "rank 3 on n2: bad")
    assert folded.drain() == ["[0 1] rank 3 on n2: bad"]


def test_the_nth_lines_of_equal_shape_of_each_rank_find_each_other() -> None:
    shards = [(rank, f"shard {n}") for rank in range(3) for n in (1, 2, 3)]
    assert fold(*shards) == ["[0 1 2] shard 1", "[0 1 2] shard 2", "[0 1 2] shard 3"]


def test_a_line_waits_for_its_copies_in_the_time_of_the_log() -> None:
    folded = Folded()
    folded.feed(0, "a", ms=0)
    folded.feed(1, "b", ms=QUIET_US // 1000 - 1)
    assert folded.take() == []
    folded.feed(1, "c", ms=QUIET_US // 1000)
    assert folded.take() == ["0 a"]


def test_late_copies_make_a_line_of_their_own() -> None:
    folded = Folded()
    for rank in range(4):
        folded.feed(rank, "a")
    folded.feed(0, "x", ms=1000)
    assert folded.take() == ["[0 1 2 3] a"]
    for rank in range(4, 7):
        folded.feed(rank, "a", ms=1000)
    assert folded.drain() == ["0 x", "[4 5 6] a"]
    folded.feed(8, "a", ms=1000)
    assert folded.drain() == ["8 a"]


def test_ranks_beyond_the_world_are_taken_as_they_are() -> None:
    assert fold(*((999_999_999, "a"),) * 3) == ["999999999 a"] * 3


@pytest.mark.parametrize("name", ["HELD_LINES", "HELD_CHARS"])
def test_held_lines_are_bounded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(dedup, name, 10)
    folded = Folded()
    for n in range(100):
        folded.feed(0, f"{chr(97 + n % 26)}{n:02}")
    assert len(folded.dedup._queue) <= 10
    assert len(folded.take()) + len(folded.drain()) == 100
    assert not folded.dedup._open


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.sampled_from(["a", "b 1", "b 2", "step 1", "step 2", "3"]),
            st.integers(0, 2500),
            st.booleans(),
        )
    )
)
def test_every_line_is_counted_once_and_no_rank_twice_in_one(
    entries: list[tuple[int, str, int, bool]],
) -> None:
    told: list[tuple[str, int]] = []

    def write(entry: LogLine, body: str, copies: Copies | None) -> None:
        ranks = members(copies) if copies else [entry.rank or 0]
        assert len(ranks) == (copies.count if copies else 1)
        told.extend((_shape_of(body), rank) for rank in ranks)

    folding = Dedup(write=write, world_size=WORLD)
    now = 0
    for rank, text, wait_ms, pauses in entries:
        now += wait_ms
        folding.feed(line(T0 + now * 1000, "n", rank, "o", b""), text)
        if pauses:
            folding.drain()
    folding.drain()
    assert sorted(told) == sorted((_shape_of(text), rank) for rank, text, _, _ in entries)


def _shape_of(text: str) -> str:
    return "b" if text.startswith("b") else text


# Tracebacks


class Blocks:
    def __init__(self) -> None:
        self.taken: list[str] = []
        self.tracebacks = Tracebacks(take=lambda line, body: self.taken.append(body))

    def feed(self, rank: int, *texts: str, us: int = 0) -> None:
        for text in texts:
            self.tracebacks.feed(line(T0 + us, "n1", rank, "e", text.encode()), text)


START = "Traceback (most recent call last):"


@pytest.mark.parametrize("prefix", ["", "[rank3]: "])
def test_lines_of_a_traceback_go_on_together(prefix: str) -> None:
    blocks = Blocks()
    text = [prefix + part for part in (START, '  File "a.py", line 1', "    f()", "KeyError: 1")]
    for part in text:
        blocks.feed(3, part)
        blocks.feed(1, "other")
    assert blocks.taken == ["other"] * 3 + ["\n".join(text), "other"]


def test_a_traceback_that_stops_is_not_waited_for() -> None:
    blocks = Blocks()
    blocks.feed(0, START, "  File")
    blocks.feed(1, "other", us=TRACEBACK_US + 1)
    assert blocks.taken == [f"{START}\n  File", "other"]
    blocks.feed(0, START)
    blocks.tracebacks.drain()
    assert blocks.taken[2:] == [START]
