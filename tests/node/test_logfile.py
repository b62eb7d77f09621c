"""A node's log and its side file of errors: what is where, and what is left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.logformat.lines import SIDE_TEXT_BYTES
from clusterrun.node.forward.appended import AppendedFile
from clusterrun.node.forward.logfile import NodeLog
from clusterrun.node.forward.sidefile import FILE_BYTES, REPEATS, SEVERE_BYTES
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


def test_times_never_run_backwards(files: Files) -> None:
    files.add(b"a\n", T0 + 5)
    files.add(b"b\n", T0)
    files.file.flush()
    assert files.log.read_bytes() == b"%d 0 o a\n%d 0 o b\n" % (T0 + 5, T0 + 5)


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


def test_a_traceback_goes_on_in_the_next_piece(files: Files) -> None:
    files.add(b"Traceback (most recent call last):\n", stream="e")
    files.add(b"fine\n", rank="1", stream="e")
    files.add(b"  File\nOops\nfine\n", stream="e")
    files.file.flush()
    assert [line[3] for line in files.error_lines()] == [b"traceback", b"traceback", b"exception"]


def texts(files: Files) -> list[tuple[bytes, bytes, bytes]]:
    """Give stream, class and text of each error line."""
    files.file.flush()
    return [(line[2], line[3], line[5]) for line in files.error_lines()]


def test_the_rest_of_a_cut_error_line_is_taken_to_its_end(files: Files) -> None:
    files.add(b"ERROR: retrying ... ", stream="e")
    files.add(b"fine\n", rank="1", stream="e")
    files.add(b"fine\n", stream="o")
    files.add(b"once more ", stream="e")
    files.add(b"done\nfine\nValueError: the real failure\n", T0 + 60 * SECOND, stream="e")
    assert texts(files) == [
        (b"E", b"error", b"ERROR: retrying ... "),
        (b"E", b"error", b"once more "),
        (b"e", b"error", b"done"),
        (b"e", b"error", b"ValueError: the real failure"),
    ]
    log = files.log.read_bytes()
    for *head, _, offset, text in files.error_lines():
        assert log[int(offset) :].startswith(b" ".join([*head, text]) + b"\n")


def test_the_rest_of_a_cut_line_does_not_end_a_traceback(files: Files) -> None:
    files.add(b"Traceback (most recent call last):\n", stream="e")
    files.add(b"  Fi", stream="e")
    files.add(b"le\n  line\nOops\n", stream="e")
    assert [kind for _, kind, _ in texts(files)] == [b"traceback"] * 4 + [b"exception"]


def open_lines(files: Files) -> set[bytes]:
    """Name the ranks whose last line in the side file has no end there."""
    last: dict[bytes, bytes] = {}
    for line in files.error_lines():
        last[line[1]] = line[2]
    return {rank for rank, stream in last.items() if stream.isupper()}


def test_an_error_line_that_never_ends_is_bounded(files: Files) -> None:
    files.add(b"ERROR: retrying ... ", stream="e")
    for i in range(5000):
        files.add(b"%d ... " % i, stream="e")
    files.add(b"done\nValueError: next\n", stream="e")
    *pieces, (stream, _, _), last = texts(files)
    assert {piece[0] for piece in pieces} == {b"E"}
    assert stream == b"e"
    assert sum(len(piece[2]) for piece in pieces) <= SIDE_TEXT_BYTES
    assert last == (b"e", b"error", b"ValueError: next")


def test_the_rest_of_a_line_that_was_left_out_is_left_out(files: Files) -> None:
    for _ in range(REPEATS + 5):
        files.add(b"ERROR: retrying ... ", stream="e")
        files.add(b"Error: failed\n", stream="e")
    *lines, told = texts(files)
    assert [stream for stream, *_ in lines] == [b"E", b"e"] * REPEATS
    assert told[2].startswith(b"x 5 ")


@given(
    st.lists(
        st.tuples(
            st.sampled_from("01-"),
            st.sampled_from([b"ERROR: ", b"Traceback (most recent call last):", b"CUDA error: "])
            | st.integers(0, 9000).map(lambda n: b"x" * n)
            | st.none(),
            st.booleans(),
        ),
        max_size=80,
    )
)
def test_every_line_that_ends_in_the_log_ends_in_the_side_file(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, bytes | None, bool]]
) -> None:
    files = Files(tmp_path_factory.mktemp("node"))
    for rank, text, is_end in parts:
        if text is None:
            files.file.add_gap(Loss(1, "full"), T0, rank, "e")
        elif text or is_end:
            files.add(text + b"\n" * is_end, rank=rank, stream="e")
    for rank in "01-":
        files.add(b"\n", rank=rank, stream="e")
    files.file.add_end(0, "", T0)
    files.file.flush()
    assert open_lines(files) == set()
    assert files.errors.stat().st_size <= FILE_BYTES + 200


def test_repeats_of_a_rank_are_counted_instead(files: Files) -> None:
    for rank in ("0", "1"):
        files.add(b"".join(b"ValueError: %d\n" % i for i in range(100)), rank=rank, stream="e")
    files.file.flush()
    *lines, told = files.error_lines()
    assert [line[1] for line in lines] == [b"0"] * REPEATS + [b"1"] * REPEATS
    assert told[1:4] == [b"-", b"g", b"-"]
    assert told[5].startswith(b"x %d " % (200 - 2 * REPEATS))


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
    *lines, told, _ = files.error_lines()
    given = [line for line in lines if line[3] != b"-"]
    assert {line[3] for line in given} == {b"error", b"severe"}
    assert int(told[5].split()[1]) == 10_000 - len(given)


def test_what_is_left_out_is_told_now_and_then(files: Files) -> None:
    for second in range(20):
        files.add(b"error: x\n" * 1000, T0 + second * SECOND)
        files.file.flush()
    told = [line for line in files.error_lines() if line[2] == b"g"]
    assert [int(line[5].split()[1]) for line in told] == [980, 5980, 10980, 15980]


def test_a_long_error_line_is_shortened_in_the_side_file(files: Files) -> None:
    files.add(b"error: " + b"x" * 60_000 + b"\n")
    files.file.flush()
    (line,) = files.error_lines()
    assert len(line[5]) == SIDE_TEXT_BYTES
    assert line[3] == b"error+"  # the log has more


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


def test_a_log_without_error_lines_has_an_empty_side_file(files: Files) -> None:
    files.add(b"a\n")
    files.file.flush()
    assert files.errors.read_bytes() == b""
