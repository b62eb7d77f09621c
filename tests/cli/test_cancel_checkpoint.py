"""`cancel --checkpoint`: the ranks are asked first, and waited for; of a chain all jobs end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterrun.cli import cancel
from clusterrun.rundir.end import Cause
from clusterrun.rundir.outcome import Next
from clusterrun.shared.checkpoint_files import Checkpoint, mark
from clusterrun.verbs import cancel as ending
from tests.cli.conftest import CommandLine
from tests.cli.outcomes import checkpoint, outcome
from tests.cli.runs import ended, events, queue, running, submitted
from tests.patience import patience


class Clock:
    """The time of a command that waits: nothing is waited for, and the ranks act meanwhile."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self.deeds: list[Callable[[], object]] = []

    def monotonic(self) -> float:
        return self.waited_s

    def time(self) -> float:
        return time.time() + self.waited_s

    def sleep(self, pause_s: float) -> None:
        self.waited_s += pause_s
        while self.deeds:
            self.deeds.pop(0)()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (ending, cancel):
        monkeypatch.setattr(module, "time", clock)
    return clock


def at_work(here: CommandLine) -> Path:
    """Submit a job that runs and has its first attempt."""
    root = submitted(here)
    queue(here, running())
    events(root, {"type": "started", "host": "node17"})
    return root


def they_save(root: Path, cause: Cause = Cause.INTERRUPTED) -> list[Callable[[], object]]:
    """Return what ranks do that save when they are asked to leave."""
    return [
        lambda: checkpoint(root, 4200),
        lambda: outcome(root, cause=cause, code=124),
        lambda: ended(root, "CANCELLED", 124),
    ]


def test_the_ranks_are_asked_and_what_they_saved_is_said(here: CommandLine, clock: Clock) -> None:
    root = at_work(here)
    clock.deeds += they_save(root)
    said = here("cancel", "--checkpoint", "4711")
    assert (said.code, said.out) == (0, "cancelled 4711  (train, was RUNNING 05:10:40)\n")
    asked, saved = said.err.splitlines()
    assert asked == "asked job 4711 to save a checkpoint, waiting up to 00:05:00"
    assert saved.startswith(f"checkpoint {root}/checkpoints/step-00004200 written after 00:00:")
    assert here.asked("scancel") == ["4711"]
    request = root / "attempts/1/request"
    assert (request.read_text(), request.stat().st_mode & 0o777) == ("cancel\n", 0o600)


def test_a_save_of_the_scripts_own_is_not_taken_for_the_one_that_was_asked_for(
    here: CommandLine, clock: Clock
) -> None:
    root = at_work(here)
    clock.deeds += they_save(root, Cause.CANCELLED)
    said = here("cancel", "--checkpoint", "4711")
    assert "has written no new checkpoint" in said.err
    assert (said.code, said.out) == (3, "cancelled 4711  (train, was RUNNING 05:10:40)\n")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_job_that_completes_instead_was_not_cancelled(
    here: CommandLine, clock: Clock, form: str
) -> None:
    root = at_work(here)
    clock.deeds.append(lambda: ended(root, "COMPLETED", 0))
    said = here("cancel", "--checkpoint", "4711", *(["--json"] if form == "json" else []))
    assert said.code == 0
    assert "warning" not in said.err
    if form == "json":
        assert json.loads(said.out)["jobs"][0]["cancelled"] is False
    else:
        assert said.out == ""
        assert "note: job 4711 completed before it could be cancelled\n" in said.err


def test_a_job_that_does_not_leave_in_time_is_ended(here: CommandLine) -> None:
    root = at_work(here)
    checkpoint(root, 100)
    os.utime(root / "checkpoints")
    time.sleep(0.01)
    said = here("cancel", "--checkpoint", "--timeout", "1s", "4711")
    assert said.code == 3
    assert "has written no new checkpoint; the newest is" in said.err
    assert here.asked("scancel") == ["4711"]


