"""Log lines: byte for byte what the ranks wrote, stamped, whatever and wherever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clusterrun.node.forward import Forwarder, Limits
from clusterrun.node.spool import Spool


def forwarder(root: Path) -> Forwarder:
    (root / "spool").mkdir()
    return Forwarder(
        Spool(root=root / "spool"),
        log=root / "logs" / "a1" / "n1.log",
        index=root / "logs" / "a1" / "n1.idx",
        errors=root / "logs" / "a1" / "n1.err",
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
