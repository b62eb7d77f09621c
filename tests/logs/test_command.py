"""`clusterrun logs`, run as a user runs it, on run directories as the nodes leave them."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterrun.rundir.end import Cause
from tests.cli.outcomes import outcome
from tests.logs.corpus import T0, raw
from tests.logs.runs import LogsCommand, without_times
from tests.patience import finished, patience
from tests.road import Watcher
from tests.terminals import in_terminal


def test_default_is_rank_0_the_launcher_and_the_errors_of_all(ended: LogsCommand) -> None:
    done = ended.logs("L1")
    assert (done.returncode, done.stdout) == (
        0,
        "n1    | 8 ranks start\nn1:0  | step 1\nn2:9  ! OSError: trouble\nn1:0  | step 2\n",
    )
    assert done.stderr == (
        "note: all lines of rank 0 and the launcher, and the error lines of all 16 ranks; "
        "183 bytes in all (-a all ranks, -n all, -f follow)\n"
    )


def test_raw_gives_the_bytes_that_were_written(here: LogsCommand) -> None:
    here.start()
    content = [b"\x1b[2J caf\xe9", b"\x00 10%\r 20%\r"]
    here.write("n1", raw(T0, 0, "O", content[0]), raw(T0, 0, "o", content[1]))
    done = subprocess.run(
        here.argv("L1", "-o", "raw"), cwd=here.path, env=here.environ, capture_output=True
    )
    assert done.stdout == content[0] + content[1] + b"\n"
    assert here.lines("L1") == ["n1:0  |  20%"]


def test_text_is_utf8_in_any_locale(here: LogsCommand) -> None:
    here.start()
    here.write("n1", raw(T0, 0, "o", "é 漢 \ufffd"))
    here.environ |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        here.argv("L1"), cwd=here.path, env=here.environ, capture_output=True, check=True
    )
    assert without_times(done.stdout.decode()) == "n1:0  | é 漢 \ufffd\n"


def test_a_file_that_cannot_be_read_is_named(ended: LogsCommand) -> None:
    file = ended.paths.log(1, "n1")
    file.unlink()
    file.mkdir()
    done = ended.logs("L1")
    assert done.returncode == 1
    assert f"error: cannot read {file}: Is a directory\n" in done.stderr


def test_a_job_that_died_before_its_nodes_wrote_shows_what_the_batch_script_said(
    here: LogsCommand,
) -> None:
    here.start()
    here.paths.slurm_dir.mkdir()
    words = "job.sbatch: line 3: module: command not found\x1b[2J\n"
    here.paths.batch_output.write_text(2 * words)  # of two nodes
    here.end("FAILED", 127)
    done = here.logs("L1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: job L1 is FAILED and has no log lines: "
        "job.sbatch: line 3: module: command not found\n"
        "  hint: read the batch script's output: clusterrun logs L1 --stream batch\n"
    )
    assert (
        here.lines("L1", "--stream", "batch", "--prefix", "none")
        == ["job.sbatch: line 3: module: command not found"] * 2
    )


def test_the_note_on_the_first_failure_keeps_the_lines_of_its_message(ended: LogsCommand) -> None:
    message = "world contract broken: this rank trains alone\ncause: no process group\nhint: join"
    outcome(ended.paths.root, cause=Cause.WORLD, code=120, rank=1, node="n1", message=message)
    assert ended.logs("L1", "--errors").stderr.startswith(
        "note: first failure: rank 1 on n1: exit 120: world contract broken: this rank trains "
        "alone\n  cause: no process group\n  hint: join\n"
    )


def test_exit_status_tells_how_the_job_ended(ended: LogsCommand) -> None:
    assert ended.logs("L1", "--exit-status").returncode == 0
    ended.end("FAILED", 3)
    assert ended.logs("L1").returncode == 0
    assert ended.logs("L1", "--exit-status").returncode == 3


# Following


class Follower(Watcher):
    """A running `logs -f`."""

    def finish(self) -> tuple[int, list[str], list[str]]:
        code = self.end()
        return code, without_times(self.out.decode()).splitlines(), self.err.splitlines()


@pytest.fixture
def follow(tmp_path: Path) -> Iterator[object]:
    started: list[subprocess.Popen[bytes]] = []

    def start(here: LogsCommand, *args: str) -> Follower:
        out, err = tmp_path / "out.txt", tmp_path / "err.txt"
        where = {"cwd": here.path, "env": here.environ, "stdin": subprocess.DEVNULL}
        with out.open("wb") as stdout, err.open("wb") as stderr:
            argv = here.argv("-f", *args)
            started.append(subprocess.Popen(argv, **where, stdout=stdout, stderr=stderr))
        return Follower(started[-1], out, err)

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_following_shows_lines_as_they_come_and_ends_with_the_job(
    here: LogsCommand, follow: type[Follower]
) -> None:
    running = follow(here, "L1", "--exit-status")
    running.wait_for("job L1 is pending")
    here.start(seconds_ago=80)
    here.write("n1", raw(T0, 0, "o", "step 1"), raw(T0, 1, "o", "not asked for"))
    running.wait_for("step 1\n")
    here.write("n2", raw(T0 + 9, 9, "e", "OSError: no"))
    running.wait_for("OSError: no\n")
    here.write("n1", raw(T0 + 10, 0, "o", "last words"))
    here.end("FAILED", 3)
    code, out, err = running.finish()
    assert code == 3
    assert out == ["n1:0  | step 1", "n2:9  ! OSError: no", "n1:0  | last words"]
    assert err[0] == "job L1 is pending: its controller is starting"
    assert [line for line in err if line.startswith("job L1 FAILED after 00:01:")]


def test_following_a_job_that_has_ended_ends_at_once(ended: LogsCommand) -> None:
    done = ended.logs("-f", "L1", "-a", "-n", "2")
    assert (done.returncode, done.stdout) == (0, "n2:8  | quiet\nn1:0  | step 2\n")
    assert done.stderr.startswith("+ n[1-2]\njob L1 COMPLETED after 00:00:0")


def test_json_of_a_followed_job_is_a_stream_with_an_end(
    here: LogsCommand, follow: type[Follower]
) -> None:
    here.start()
    here.write("n1", raw(T0, 0, "o", "first"))
    running = follow(here, "L1", "--json")
    running.wait_for("first")
    here.write("n1", raw(T0, 0, "o", "second"), attempt=2)
    running.wait_for("second")
    here.end("TIMEOUT", 1)
    code, out, _ = running.finish()
    objects = [json.loads(line) for line in out]
    assert code == 0
    assert [entry.get("text") or entry for entry in objects] == [
        "first",
        {"type": "attempt", "attempt": 2},
        "second",
        {"type": "end", "state": "TIMEOUT", "exit_code": 1},
    ]
    assert [entry["attempt"] for entry in objects if entry["type"] == "line"] == [1, 2]


def test_ctrl_c_ends_the_watching_and_says_that_the_job_goes_on(
    here: LogsCommand, follow: type[Follower]
) -> None:
    here.start()
    here.write("n1", raw(T0, 0, "o", "step 1"))
    running = follow(here, "L1")
    running.wait_for("step 1")
    running.process.send_signal(signal.SIGINT)
    code, out, err = running.finish()
    assert (code, out, err) == (130, ["n1:0  | step 1"], ["+ n1", "job L1 keeps running"])


# Streams


def test_a_reader_that_goes_away_ends_it_quietly(here: LogsCommand) -> None:
    here.start()
    here.write("n1", *(raw(T0 + i, 0, "o", "x" * 100) for i in range(5000)))
    done = finished(
        ["bash", "-c", '"$@" | head -n 1; echo "${PIPESTATUS[0]}"', "-", *here.argv("-n", "all")],
        check=True,
        cwd=here.path,
        env=here.environ,
    )
    assert without_times(done.stdout).splitlines() == ["n1:0  | " + "x" * 100, "141"]
    assert done.stderr == "using job L1 (sft, newest run in runs)\n"


def test_a_full_disk_is_told(ended: LogsCommand) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            ended.argv("L1"),
            cwd=ended.path,
            env=ended.environ,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60 * patience(),
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write to stdout: [Errno 28]")


def _shown(here: LogsCommand, *args: str) -> str:
    code, shown = in_terminal(here.argv(*args), cwd=here.path, env=here.environ)
    assert code == 0
    return without_times(shown)


def test_a_terminal_gets_colours_and_no_control_sequence_of_the_application(
    here: LogsCommand,
) -> None:
    here.start()
    here.write("n1", raw(T0, 0, "e", "\x1b[2J\x1b]0;owned\x07\x1b[1mbold"))
    shown = _shown(here, "L1", "--rank", "0")
    assert shown == "\x1b[93mn1:0 \x1b[0m \x1b[31m!\x1b[0m \x1b[1mbold\x1b[0m\r\n"
    here.environ["NO_COLOR"] = "1"
    assert _shown(here, "L1", "--rank", "0") == "n1:0  ! bold\r\n"