def test_what_keeps_the_ranks_from_saving_is_told_once(here: CommandLine) -> None:
    root = at_work(here)
    events(root, {"type": "interrupted", "reason": "cancel", "heard": False})
    said = here("cancel", "--checkpoint", "--timeout", "90s", "4711").err
    wait = (
        "  note: ranks that are still starting save when they first call it\n"
        "  note: without such a call, the job ends after 00:01:30 (--timeout)\n"
    )
    assert said.count(f"{UNHEARD}\n{wait}  note: to end it now, run: clusterrun cancel 4711\n") == 1


UNHEARD = (
    "warning: job 4711: all ranks were asked to save, but none has called "
    "runtime.should_checkpoint()"
)


@pytest.mark.parametrize("calls", [False, True])
def test_a_script_that_never_asks_is_not_waited_for(
    here: CommandLine, clock: Clock, calls: bool
) -> None:
    root = at_work(here)
    events(root, {"type": "interrupted", "reason": "cancel", "heard": False, "ts": 1.0})
    if calls:  # later, as the training begins
        events(root, {"type": "interrupted", "reason": "cancel", "heard": True, "ts": 2.0})
    assert here("cancel", "--checkpoint", "4711").code == 3
    assert clock.waited_s == pytest.approx(300 if calls else ending.UNHEARD_S, abs=1)


def test_a_job_that_has_no_checkpoint_is_told(here: CommandLine, clock: Clock) -> None:
    root = at_work(here)
    clock.deeds.append(lambda: ended(root, "CANCELLED", 124))
    said = here("cancel", "--checkpoint", "4711")
    assert said.code == 3
    assert "warning: job 4711 has no checkpoint\n" in said.err


@pytest.mark.parametrize("is_marked", [True, False])
def test_what_a_script_saved_in_a_directory_of_its_own_is_found(
    here: CommandLine, clock: Clock, is_marked: bool
) -> None:
    """In clusterrun's way, or in its own: it has told of it. An older one lies beside it."""
    root = at_work(here)
    older = here.path / "elsewhere" / "checkpoint-50"
    older.mkdir(parents=True)
    mark(Checkpoint(path=older, step=50, world_size=4, settings={}))
    place = here.path / "elsewhere" / ("checkpoint-100" if is_marked else "model.pt")

    def save() -> None:
        if is_marked:
            place.mkdir()
            mark(Checkpoint(path=place, step=100, world_size=4, settings={}))
        events(root, {"type": "checkpoint", "path": str(place), "step": 100, "ts": time.time()})

    clock.deeds += [save, *they_save(root)[1:]]
    said = here("cancel", "--checkpoint", "4711")
    assert (said.code, said.err.count("warning")) == (0, 0)
    assert f"checkpoint {place} written after 00:00:" in said.err


def test_a_job_that_waits_has_nothing_to_save(here: CommandLine) -> None:
    root = submitted(here)
    queue(here, "4711|PENDING||0:00|1:00:00|N/A|N/A|||Resources")
    said = here("cancel", "--checkpoint", "4711")
    assert said.code == 0
    assert "note: job 4711 is not running; there is nothing to save\n" in said.err
    assert here.asked("scancel") == ["4711"]
    assert not (root / "attempts").exists()


def test_a_timeout_needs_checkpoint_and_is_a_time(here: CommandLine) -> None:
    at_work(here)
    for argv in (("--timeout=1s",), ("--checkpoint", "--timeout=soon"), ("--timeout=-3",)):
        assert (here("cancel", *argv, "4711").code, here.asked("scancel")) == (2, [])


def test_ctrl_c_stops_the_waiting_alone(here: CommandLine) -> None:
    at_work(here)
    process = subprocess.Popen(
        [sys.executable, "-m", "clusterrun", "cancel", "--checkpoint", "4711"],
        cwd=here.path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stderr is not None
    assert "waiting up to" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60 * patience())
    assert (process.returncode, out) == (130, "")
    assert "stopped waiting for 4711; the ranks still save and exit\n" in err
    assert here.asked("scancel") == []


def chain(root: Path) -> None:
    data = json.loads((root / "job.json").read_text())
    data |= {"chained_job_ids": ["4712", "4713"], "chain_length": 3}
    (root / "job.json").write_text(json.dumps(data))


