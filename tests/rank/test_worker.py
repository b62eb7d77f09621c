"""The inner entrypoint runs a script as plain Python would, and says how it ended."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import wait_for
from tests.rank.place import Place


@pytest.fixture(name="place")
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    return Place(tmp_path)


SCRIPTS = {
    "argv": "import sys; print(sys.argv, sys.path[0])",
    "main": "print(__name__, __file__, __spec__, __package__, __doc__, sorted(globals()))",
    "future": "def f(x: int): ...\nprint(f.__annotations__)",
    "encoding": "# -*- coding: latin-1 -*-\nprint('caf\xe9')",
    "exit 0": "import sys; print('x'); sys.exit()",
    "exit 3": "import sys; sys.exit(3)",
    "exit text": "import sys; sys.exit('no such file')",
    "_exit": "import os; os._exit(9)",
    "raise": "def f():\n    raise ValueError('no')\nf()",
    "raise from": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('a') from e",
    "syntax": "print('never'\nx = = 2",
    "import error": "import no_such_module_at_all",
    "kill": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "atexit raise": "import atexit; atexit.register(print, 'bye'); 1 / 0",
    "excepthook": "import sys; sys.excepthook = lambda *e: print('mine', e[0]); 1 / 0",
    "thread": "import threading as t; t.Timer(0.2, print, ['late']).start(); print('end')",
    "neighbour": "import neighbour; print(neighbour.__name__)",
    "inspect": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f))",
    "pickle": "import pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(A())).__class__ is A)",
    "spawn": """
        import multiprocessing as mp
        class A:
            def __call__(self, x): return x * 2
        if __name__ == "__main__":
            with mp.get_context("spawn").Pool(1) as pool:
                print(pool.map(A(), [1, 2]))
        """,
    "fork": """
        import multiprocessing as mp
        def f(x): return x * 2
        with mp.get_context("fork").Pool(1) as pool:
            print(pool.map(f, [1, 2]))
        """,
    "fork raise": """
        import os
        if os.fork() == 0:
            raise ValueError("in the child")
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_under_plain_python(place: Place, name: str) -> None:
    encoding = "latin-1" if name == "encoding" else "utf-8"
    (place.path / "s.py").write_text(textwrap.dedent(SCRIPTS[name]), encoding=encoding)
    place.write("neighbour.py", "")
    plain = place.python("s.py", "a b", "--x=1", "-m")
    ours = place.worker("s.py", "a b", "--x=1", "-m")
    assert (ours.returncode, ours.stdout, ours.stderr) == (
        plain.returncode,
        plain.stdout,
        plain.stderr,
    )


def test_the_memory_that_a_rank_had_at_most_is_said(place: Place) -> None:
    place.write("s.py", "room = bytearray(300 << 20); del room")
    assert place.rank("s.py").returncode == 0
    (peaks,) = [event for event in place.events() if event["type"] == "peaks"]
    assert 300 << 20 < peaks["rss_bytes"] < 600 << 20


@pytest.mark.parametrize(
    "argv",
    [("sub/s.py",), ("./link.py",), ("sub",), ("-m", "sub"), ("-m", "sub.s", "-m"), ("-m", "no")],
)
def test_every_way_to_name_a_script_works_as_under_plain_python(
    place: Place, argv: tuple[str, ...]
) -> None:
    say = "import sys; print(sys.argv, sys.path[0], __name__, __package__, __spec__ is None)"
    for name in ("sub/s.py", "sub/__init__.py", "sub/__main__.py"):
        place.write(name, say)
    (place.path / "link.py").symlink_to("sub/s.py")
    plain, ours = place.python(*argv, "a"), place.worker(*argv, "a")
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert ours.stderr.replace("clusterrun.rank.worker", "") == plain.stderr


def test_a_script_reads_its_rank_from_the_variables_of_slurm(place: Place) -> None:
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_TRES_PER_TASK")
    place.write("s.py", f"import os; print([os.environ.get(name) for name in {names}])")
    rank = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}
    task = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
    task |= {"SLURM_TRES_PER_TASK": "cpu=8,gres/gpu:2"}
    assert place.worker("s.py", **rank, **task).stdout == "['5', '1', '8', 'cpu=4,gres/gpu:2']\n"
    assert place.worker("s.py", **rank).stdout == "[None, None, None, None]\n", "not on Slurm"


def test_output_goes_into_files_of_the_rank_also_from_below_python(place: Place) -> None:
    place.write(
        "s.py",
        """
        import os, subprocess, sys
        print("from print")
        os.write(1, b"from fd 1\\n")
        subprocess.run(["sh", "-c", "echo from a child; echo error >&2"])
        print("to stderr", file=sys.stderr)
        """,
    )
    done = place.rank("s.py")
    assert (done.stdout, done.stderr) == ("", "")
    out = (place.spool / "rank_3.out").read_text()
    assert sorted(out.splitlines()) == ["from a child", "from fd 1", "from print"]
    assert (place.spool / "rank_3.err").read_text() == "error\nto stderr\n"
    assert oct((place.spool / "rank_3.out").stat().st_mode & 0o777) == "0o600"


def test_a_crash_below_python_leaves_a_stack(place: Place) -> None:
    place.write("s.py", "import ctypes\ndef crash():\n    ctypes.string_at(0)\ncrash()")
    assert place.rank("s.py").returncode == -signal.SIGSEGV
    assert "in crash" in (place.spool / "rank_3.err").read_text()


def test_a_good_end_is_said_by_the_rank_alone(place: Place) -> None:
    place.write("s.py", SCRIPTS["fork raise"])
    assert place.rank("s.py").returncode == 0
    start, _peaks, end = place.events()
    assert (start["type"], start["rank"], start["host"]) == ("rank_start", 3, os.uname().nodename)
    assert start["pid"] > 0
    assert (end["type"], end["code"]) == ("rank_exit", 0)
    assert not (place.spool / "rank_3.error.json").exists()


