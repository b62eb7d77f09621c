"""The batch script and its conductor as real processes, from a start to a signal or a restart.

What is decided and when is held by tests/node/test_conductor.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterrun.errors import NodeExit
from tests.patience import patience, wait_for
from tests.rendering.job import BatchSite, end_of, make_site, rendered
from tests.road import descendants

pytestmark = [pytest.mark.agents, pytest.mark.timeout(180)]
CANCELLED, INTERRUPTED = int(NodeExit.CANCELLED), int(NodeExit.INTERRUPTED)
UNFIT = int(NodeExit.NODE_UNFIT)


class BatchRun:
    """A run directory and the batch script that runs it."""

    def __init__(self, site: BatchSite, **asked: object) -> None:
        self.site = site
        self.bundle = rendered(site.plan(**{"nodes": 2, **asked}))
        self.path = site.run_dir(self.bundle)
        self.started: list[subprocess.Popen[str]] = []

    def run(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.site.run(self.bundle, str(self.path), *args, **variables)

    def start(self, **variables: str) -> subprocess.Popen[str]:
        """Start the script with a srun that stays."""
        given = {"STUB_SRUN_SLEEP": "60", **variables}
        self.started.append(self.site.start(self.bundle, str(self.path), **given))
        return self.started[-1]

    def start_step(self, **variables: str) -> subprocess.Popen[str]:
        """Start the script and wait until its srun runs."""
        process = self.start(**variables)
        self.wait_for("srun.up")
        return process

    def wait_for(self, name: str) -> None:
        wait_for((self.site.stubs / name).exists)

    def attempt(self, number: int = 1) -> Path:
        return self.path / "attempts" / str(number)

    def attempts(self) -> list[str]:
        return sorted(path.name for path in (self.path / "attempts").iterdir())

    def srun(self, number: int) -> list[str]:
        return [os.fsdecode(arg) for arg in self.site.got(f"srun.{number}.args")]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[BatchRun]:
    run = BatchRun(make_site(tmp_path))
    yield run
    for process in run.started:
        for pid in descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=60 * patience())


def test_a_relaunch_is_the_next_attempt_in_the_same_allocation(run: BatchRun) -> None:
    run.site.ends(1, 137, checkpoint=100)
    done = run.run(STUB_SRUN_STATUS="137 0")
    assert done.returncode == 0
    assert run.attempts() == ["1", "2"]
    assert [run.srun(number)[-3] for number in (1, 2)] == ["1", "2"]
    again = run.srun(2)[:-3]
    again.remove("--immediate=60")  # nodes that are lost are not waited for
    assert run.srun(1)[:-3] == again
    assert end_of(run.path)["state"] == "COMPLETED"
    assert [path for path in run.path.iterdir() if path.name.startswith(".")] == []
    assert "attempt 1: relaunch: why" in done.stderr


@pytest.mark.parametrize(
    ("end_time", "state"), [("4000000000", "CANCELLED"), ("1000000000", "TIMEOUT")]
)
def test_when_slurm_ends_the_job_its_end_is_written_at_once(
    run: BatchRun, end_time: str, state: str
) -> None:
    process = run.start_step(SLURM_JOB_END_TIME=end_time)
    process.send_signal(signal.SIGTERM)
    wait_for((run.path / "end.json").exists)
    assert (run.attempt() / "request").read_text() == "end\n"
    assert process.poll() is None  # it waits for srun: agents may still be saving
    for pid in descendants(process.pid)[:-1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60 * patience())
    assert process.returncode == CANCELLED
    assert (end_of(run.path)["state"], end_of(run.path)["exit_code"]) == (state, CANCELLED)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_slurms_warning_is_a_request_to_the_head(run: BatchRun, number: int) -> None:
    process = run.start_step()
    process.send_signal(number)
    wait_for((run.attempt() / "request").exists)
    assert (run.attempt() / "request").read_text() == "time-limit\n"
    assert process.poll() is None


def test_the_submission_of_a_successor_is_not_cut_short(tmp_path: Path) -> None:
    """Else the job may be in the queue, and nobody knows of it who could cancel it."""
    run = BatchRun(make_site(tmp_path), on_interrupt="successor")
    run.site.ends(1, INTERRUPTED, "interrupted", reason="the time limit", checkpoint=100)
    process = run.start(
        STUB_SRUN_SLEEP="", STUB_SRUN_STATUS=str(INTERRUPTED), STUB_SBATCH_SLEEP="2"
    )
    run.wait_for("sbatch.up")
    for pid in descendants(process.pid):  # as Slurm does, each of its processes
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGTERM)
    _, said = process.communicate(timeout=60 * patience())
    assert process.returncode == CANCELLED
    assert "job 4712 continues the run" in said
    assert not (run.path / "end.json").exists()


# Before the conductor runs


def test_setup_lines_run_once_here_and_once_on_each_node_from_the_same_start(
    tmp_path: Path,
) -> None:
    count = 'echo "$PWD" >> "$STUB_DIR/setup.$((SLURM_NODEID))${SLURM_NODEID:-x}"'
    setup = (count, "cd /", 'export DEEP="$DEEP/x"', 'export FROM_SETUP="a b"', "DEEPER=1")
    run = BatchRun(make_site(tmp_path), setup=setup)
    run.site.ends(1, 137, checkpoint=100)
    assert run.run(STUB_SRUN_STATUS="137 0", DEEP="0").returncode == 0
    times = {path.name: path.read_text() for path in run.site.stubs.glob("setup.*")}
    here = f"{run.site.root}\n"
    assert times == {"setup.0x": here, "setup.00": here * 2, "setup.11": here * 2}
    assert run.site.env_of("python.agent.1.env")[b"DEEP"] == b"0/x"


def test_modules_of_the_project_do_not_stand_in_for_pythons_own(run: BatchRun) -> None:
    for name in ("secrets", "platform", "statistics", "signal", "select", "clusterrun", "json"):
        (run.site.workdir / f"{name}.py").write_text("raise ImportError('the wrong one')\n")
    (run.site.workdir / "logging").mkdir()
    (run.site.workdir / "logging" / "__init__.py").write_text("raise ImportError('wrong')\n")
    run.site.ends(1, 137, checkpoint=100)
    done = run.run(STUB_SRUN_STATUS="137 0")
    assert (done.returncode, "wrong" in done.stderr) == (0, False)


WAY_OUT = "; install clusterrun[train] there, or name another interpreter with --python"


def test_srun_ignores_and_blocks_no_signal(run: BatchRun) -> None:
    (run.site.stubs / "srun").write_text("#!/bin/bash\nexec grep Sig /proc/self/status\n")
    done = run.run()
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("Sig")]
    masks = {name.rstrip(":"): int(mask, 16) for name, mask in lines if name != "SigQ:"}
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG):
        assert not (masks["SigIgn"] | masks["SigBlk"]) & 1 << (number - 1)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("#!/no/interpreter\n", ": cannot execute: required file not found"),
        ("#!/bin/bash\nexit 3\n", ""),
        (
            "#!/bin/bash\nexec python3 -I -S -c 'import no_such_module'\n",
            ": ModuleNotFoundError: No module named 'no_such_module'",
        ),
    ],
)
def test_a_python_that_cannot_start_leaves_a_reason_and_an_end(
    run: BatchRun, broken: str, why: str
) -> None:
    python = run.site.stubs / "python"
    python.write_text(broken)
    done = run.run()
    assert done.returncode == UNFIT
    line = done.stderr.splitlines()[-1]
    assert f"{python} cannot run clusterrun{':' if why else ';'} " in line
    assert line.endswith(f"{why}{WAY_OUT}")
    assert (end_of(run.path)["state"], end_of(run.path)["exit_code"]) == ("FAILED", UNFIT)


def test_an_end_that_is_there_outlives_a_job_that_cannot_start(tmp_path: Path) -> None:
    """A later job of a chain may come upon a run that is complete."""
    run = BatchRun(make_site(tmp_path), setup=("false",))
    (run.path / "end.json").write_text('{"state": "COMPLETED"}\n')
    assert run.run("chained").returncode == UNFIT
    assert end_of(run.path) == {"state": "COMPLETED"}


def test_a_plan_that_cannot_be_read_is_the_end(run: BatchRun) -> None:
    (run.path / "plan.json").write_text("{}\n")
    assert run.run().returncode == 1
    assert end_of(run.path)["state"] == "FAILED"


def test_a_job_that_is_ended_while_setup_lines_run_was_cancelled(tmp_path: Path) -> None:
    run = BatchRun(make_site(tmp_path), setup=('touch "$STUB_DIR/setup.up"; sleep 1',))
    process = run.start()
    run.wait_for("setup.up")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60 * patience())
    assert process.returncode == CANCELLED
    assert (end_of(run.path)["state"], run.attempt().exists()) == ("CANCELLED", False)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("setup_s", [0, 1])
def test_a_warning_while_setup_lines_run_or_python_starts_ends_nothing(
    tmp_path: Path, number: int, setup_s: int
) -> None:
    lines = (f'touch "$STUB_DIR/setup.up"; sleep {setup_s}',)
    for place, pause_s in enumerate((0.0,) if setup_s else (0.02, 0.06, 0.12, 0.2)):
        (tmp_path / str(place)).mkdir()
        run = BatchRun(make_site(tmp_path / str(place)), setup=lines)
        process = run.start(STUB_SRUN_SLEEP="")
        run.wait_for("setup.up")
        time.sleep(pause_s)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        process.communicate(timeout=60 * patience())
        assert process.returncode == 0, pause_s


def test_the_scripts_own_logic_fits_on_one_screen(run: BatchRun) -> None:
    """It is the one part of what happens between attempts that no tool checks."""
    lines = run.bundle.script.splitlines()
    first = max(n for n, line in enumerate(lines) if line.startswith("#SBATCH"))
    logic, delimiter = [], ""
    for line in lines[first + 1 :]:
        if not delimiter and "<<'" in line:
            delimiter = line.split("<<'")[1].split("'")[0]
        elif not delimiter:
            logic.append(line)
        elif line == delimiter:
            delimiter = ""
    assert 40 < len(logic) <= 66
