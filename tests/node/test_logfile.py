"""A node's log and its side file of errors: what is where, and what is left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.logformat.lines import LINE_BYTES, SIDE_TEXT_BYTES
from clusterrun.node.forward.forward import Rate
from clusterrun.node.forward.logfile import (
    FILE_BYTES,
    REPEATS,
    SEVERE_BYTES,
    AppendedFile,
    NodeLog,
    stamp,
)
from clusterrun.node.forward.spool import (
    KEPT_S,
    EventReader,
    Loss,
    Piece,
    Spool,
    create_spool,
    split_pieces,
    whole_characters,
)

T0 = 1_700_000_000_000_000
SECOND = 1_000_000


class Files:
    """The two files of a log in a directory."""

    def __init__(self, root: Path) -> None:
        self.log, self.errors = root / "n1.log", root / "n1.err"
        self.file = NodeLog(self.log, self.errors)

    def add(self, text: bytes, time_us: int = T0, rank: str = "0", stream: str = "o") -> None:
        self.file.add(Piece(text, is_cut=not text.endswith(b"\n")), time_us, rank, stream)

    def error_lines(self) -> list[list[bytes]]:
        """Split each into time, rank, stream, class, offset, text."""
        return [line.split(b" ", 5) for line in self.errors.read_bytes().split(b"\n")[:-1]]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "logs")


def test_error_lines_stand_in_the_side_file_with_their_place_in_the_log(files: Files) -> None:
    files.add(b"fine\nValueError: 1\nfine\n", rank="3", stream="e")
    files.add(b"torch says\n", rank="-", stream="l")
    files.add(b"ranks meet\n", rank="-", stream="a")
    files.add(b"error: rank 3 on n1: killed by SIGKILL\n", rank="-", stream="a")
    files.add(b"fine\n", rank="3", stream="e")
    files.file.flush()
    found = files.error_lines()
    assert [line[1:4] + line[5:] for line in found] == [
        [b"3", b"e", b"error", b"ValueError: 1"],
        [b"-", b"l", b"-", b"torch says"],
        [b"-", b"a", b"-", b"ranks meet"],
        [b"-", b"a", b"error", b"error: rank 3 on n1: killed by SIGKILL"],
    ]
    log = files.log.read_bytes()
    for *head, _, offset, text in found:
        assert log[int(offset) :].startswith(b" ".join([*head, text]) + b"\n")


def test_of_a_cut_or_long_error_line_the_first_piece_is_kept(files: Files) -> None:
    files.add(b"fine\n")
    files.add(b"ERROR: retrying ... ", stream="e")
    files.add(b"fine\n", rank="1", stream="e")
    files.add(b"ValueError: once more ", T0 - SECOND, stream="e")
    files.add(b"done\nTraceback (most recent call last):\n", stream="e")
    files.add(b"  Fi", stream="e")
    files.add(b"le\n  line\nOops\nfine\nerror: " + b"x" * 60_000 + b"\n", stream="e")
    files.file.flush()
    log, lines = files.log.read_bytes(), files.error_lines()
    assert [(line[2], line[3], line[5][:40]) for line in lines] == [
        (b"e", b"error+", b"ERROR: retrying ... "),
        (b"e", b"traceback", b"Traceback (most recent call last):"),
        (b"e", b"traceback+", b"  Fi"),
        (b"e", b"traceback", b"  line"),
        (b"e", b"exception", b"Oops"),
        (b"e", b"error+", b"error: " + b"x" * 33),
    ]
    assert len(lines[-1][5]) == SIDE_TEXT_BYTES
    assert all(log[int(line[4]) :].startswith(line[0]) for line in lines)
    assert {line[0] for line in lines} == {b"%d" % T0}, "times never run backwards"


def test_that_repeats_of_a_rank_are_left_out_is_recorded(files: Files) -> None:
    for rank in ("0", "1"):
        files.add(b"".join(b"ValueError: %d\n" % i for i in range(100)), rank=rank, stream="e")
    files.file.flush()
    *lines, told = files.error_lines()
    assert [line[1] for line in lines] == [b"0"] * REPEATS + [b"1"] * REPEATS
    assert told[1:4] == [b"-", b"g", b"-"]
    assert told[5].startswith(b"x repeated")


def letters(number: int) -> str:
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def test_the_side_file_is_bounded_and_keeps_room_for_what_is_severe(files: Files) -> None:
    for i in range(5000):
        files.add(f"error: {letters(i)} {'x' * 100}\n".encode())
    files.file.flush()
    assert files.errors.stat().st_size < FILE_BYTES - SEVERE_BYTES + 1000
    for i in range(5000):
        files.add(f"CUDA error: {letters(i)} {'x' * 100}\n".encode())
    files.file.add_end(1, "over", T0)
    files.file.flush()
    assert FILE_BYTES - 1000 < files.errors.stat().st_size < FILE_BYTES + 1000
    lines = files.error_lines()
    given = [line for line in lines if line[3] != b"-"]
    assert {line[3] for line in given} == {b"error", b"severe"}


def test_a_gap_stands_in_both_files(files: Files) -> None:
    files.file.add_gap(Loss(12, "the disk is full"), T0, "3", "e")
    files.file.flush()
    assert files.log.read_bytes() == b"%d 3 g e 12 the disk is full\n" % T0
    assert files.errors.read_bytes() == b"%d 3 g - 0 e 12 the disk is full\n" % T0


def test_the_end_is_one_line_in_both_files_whatever_the_reason(files: Files) -> None:
    files.file.add_end(3, "two\nlines\r\n\udc80", T0)
    files.file.flush()
    assert files.log.read_bytes() == b"%d - z 3 two lines ?\n" % T0
    assert files.errors.read_bytes() == b"%d - z - 0 3 two lines ?\n" % T0


def test_a_side_file_that_cannot_be_written_does_not_stop_the_log(files: Files) -> None:
    files.log.parent.mkdir()
    files.errors.symlink_to("/dev/full")
    files.add(b"error: x\n")
    assert files.file.flush()
    assert files.log.stat().st_size
    assert not files.file.problem
    assert any(file.pending_bytes for file in files.file.files)
    files.errors.unlink()
    assert files.file.flush()
    assert not any(file.pending_bytes for file in files.file.files)
    assert len(files.error_lines()) == 1


def test_a_side_file_never_points_behind_the_end_of_the_log(files: Files) -> None:
    files.log.parent.mkdir()
    files.log.symlink_to("/dev/full")
    files.add(b"error: x\n")
    assert not files.file.flush()
    assert "No space" in files.file.problem
    assert not files.errors.exists()


def test_a_partial_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, refusals = os.write, [OSError(28, "No space left on device")]

    def partial(descriptor: int, data: bytes) -> int:
        if len(data) < 500 and refusals:
            raise refusals.pop()
        return whole(descriptor, data[:100])

    monkeypatch.setattr(os, "write", partial)
    file = AppendedFile(tmp_path / "log")
    data = bytes(range(256)) * 4
    file.add(data)
    assert not file.flush()
    assert file.pending_bytes < 500
    assert "No space" in file.problem
    file.add(b"more")
    assert file.flush()
    assert file.pending_bytes == 0
    assert file.problem == ""
    assert (tmp_path / "log").read_bytes() == data + b"more"


# Stamped lines: byte for byte what was written, cut only between characters


NOW_US = 1_700_000_000_123_456

_data = st.lists(
    st.binary(max_size=40)
    | st.sampled_from([b"\n", b"\n\n", b"\r", b"a\nb\n", "é漢🙂".encode()])
    | st.integers(-3, 3).map(lambda n: b"x" * (LINE_BYTES + n)),
    max_size=8,
).map(b"".join)


def test_a_line_carries_microseconds_rank_and_stream() -> None:
    lines = stamp(Piece(b"x\ny\n", is_cut=False), NOW_US, "3", "e")
    assert lines == b"1700000000123456 3 e x\n1700000000123456 3 e y\n"
    assert stamp(Piece(b"50 %", is_cut=True), 5, "-", "l") == b"0000000000000005 - L 50 %\n"


def test_the_beginning_of_a_line_is_taken_where_asked_for_but_for_half_a_character() -> None:
    assert split_pieces(b"a\nb\xe6\xbc", with_rest=True) == [
        Piece(b"a\n", is_cut=False),
        Piece(b"b", is_cut=True),
    ]


@given(_data, st.booleans())
def test_pieces_are_the_data_in_order(data: bytes, with_rest: bool) -> None:
    pieces = split_pieces(data, with_rest=with_rest)
    taken = b"".join(piece.text for piece in pieces)
    assert data.startswith(taken)
    left = data[len(taken) :]
    assert b"\n" not in left
    assert len(left) <= (3 if with_rest else LINE_BYTES)
    for text, is_cut in pieces:
        assert text
        assert b"\n" not in text if is_cut else text.endswith(b"\n")
        assert max(map(len, text.split(b"\n"))) <= LINE_BYTES


@given(st.text(max_size=20), st.integers(0, 80))
def test_whole_characters_can_be_read(text: str, end: int) -> None:
    data = text.encode()
    end = min(end, len(data))
    cut = whole_characters(data, end)
    assert end - 3 <= cut <= end
    data[:cut].decode()


# The cap on lines


def test_lines_beyond_the_rate_are_lost_until_the_next_second() -> None:
    rate, piece = Rate(2), Piece(b"a\nb\nc\n", is_cut=False)
    lost = "more than 2 lines/s"
    assert list(rate.allow(piece, 100.0)) == [Piece(b"a\nb\n", is_cut=False), Loss(2, lost)]
    assert list(rate.allow(piece, 100.5)) == [Loss(6, lost)]
    assert next(rate.allow(piece, 101.0)) == Piece(b"a\nb\n", is_cut=False)
    assert list(rate.allow(Piece(b"d", is_cut=True), 101.0)) == [Loss(1, lost)]


@given(data=st.lists(st.text(max_size=8) | st.just("\n"), max_size=30).map("".join))
def test_what_is_given_and_what_is_lost_add_up(data: str) -> None:
    rate, pieces = Rate(3), split_pieces(data.encode(), with_rest=True)
    parts = [part for piece in pieces for part in rate.allow(piece, 100.0)]
    assert sum(p.size if isinstance(p, Loss) else len(p.text) for p in parts) == len(data.encode())
    assert all(p.text for p in parts if isinstance(p, Piece))


# The node-local directory: whose is cleared, and whose is not


@pytest.fixture(autouse=True)
def _base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def spool_of_a_process_that_ended(base: Path) -> Path:
    program = f"""