USAGE = "import sys; print('usage: x\\n\\nx: bad --lr \\n\\n', file=sys.stderr); sys.exit(2)"
BAD_ENDS = [
    ("raise ValueError('a\\nb')", 1, "ValueError: a", "exception"),
    ("import sys; sys.exit(3)", 3, "the script exited with status 3", "exit"),
    (USAGE, 2, "the script exited with status 2: x: bad --lr", "exit"),
    ("compile('x = (', 'm.py', 'exec')", 1, "SyntaxError: '(' was never closed (m.py:1)", "except"),
    ("import sys; sys.exit('why')", 1, "the script exited with status 1", "exit"),
    ("raise KeyboardInterrupt", 130, "KeyboardInterrupt", "exception"),
]


@pytest.mark.parametrize(("source", "code", "message", "cause"), BAD_ENDS)
def test_a_bad_end_is_said_and_leaves_an_error_file(
    place: Place, source: str, code: int, message: str, cause: str
) -> None:
    place.write("s.py", source)
    file = place.path / "error.json"
    before = time.time()
    assert place.rank("s.py", TORCHELASTIC_ERROR_FILE=str(file)).returncode == code
    word = place.last_word()
    assert word["code"] == code
    assert word["cause"].startswith(cause[:4])
    assert word["message"].startswith(message)
    assert word["where"] == ("m.py:1" if "m.py" in source else word["where"])
    error = json.loads(file.read_text())["message"]
    assert error["message"] == word["message"]
    more = error["extraInfo"]
    assert "s.py" in more["py_callstack"]
    # torch reads whole seconds with int(), which takes a number with a fraction but no such text.
    assert isinstance(more["timestamp"], float)
    assert before < more["timestamp"] == word["ts"] < time.time()
    assert json.loads((place.spool / "rank_3.error.json").read_text())["message"] == error


OPEN_AT_THE_END = """
import bz2, gzip, sys, types, zipfile
import part
cuda = types.SimpleNamespace(is_initialized=lambda: False)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
class Writer:
    def __init__(self, name):
        self.name = name
    def __del__(self):
        print(self.name, names["end"] if names else "", gzip.open("text.gz", "rb").read())
        raise ValueError(self.name)
names = {"end": "closed"}
text = gzip.open("text.gz", "wt")
text.write("hello")
gzip.open("text.gz", "wb").write(b"local")
archive = zipfile.ZipFile("all.zip", "w")
archive.writestr("a", "b")
writers = {"first": Writer("first")}
writers["first"].others = [bz2.open("text.bz2", "wb"), writers]
writers["first"].others[0].write(b"hello")
"""


def test_a_rank_of_several_closes_what_only_the_end_of_python_closes(place: Place) -> None:
    place.write("s.py", OPEN_AT_THE_END)
    place.write("part.py", "import gzip\nlog = gzip.open('part.gz', 'wb'); log.write(b'hello')")
    assert place.rank("s.py", **{"CLUSTERRUN_WORLD_SIZE": "2", "WORLD_SIZE": "2"}).returncode == 0
    assert gzip.decompress((place.path / "part.gz").read_bytes()) == b"hello"
    assert bz2.decompress((place.path / "text.bz2").read_bytes()) == b"hello"
    assert zipfile.ZipFile(place.path / "all.zip").read("a") == b"b"
    assert (place.spool / "rank_3.out").read_text() == "first closed b'hello'\n"
    assert "Exception ignored " in (place.spool / "rank_3.err").read_text()


def test_a_rank_dies_with_its_launcher(place: Place) -> None:
    place.write("s.py", "import time; print('ready'); time.sleep(60)")
    place.write(
        "launcher.py",
        """
        import os, subprocess, sys, time
        os.environ["CLUSTERRUN_LAUNCHER_PID"] = str(os.getpid())
        rank = subprocess.Popen([sys.executable, "-m", "clusterrun.rank.worker", "s.py"])
        while not os.path.exists("spool/rank_3.out") or not os.path.getsize("spool/rank_3.out"):
            time.sleep(0.02)
        print(rank.pid, flush=True)
        os.kill(os.getpid(), 9)
        """,
    )
    place.spool.mkdir()
    done = place.python("launcher.py", CLUSTERRUN_SPOOL=str(place.spool), RANK="3")
    wait_for(lambda: not (Path(f"/proc/{int(done.stdout)}").exists()))
    assert place.rank("s.py", CLUSTERRUN_LAUNCHER_PID="1").returncode == 137, "it is already gone"


def test_the_entrypoint_imports_nothing_heavy(place: Place) -> None:
    place.write(
        "s.py",
        "import sys; print([m for m in ('torch', 'asyncio', 'yaml', 'logging')"
        " if m in sys.modules])",
    )
    assert place.worker("s.py").stdout == "[]\n"


FULL = "No space left on device"


@pytest.fixture(name="small_disk")
def _small_disk(place: Place) -> Iterator[Path]:
    """Make the spool a file system of 64 KiB."""
    place.spool.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place.spool)]
    if shutil.which("mount") is None or subprocess.run(argv, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no file system can be mounted here")
    yield place.spool
    subprocess.run(["umount", "-l", str(place.spool)], check=True)


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
    place.write("s.py", "import os; print('x' * 200000); os.truncate('spool/rank_3.out', 10)")
    assert place.rank("s.py").returncode == 0
    kept, words, _ = (small_disk / "rank_3.out").read_text().split("\n")
    assert kept == "x" * 10
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
