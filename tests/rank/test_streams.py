"""A rank's standard streams are Python's own, but that a full disk does not end the script."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rank.place import Place

FULL = "No space left on device"


@pytest.fixture(name="place")
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    return Place(tmp_path)


@contextlib.contextmanager
def _disk(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(argv, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(name="small_disk")
def _small_disk(place: Place) -> Iterator[Path]:
    """Make the spool a file system of 64 KiB."""
    with _disk(place.spool, "64k") as path:
        yield path


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("stream", ["out", "err"])
def test_every_byte_is_written_or_counted_when_the_disk_fills_up(
    place: Place, small_disk: Path, stream: str, unbuffered: str
) -> None:
    place.write(
        "s.py",
        f"""
        import os, sys
        filler = os.path.join(os.environ["CLUSTERRUN_SPOOL"], "filler")
        with open(filler, "wb") as file:
            file.write(bytes(32 << 10))
        for number in range(5000):
            print("line", number, file=sys.std{stream})
        os.unlink(filler)
        print("there is room", file=sys.std{stream})
        """,
    )
    done = place.rank("s.py", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 0, done.stderr
    text = (small_disk / f"rank_3.{stream}").read_text()
    printed = "".join(f"line {number}\n" for number in range(5000))
    kept, notice = text.split("\nclusterrun: ")
    assert printed.startswith(kept)
    lost = len(printed) - len(kept)
    assert notice == f"{lost} bytes of output were lost here: {FULL}\nthere is room\n"
    assert lost > 0


def test_losses_are_told_at_the_end_when_nothing_more_is_printed(
    place: Place, small_disk: Path
) -> None:
    place.write(
        "s.py",
        """
        import os
        filler = os.path.join(os.environ["CLUSTERRUN_SPOOL"], "filler")
        print("x" * 200000)
        with open(filler, "wb"):
            os.truncate(os.path.join(os.environ["CLUSTERRUN_SPOOL"], "rank_3.out"), 10)
        """,
    )
    assert place.rank("s.py").returncode == 0
    (kept, words, end) = (small_disk / "rank_3.out").read_text().split("\n")
    assert (kept, end) == ("x" * 10, "")
    assert words.endswith(f" bytes of output were lost here: {FULL}")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_disk_that_takes_nothing_at_all_does_not_end_the_script(
    place: Place, unbuffered: str
) -> None:
    place.spool.mkdir()
    for ending in ("out", "err"):
        (place.spool / f"rank_3.{ending}").symlink_to("/dev/full")
    place.write(
        "s.py",
        """
        import logging, sys
        for number in range(100):
            print(number)
            print(number, file=sys.stderr)
            logging.error("%d", number)
        sys.stdout.write("no newline")
        sys.stdout.flush()
        sys.stdout.buffer.write(b"bytes")
        sys.stdout.buffer.writelines([b"more", b"bytes"])
        open("reached", "w").close()
        """,
    )
    assert place.rank("s.py", PYTHONUNBUFFERED=unbuffered).returncode == 0
    assert (place.path / "reached").exists()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_any_other_error_is_the_scripts_as_under_plain_python(
    place: Place, unbuffered: str
) -> None:
    place.write(
        "s.py",
        """
        import os, sys
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)
        try:
            print("to nobody")
            sys.stdout.flush()
        except BrokenPipeError:
            open("raised", "w").close()
            os._exit(0)
        """,
    )
    place.rank("s.py", PYTHONUNBUFFERED=unbuffered)
    assert (place.path / "raised").exists()


ABOUT = """
import io, sys
with open("about", "w") as file:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__):
        print(type(stream), stream.encoding, stream.errors, stream.name, stream.mode,
              stream.isatty(), stream.fileno(), stream.closed, type(stream.buffer),
              stream.write_through, stream.buffer.name, file=file)
"""


@pytest.mark.parametrize("env", [{}, {"PYTHONUNBUFFERED": "1"}, {"PYTHONIOENCODING": "latin-1"}])
def test_the_streams_say_of_themselves_what_plain_ones_say(
    place: Place, env: dict[str, str]
) -> None:
    place.write("s.py", ABOUT)
    place.python("s.py", **env)
    plain = (place.path / "about").read_text()
    place.rank("s.py", **env)
    assert (place.path / "about").read_text() == plain


@pytest.mark.parametrize("errors", ["strict", "surrogateescape", "backslashreplace"])
def test_any_text_is_encoded_as_under_plain_python(place: Place, errors: str) -> None:
    place.write(
        "s.py",
        r"""
        import sys
        sys.stdout.buffer.write(b"\xff\xfe\x00 bytes\n")
        sys.stdout.buffer.flush()
        print("\u0436\U0001f600")
        try:
            print("\udcff")
        except UnicodeEncodeError as error:
            print("refused", error.reason)
        """,
    )
    env = {"PYTHONIOENCODING": f"utf-8:{errors}"}
    with (place.path / "plain").open("wb") as file:
        argv = ["sh", "-c", 'exec "$0" s.py', sys.executable]
        subprocess.run(argv, cwd=place.path, env={**os.environ, **env}, stdout=file, check=True)
    assert place.rank("s.py", **env).returncode == 0
    assert (place.spool / "rank_3.out").read_bytes() == (place.path / "plain").read_bytes()


@pytest.mark.parametrize(
    ("unbuffered", "deed", "stream"),
    [
        ("", "print('whole line')", "out"),
        ("", "sys.stderr.write('\\r 10%')", "err"),
        ("", "sys.stdout.write('\\r 10%')", "out"),
        ("1", "print('10%', end='')", "out"),
        ("1", "sys.stdout.buffer.write(b'10%')", "out"),
    ],
)
def test_what_plain_python_writes_at_once_survives_a_kill(
    place: Place, unbuffered: str, deed: str, stream: str
) -> None:
    place.write("s.py", f"import os, sys\n{deed}\nos.kill(os.getpid(), 9)")
    assert place.rank("s.py", PYTHONUNBUFFERED=unbuffered).returncode == -9
    assert (place.spool / f"rank_3.{stream}").read_text().strip() in ("whole line", "10%")


def test_threads_and_a_forked_child_print_whole_lines(place: Place) -> None:
    place.write(
        "s.py",
        """
        import os, threading
        def say(name):
            for number in range(500):
                print(f"{name} {number}\\n", end="")
        threads = [threading.Thread(target=say, args=(name,)) for name in "abcd"]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        if os.fork() == 0:
            say("child")
            os._exit(0)
        os.wait()
        """,
    )
    assert place.rank("s.py").returncode == 0
    lines = (place.spool / "rank_3.out").read_text().splitlines()
    expected = [f"{name} {n}" for name in ("a", "b", "c", "d", "child") for n in range(500)]
    assert sorted(lines) == sorted(expected)