WAITS = "{}|PENDING||0:00|1:00:00|N/A|N/A|||Dependency"


def followed(root: Path, name: str = "job.json") -> Path:
    """Have job 4712 go on with the run, or write down that it does."""
    record = json.loads((root / "job.json").read_text())
    record |= {"job_id": "4712", "earlier_job_ids": ["4711"]}
    (root / name).write_text(json.dumps(record))
    return root / name


def test_cancel_ends_the_job_by_which_the_run_was_about_to_go_on(
    here: CommandLine, clock: Clock
) -> None:
    """It is submitted from inside the job, and known to nobody when that is cancelled."""
    root = submitted(here)
    queue(here, running(), running("4712"))
    outcome(root, cause=Cause.INTERRUPTED, code=125, next=Next.SUCCESSOR)
    later = followed(root, "later.json")
    clock.deeds.append(lambda: later.replace(root / "job.json"))
    assert here("cancel", "4711").code == 0
    assert here.asked("scancel") == ["4711", "4712"]


@pytest.mark.parametrize("state", ["RUNNING", "FAILED"])
def test_cancel_ends_the_job_by_which_the_run_has_gone_on_meanwhile(
    here: CommandLine, state: str
) -> None:
    """It may train already when Slurm says how the one before stands."""
    root = at_work(here)
    outcome(root, cause=Cause.INTERRUPTED, code=125, next=Next.SUCCESSOR)
    later = followed(root, "later.json")
    queue(here, running().replace("RUNNING", state), running("4712"))
    asked = here.bin / "squeue"
    goes_on = f"mv -f {later} {root}/job.json 2> /dev/null; mkdir -p {root}/attempts/2\n"
    asked.write_text(asked.read_text().replace("\n", f"\n{goes_on}", 1))
    assert here("cancel", "4711").code == 0
    assert here.asked("scancel")[-1:] == ["4712"]


def test_ranks_that_left_for_another_reason_do_not_go_on_in_the_next_job(
    here: CommandLine, clock: Clock
) -> None:
    """The time limit was near: they save for the next job, not since they were asked to."""
    root = at_work(here)
    (root / "attempts/1/request").write_text("time-limit\n")
    queue(here, running(), running("4712"))
    asked = here.bin / "squeue"
    clock.deeds += [
        they_save(root)[0],
        lambda: outcome(root, cause=Cause.INTERRUPTED, code=125, next=Next.SUCCESSOR),
        lambda: followed(root),
        lambda: (root / "attempts/2").mkdir(),
        lambda: asked.write_text(asked.read_text().replace("4711|RUNNING", "4711|FAILED")),
    ]
    assert here("cancel", "--checkpoint", "--timeout", "1s", "4711").code == 0
    assert here.asked("scancel") == ["4712"]


def test_the_rest_of_a_chain_ends_where_its_job_has_ended(here: CommandLine) -> None:
    root = submitted(here)
    chain(root)
    ended(root, "FAILED", 3)
    queue(here, "4711|FAILED|node17|0:31|1:00:00|1000|2000|||None", WAITS.format(4712))
    assert here("cancel", "4711").code == 0
    assert here.asked("scancel") == ["4712"]


def test_a_chain_ends_before_its_job_saves(here: CommandLine, clock: Clock) -> None:
    root = at_work(here)
    chain(root)
    queue(here, running(), WAITS.format(4712), WAITS.format(4713))
    clock.deeds += they_save(root)
    assert here("cancel", "--checkpoint", "4711").code == 0
    assert here.asked("scancel")[:3] == ["4712", "4713", "4711"]


def test_a_chain_whose_job_ran_into_the_limit_stands_as_its_next_job_does(
    here: CommandLine,
) -> None:
    root = submitted(here)
    chain(root)
    ended(root, "TIMEOUT", 124)
    queue(here, WAITS.format(4712), WAITS.format(4713))
    said = here("status", "4711")
    assert "job        4712  train\nstate      PENDING\n" in said.out
    assert "it continues the run once job 4711 has ended" in said.out
