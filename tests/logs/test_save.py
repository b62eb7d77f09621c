"""`clusterrun logs --save`: what is saved is whole, and nothing but a regular file is replaced."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from tests.logs.corpus import T0, raw
from tests.logs.runs import LogsCommand
from tests.logs.sampled import SECOND
from tests.patience import patience


def test_a_save_to_a_file_is_what_would_be_shown(run: LogsCommand, tmp_path: Path) -> None:
    target = tmp_path / "saved here"
    done = run.logs("L1", "--save", str(target))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"saved 6 lines in {target}\n"
    assert target.read_text().splitlines()[4] == "n2:9  ! ValueError: bad"
    assert target.stat().st_mode & 0o777 == 0o600
    run.logs("L1", "--save", str(target), "--rank", "9", "-o", "raw", "--stream", "out")
    assert target.read_bytes() == b"about to fail\nafter\n"


def test_a_save_to_a_directory_is_a_file_for_each_rank_and_stream(
    run: LogsCommand, tmp_path: Path
) -> None:
    run.write(
        "n2", raw(T0 + 8 * SECOND, 9, "O", b"\xff\x00 cut"), raw(T0 + 8 * SECOND, 9, "o", b"")
    )
    done = run.logs("L1", "-a", "--save", f"{tmp_path / 'saved'}/")
    assert (done.returncode, done.stderr) == (0, f"saved 8 files in {tmp_path / 'saved'}\n")
    found = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    assert found == {
        "n1.agent": b"8 ranks start\n",
        "n1.launcher": b"launcher says\n",
        "rank_00000.out": b"step 1 loss 2.5\nstep 2 loss 2.25\n",
        "rank_00000.err": b"UserWarning: slow\n",
        "rank_00003.out": b"three\n",
        "rank_00008.out": b"eight\n",
        "rank_00009.out": b"about to fail\nafter\n\xff\x00 cut\n",
        "rank_00009.err": b"ValueError: bad\n",
    }
    done = run.logs("L1", "--save", str(tmp_path / "saved"))
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2,
        f"error: {tmp_path / 'saved'} is not empty",
    )


def test_a_save_that_fails_leaves_nothing(run: LogsCommand, tmp_path: Path) -> None:
    done = run.logs("L1", "--save", str(tmp_path / "no such" / "file"))
    assert done.returncode == 1
    assert done.stderr == (
        f"error: cannot save to {tmp_path / 'no such' / 'file'}: No such file or directory\n"
        "  hint: choose another path\n"
    )
    before = set(os.listdir(tmp_path))
    assert run.logs("L1", "--save", str(tmp_path / "x"), "-g", "(").returncode == 2
    assert set(os.listdir(tmp_path)) == before


def test_gaps_are_counted_where_they_cannot_be_shown(run: LogsCommand, tmp_path: Path) -> None:
    run.write("n2", raw(T0 + 9 * SECOND, 9, "g", "o 100 full"))
    assert run.logs("L1", "-a", "--save", f"{tmp_path / 'saved'}/").stderr.splitlines()[1] == (
        "note: output was lost in 1 place; the logs show where and how much"
    )


def test_a_saved_file_holds_each_line_of_each_rank(here: LogsCommand, tmp_path: Path) -> None:
    here.start()
    here.write("n1", *(raw(T0 + r, r, "o", f"mem {1000 + r} MB") for r in range(8)))
    target = tmp_path / "saved"
    here.logs("L1", "-a", "--prefix", "auto", "--save", str(target))
    assert len(target.read_text().splitlines()) == 8
    here.logs("L1", "-a", "--dedup", "--save", str(target))
    assert target.read_text() == "[8 ranks] | mem <n> MB\n"


def test_a_save_follows_links_to_their_target(run: LogsCommand, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name, exists in (("there", True), ("dangling", False)):
        target, link = tmp_path / "deep" / name, tmp_path / f"link to {name}"
        if exists:
            target.write_text("old")
        link.symlink_to(f"deep/{name}")
        done = run.logs("L1", "--rank", "3", "--prefix", "none", "--save", str(link))
        assert (done.returncode, done.stderr) == (0, f"saved 1 line in {link}\n")
        assert link.is_symlink()
        assert target.read_text() == "three\n"
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["dangling", "there"]


def test_a_link_that_leads_to_itself_is_told(run: LogsCommand, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    done = run.logs("L1", "--save", str(tmp_path / "loop"))
    assert done.returncode == 1
    assert ": Too many levels of symbolic links" in done.stderr
    assert (tmp_path / "loop").is_symlink()


def test_a_fifo_is_written_through_and_stays_one(run: LogsCommand, tmp_path: Path) -> None:
    fifo, read = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()), daemon=True)
    reader.start()
    done = run.logs("L1", "--rank", "3", "--prefix", "none", "--save", str(fifo))
    reader.join(30 * patience())
    assert (done.returncode, read) == (0, [b"three\n"])
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_device_is_written_through_and_stays_one(run: LogsCommand, tmp_path: Path) -> None:
    device = tmp_path / "device"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.write_bytes(b"x")
    except OSError:
        pytest.skip("only root may make a device, and not everywhere")
    before = device.stat()
    done = run.logs("L1", "--save", str(device))
    assert (done.returncode, done.stderr) == (0, f"saved 6 lines in {device}\n")
    after = device.stat()
    assert (after.st_mode, after.st_rdev, after.st_ino) == (
        before.st_mode, before.st_rdev, before.st_ino,
    )  # fmt: skip


def test_a_dash_is_no_file_but_a_mistake(run: LogsCommand) -> None:
    done = run.logs("L1", "--save", "-")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: --save writes to a file or a directory, not to stdout",
        "  hint: to print all lines, pass --tail all; to save to a file of that name, pass ./-",
    ]
    assert not (run.path / "-").exists()


@pytest.mark.parametrize(
    "where", [["--list"], ["--path"], ["--save", "saved"], ["--save", "by/"], []]
)
def test_the_exit_status_is_that_of_the_job_whatever_is_printed(
    run: LogsCommand, where: list[str]
) -> None:
    assert run.logs("L1", *where).returncode == 0
    if where == ["--save", "by/"]:
        where = ["--save", "again/"]
    assert run.logs("L1", "--exit-status", *where).returncode == 3
