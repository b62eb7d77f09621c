"""A node's log and its side file of errors: what is where, and what is left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterrun.logformat.lines import SIDE_TEXT_BYTES
from clusterrun.node.forward.appended import AppendedFile
from clusterrun.node.forward.logfile import FILE_BYTES, REPEATS, SEVERE_BYTES, NodeLog
from clusterrun.node.forward.stamp import Loss, Piece

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
    assert not files.file.is_written
    files.errors.unlink()
    assert files.file.flush()
    assert files.file.is_written
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