import tempfile; tempfile.tempdir = {str(base)!r}
from clusterrun.node.forward.spool import create_spool; print(create_spool("4711", 1, 1).root)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return Path(done.stdout.strip())


def test_what_a_killed_agent_left_is_cleared(tmp_path: Path) -> None:
    left = spool_of_a_process_that_ended(tmp_path)
    assert left.is_dir()
    first = create_spool("4712", 1, 0).root
    create_spool("4712", 1, 1)
    assert not left.exists()
    assert first.is_dir()


def test_another_nodes_spool_stays_where_nodes_share_the_directory(tmp_path: Path) -> None:
    left = spool_of_a_process_that_ended(tmp_path)
    prefix, _, pid, rest = left.name.split("-", 3)
    elsewhere = left.rename(tmp_path / f"{prefix}-00000000-{pid}-{rest}")  # that pid lives there
    create_spool("4712", 1, 0)
    assert elsewhere.is_dir()


def test_what_was_kept_stays_for_a_week(tmp_path: Path) -> None:
    kept = Spool(root=spool_of_a_process_that_ended(tmp_path)).keep()
    (kept / "rank_0.out").write_text("not written")
    create_spool("4712", 1, 0)
    assert (kept / "rank_0.out").read_text() == "not written"
    week_ago = time.time() - KEPT_S - 60
    os.utime(kept, (week_ago, week_ago))
    create_spool("4713", 1, 0)
    assert not kept.exists()


@pytest.mark.parametrize("ts", ["soon", None, [1], float("nan"), 10**400, True])
def test_every_event_has_a_time_and_a_type(tmp_path: Path, ts: object) -> None:
    path = tmp_path / "rank_0.events"
    path.write_text(json.dumps({"ts": ts, "type": ["odd"]}) + "\n[1]\n" + "[" * 100_000 + "\n")
    [event] = EventReader(path).read()
    assert isinstance(event["ts"], float)
    assert event["type"] == "['odd']"
