"""Log lines: byte for byte what the ranks wrote, stamped, whatever and wherever."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.node.forward import HELD_S, LINE_BYTES, AppendedFile, Forwarder, Stamper
from clusterrun.node.spool import Spool

NOW = 1_700_000_000.123456


def restored(stamped: bytes, rank: bytes, stream: bytes) -> bytes:
    """Put a stream together again, as a reader of the log does."""
    out = b""
    for line in stamped.split(b"\n")[:-1]:
        stamp, who, which, text = line.split(b" ", 3)
        assert stamp.isdigit()
        assert (who, which.lower()) == (rank, stream)
        out += text + (b"\n" if which.islower() else b"")
    return out


def test_a_line_carries_microseconds_rank_and_stream() -> None:
    assert Stamper("3", "e").feed(b"x\n", NOW) == b"1700000000123456 3 e x\n"


def test_the_beginning_of_a_line_waits_for_its_end() -> None:
    stamper = Stamper("3", "o")
    assert stamper.feed(b"50 %", NOW) == b""
    assert stamper.flush(NOW + HELD_S / 2) == b""
    assert stamper.feed(b" done\n", NOW + 0.1).endswith(b" 3 o 50 % done\n")


def test_a_line_whose_end_does_not_come_is_cut_and_continued() -> None:
    stamper = Stamper("3", "o")
    stamper.feed(b"\r 50 %", NOW)
    assert stamper.flush(NOW + HELD_S).endswith(b" 3 O \r 50 %\n")
    assert stamper.feed(b"\r100 %\n", NOW + 2).endswith(b" 3 o \r100 %\n")


def test_a_long_line_is_cut_between_characters() -> None:
    text = "é".encode() * LINE_BYTES
    lines = Stamper("0", "o").feed(b"x" + text + b"\n", NOW).split(b"\n")[:-1]
    assert len(lines) > 1
    for line in lines:
        line.split(b" ", 3)[3].decode()


@given(st.lists(st.binary(max_size=400) | st.sampled_from([b"\n", b"\r\n", b"", b"\x00"])))
def test_any_bytes_in_any_pieces_come_out_as_they_went_in(pieces: list[bytes]) -> None:
    stamper, now, out = Stamper("12", "e"), NOW, b""
    for piece in pieces:
        out += stamper.feed(piece, now) + stamper.flush(now)
        now += 0.4
    out += stamper.flush(now, is_last=True)
    assert restored(out, b"12", b"e") == b"".join(pieces)


def forwarder(root: Path) -> Forwarder:
    (root / "spool").mkdir()
    return Forwarder(
        Spool(root=root / "spool"),
        log=root / "logs" / "a1" / "n1.log",
        events=root / "events" / "n1.jsonl",
        error_path=lambda rank: root / "errors" / f"rank_{rank}.json",
    )


def test_all_files_of_the_spool_are_forwarded_to_the_end(tmp_path: Path) -> None:
    thread = forwarder(tmp_path)
    thread.start()
    spool = tmp_path / "spool"
    (spool / "rank_0.out").write_bytes(b"a\nb")
    (spool / "rank_10.err").write_bytes(b"x" * 3_000_000 + b"\n")
    (spool / "launcher.out").write_bytes(b"torch says\n")
    (spool / "rank_0.error.json").write_text("{}")
    (spool / "something else").write_text("no")
    thread.say("two\nlines")
    thread.event({"type": "started"})
    assert thread.finish(20)
    lines = (tmp_path / "logs" / "a1" / "n1.log").read_bytes().split(b"\n")[:-1]
    parts = [tuple(line.split(b" ", 3)[1:]) for line in lines]
    assert {(b"0", b"o", b"a"), (b"0", b"O", b"b"), (b"-", b"l", b"torch says")} <= set(parts)
    assert {(b"-", b"a", b"two"), (b"-", b"a", b"lines")} <= set(parts)
    assert sum(len(text) for rank, _, text in parts if rank == b"10") == 3_000_000
    assert (tmp_path / "events" / "n1.jsonl").read_text() == '{"type": "started"}\n'
    assert (tmp_path / "errors" / "rank_0.json").read_text() == "{}"


def test_lines_show_up_while_the_rank_still_writes(tmp_path: Path) -> None:
    thread = forwarder(tmp_path)
    thread.start()
    with (tmp_path / "spool" / "rank_0.out").open("ab", buffering=0) as file:
        file.write(b"first\n")
        log = tmp_path / "logs" / "a1" / "n1.log"
        deadline = time.monotonic() + 5
        while not (log.exists() and b"first" in log.read_bytes()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        file.write(b"second\n")
    assert thread.finish(5)
    assert log.read_bytes().count(b"\n") == 2


def test_a_full_disk_loses_nothing_once_there_is_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thread = forwarder(tmp_path)
    log = tmp_path / "logs" / "a1" / "n1.log"
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/full")
    (tmp_path / "spool" / "rank_0.out").write_bytes(b"important\n")
    thread.start()
    time.sleep(0.4)
    assert thread.is_alive()
    log.unlink()
    assert thread.finish(5)
    assert log.read_bytes().endswith(b" 0 o important\n")
    assert "No space left on device" in capsys.readouterr().err


def test_a_disk_that_stays_full_does_not_keep_the_agent(tmp_path: Path) -> None:
    thread = forwarder(tmp_path)
    log = tmp_path / "logs" / "a1" / "n1.log"
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/full")
    (tmp_path / "spool" / "rank_0.out").write_bytes(b"important\n")
    thread.start()
    since = time.monotonic()
    assert not thread.finish(0.5)
    assert time.monotonic() - since < 5
    log.unlink()
    assert thread.finish(5)


def test_a_partial_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, refusals = os.write, [OSError(28, "No space left on device")]

    def partial(descriptor: int, data: bytes) -> int:
        if len(data) < 500 and refusals:
            raise refusals.pop()
        return whole(descriptor, data[:100])

    monkeypatch.setattr(os, "write", partial)
    file = AppendedFile(tmp_path / "log")
    data = bytes(range(256)) * 4
    file.write(data)
    assert file.has_pending
    assert "No space" in file.problem
    file.write(b"more")
    assert not file.has_pending
    assert file.problem == ""
    assert (tmp_path / "log").read_bytes() == data + b"more"
