"""What the conductor does between attempts, in time that does not pass: steps, signals and disks
are made by hand, the files are real."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from clusterrun.errors import ClusterrunError, Exit, NodeExit, SchedulerUnreachableError
from clusterrun.node.base.causes import Ending
from clusterrun.node.conductor import conductor as module
from clusterrun.node.conductor.agents import Agents, AgentsState
from clusterrun.node.conductor.conductor import Conductor
from clusterrun.node.conductor.host import Host
from clusterrun.node.recovery.rules import Decision
from clusterrun.rundir.attempt import take_attempt
from clusterrun.rundir.end import Reason, read_end, read_request
from clusterrun.rundir.outcome import Next
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.state import JobState
from tests.launch.samples import on_slurm

CANCELLED, INTERRUPTED = int(NodeExit.CANCELLED), int(NodeExit.INTERRUPTED)
LOST = int(NodeExit.NODE_LOST)
STAYS = float("inf")
Deed = Callable[[], object]


class FakeStep:
    """An attempt that ends with a status after some seconds."""

    def __init__(self, scene: Scene, code: int, lasts_s: float) -> None:
        self.scene, self.code = scene, code
        self.ends_at = scene.now + lasts_s
        self.deeds: list[str] = []

    def poll(self) -> int | None:
        return self.code if self.scene.now >= self.ends_at or "kill" in self.deeds else None

    def end(self) -> None:
        self.deeds.append("end")
        if not self.scene.records_end:
            self.ends_at = min(self.ends_at, self.scene.now + 1)

    def kill(self) -> None:
        if self.poll() is None:
            self.deeds.append("kill")


class FakeAgents(Agents):
    """The agents of a run, who do what a test says."""

    port = 7

    def __init__(self) -> None:
        self.found: Ending | None = None
        self._leader = self._serving = self._thread = None
        self.deeds: list[int] = []  # the attempts that agents at rest were given; 0: to leave
        self.is_met = False
        self.begin(0)

    @property
    def ending(self) -> Ending | None:
        return self.found

    @property
    def have_met(self) -> bool:
        return self.is_met

    def begin(self, attempt: int) -> None:
        self.state, self.is_met, self.found = AgentsState.TRAIN, False, None

    def serve(self) -> None:
        return

    def go_on(self, attempt: int) -> bool:
        if self.state is not AgentsState.REST:
            return False
        self.deeds.append(attempt)
        self.begin(attempt)
        return True

    def dismiss(self) -> None:
        self.deeds.append(0)

    def leave(self) -> None:
        """Have all agents leave, but for one that is lost."""
        self.state = AgentsState.LEFT


def ended(code: int) -> Ending:
    return Ending(code=code, reason="x")


class Scene(Host):
    """A run, a host and a clock: waiting is what makes time pass."""

    job_id = "42"
    register_after_s = 5.0

    is_requeued = False

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root=root)
        self.plan = on_slurm(nodes=2, gpus_per_node=1)
        self.now = 1000.0
        self.agents = FakeAgents()
        self.environ: Mapping[str, str] = {"SLURM_JOB_ID": "42"}
        self.records_end, self.time_limit_s = True, STAYS
        self.steps: list[FakeStep] = []
        self.attempts: list[tuple[float, int]] = [(1.0, 0)]  # of each: seconds and status
        self.decisions: list[Decision | Exception] = []
        self.events: list[tuple[float, int | Deed]] = []
        self.asked: list[Any] = []
        self.refusals: list[str | Exception] = []
        self.silent_until, self.over_at = 0.0, STAYS
        self.successor: str | Exception = "43"
        self.reason = ""
        self.meanwhile: Deed = lambda: None  # while it is decided what follows

    # The clock and its signals

    def at(self, seconds: float, event: int | Deed) -> None:
        """Have a signal arrive, or something happen, some seconds from now."""
        self.events.append((self.now + seconds, event))
        self.events.sort(key=lambda pair: pair[0])

    def wait(self, seconds: float) -> list[int]:
        until = self.now + seconds
        due = [pair for pair in self.events if pair[0] <= until]
        if not due:
            self.now = until
            return []
        self.events.remove(due[0])
        self.now = max(self.now, due[0][0])
        event = due[0][1]
        if isinstance(event, int):
            return [event]
        event()
        return []

    # The host

    def nothing_left(self) -> str:
        return self.reason

    def start(
        self, attempt: int, *, port: int, is_relaunch: bool, excluded: tuple[str, ...]
    ) -> FakeStep:
        self.asked.append((attempt, is_relaunch, excluded))
        lasts_s, code = self.attempts[min(len(self.steps), len(self.attempts) - 1)]
        self.steps.append(FakeStep(self, code, lasts_s))
        return self.steps[-1]

    def register(self) -> None:
        self.asked.append(("register", self.now))

    def is_over(self) -> bool:
        return self.now >= self.over_at

    def answers(self) -> bool:
        return self.now >= self.silent_until

    def was_requeued(self) -> bool:
        return self.is_requeued

    def requeue(self) -> str:
        self.asked.append("requeue")
        answer = self.refusals.pop(0) if self.refusals else ""
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stay_down(self) -> None:
        self.asked.append(("stay_down", self.end()))

    def submit_successor(self, excluded: tuple[str, ...]) -> str:
        self.asked.append(("successor", excluded))
        self.wait(0)
        if isinstance(self.successor, Exception):
            raise self.successor
        return self.successor

    # The rule book

    def decide(self, attempt: int, code: int) -> Decision:
        self.asked.append(("decide", attempt, code))
        self.meanwhile()
        decision = self.decisions.pop(0)
        if isinstance(decision, Exception):
            raise decision
        return decision

    def conductor(self) -> Conductor:
        return OfScene(
            paths=self.paths,
            plan=self.plan,
            host=self,
            hear=self.wait,
            agents=self.agents,
            scene=self,
            clock=lambda: self.now,
        )

    def run(self) -> int:
        return self.conductor().run()

    def fails(self, *codes: int, lasts_s: float = 1.0) -> Scene:
        """Have the attempts end with these statuses, the last one always."""
        self.attempts = [(lasts_s, code) for code in codes]
        return self

    def decides(self, *decisions: Decision | Exception) -> Scene:
        self.decisions = [*decisions]
        return self

    def taken(self) -> list[str]:
        return sorted(path.name for path in self.paths.attempts_dir.iterdir())

    def end(self) -> tuple[JobState, int | None] | None:
        end = read_end(self.paths)
        return (end.state, end.exit_code) if end else None

    def request(self) -> Reason | None:
        return read_request(self.paths.request(1))

    def elsewhere(self, number: int) -> None:
        assert take_attempt(self.paths, number, "another job")


def follow(step: Next, *exclude: str, state: JobState = JobState.FAILED) -> Decision:
    return Decision(next=step, why="why", exclude=exclude, state=state)


RELAUNCH, STOP = follow(Next.RELAUNCH), follow(Next.STOP)
REQUEUE, SUCCESSOR = follow(Next.REQUEUE), follow(Next.SUCCESSOR)


@dataclass(kw_only=True)
class OfScene(Conductor):
    """A conductor that asks the scene what follows."""

    scene: Scene

    def conclude(self) -> Decision:
        return self.scene.decide(self.attempt, self.code)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


# One attempt


@pytest.mark.parametrize(
    ("code", "agreed", "status"),
    [(143, 3, 3), (143, None, 143), (0, 3, 0), (1, 0, 1), (143, "122", 122)],
)
def test_the_status_that_the_agents_agreed_on_explains_the_steps(
    scene: Scene, code: int, agreed: int | str | None, status: int
) -> None:
    scene.decisions = [follow(Next.STOP, state=JobState.TIMEOUT)]
    if isinstance(agreed, str):  # a setup line failed on a node, which has no agent
        scene.at(0.5, lambda: scene.paths.status(1).write_text(f"{agreed}\n"))
    elif agreed is not None:
        scene.at(0.5, lambda: setattr(scene.agents, "found", ended(agreed)))
    assert scene.fails(code).run() == status
    assert scene.end() == (JobState.TIMEOUT if status else JobState.COMPLETED, status)


def test_no_attempt_is_taken_if_nothing_is_left_to_do_or_the_script_does_not_fit_its_plan(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scene.reason = "the run has ended"
    assert scene.run() == 0
    assert (scene.paths.attempts_dir.exists(), scene.end()) == (False, None)
    scene.reason, scene.asked = "", []
    capfd.readouterr()
    monkeypatch.setattr(scene, "refusal", lambda: "the job has 1 node")
    assert (scene.run(), scene.end()) == (int(Exit.USAGE), (JobState.FAILED, 2))
    assert capfd.readouterr().err == "clusterrun: the job has 1 node\n"
    assert [what[0] for what in scene.asked] == ["register", "stay_down"]


def test_a_step_that_cannot_start_is_a_failure_that_leaves_an_end(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object, **__: object) -> FakeStep:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "srun")

    monkeypatch.setattr(scene, "start", missing)
    assert scene.run() == 127
    assert scene.end() == (JobState.FAILED, 127)
    assert "srun" in capfd.readouterr().err


def test_a_bug_of_the_conductor_leaves_an_end_and_no_step(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> str:
        raise TypeError("bug")

    monkeypatch.setattr(module, "followed_by", broken)
    scene.attempts = [(STAYS, 0)]
    scene.at(1, scene.agents.leave)
    assert scene.run() == 1
    assert scene.end() == (JobState.FAILED, 1)
    assert scene.steps[0].deeds == ["kill"]


# The record


@pytest.mark.parametrize(("after_s", "lasts_s", "times"), [(5, 9, 1), (5, 3, 0), (0, 1, 1)])
def test_a_job_is_registered_once_whoever_submitted_it_had_time_to(
    scene: Scene, after_s: float, lasts_s: float, times: int
) -> None:
    scene.register_after_s, scene.attempts = after_s, [(lasts_s, 0)]
    begin = scene.now
    scene.run()
    registered = [what[1] - begin for what in scene.asked if what[0] == "register"]
    assert registered == [pytest.approx(after_s, abs=0.5)] * times


# Relaunch


def test_a_relaunch_is_the_next_attempt_in_the_same_allocation(scene: Scene) -> None:
    scene.decisions = [follow(Next.RELAUNCH, "n2", "n5"), RELAUNCH]
    assert scene.fails(123, 137, 0).run() == 0
    attempts = [what for what in scene.asked if isinstance(what[0], int)]
    assert attempts == [(1, False, ()), (2, True, ("n2", "n5")), (3, True, ())]
    assert scene.end() == (JobState.COMPLETED, 0)


def refuse_attempts(
    monkeypatch: pytest.MonkeyPatch, refusals: int, number: int, code: int = errno.ENOSPC
) -> list[int]:
    """Have the disk refuse an attempt some times; each refusal is listed."""
    refused: list[int] = []

    def take(paths: RunPaths, attempt: int, owner: str) -> bool:
        if attempt == number and len(refused) < refusals:
            refused.append(attempt)
            raise OSError(code, os.strerror(code))
        return take_attempt(paths, attempt, owner)

    monkeypatch.setattr(module, "take_attempt", take)
    return refused


@pytest.mark.parametrize(
    ("attempt", "trouble", "refusals", "code"),
    [
        (2, errno.EIO, 3, 0),  # a run that has begun survives any trouble of its disk
        (1, errno.EDQUOT, 3, 0),
        (1, errno.EACCES, 1, 1),
        (1, errno.ENOSPC, 999, 1),
    ],
)
def test_an_attempt_waits_ten_minutes_for_a_disk_that_takes_it(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    attempt: int,
    trouble: int,
    refusals: int,
    code: int,
) -> None:
    refused = refuse_attempts(monkeypatch, refusals, attempt, trouble)
    scene.decisions = [RELAUNCH]
    begin = scene.now
    assert scene.fails(137, 0).run() == code
    assert len(refused) == refusals or 600 <= scene.now - begin < 640
    said = capfd.readouterr().err
    assert said.count("; retrying for up to 10 minutes") == (trouble != errno.EACCES)
    assert said.count("cannot write to") == code
    assert scene.end() == ((JobState.FAILED, 1) if code else (JobState.COMPLETED, 0))


def test_a_job_that_is_ended_while_its_disk_is_full_waits_no_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = refuse_attempts(monkeypatch, 999, 2)
    scene.decisions = [RELAUNCH]
    scene.at(12, signal.SIGTERM)
    assert scene.fails(137).run() == CANCELLED
    assert len(refused) <= 4
    assert scene.end() == (JobState.CANCELLED, CANCELLED)


# Requeue and successor


LEAVES_OUT, NOT_HERE = follow(Next.SUCCESSOR, "n2", "n5"), ClusterrunError("no", cause="not\nhere")


@pytest.mark.parametrize(
    ("decision", "refusals", "successor", "asked", "said"),
    [
        (REQUEUE, [], "43", ["requeue"], []),
        (
            REQUEUE, ["not allowed"], "43", ["requeue", ("successor", ()), ("stay_down", None)],
            ["Slurm does not requeue this job: not allowed", "job 43 continues the run"],
        ),
        (LEAVES_OUT, [], "43", [("successor", ("n2", "n5")), ("stay_down", None)], []),
        (
            SUCCESSOR, [], NOT_HERE, [("successor", ()), "requeue"],
            ["cannot submit a successor: no: not here", "this job is requeued instead"],
        ),
    ],
)  # fmt: skip
def test_slurm_is_asked_for_the_next_job_and_this_one_has_no_end(
    scene: Scene,
    capfd: pytest.CaptureFixture[str],
    decision: Decision,
    refusals: list[str | Exception],
    successor: str | Exception,
    asked: list[Any],
    said: list[str],
) -> None:
    scene.decisions, scene.refusals, scene.successor = [decision], refusals, successor
    assert scene.fails(INTERRUPTED).run() == INTERRUPTED
    assert scene.asked[1 + scene.asked.index(("decide", 1, INTERRUPTED)) :] == asked
    words = capfd.readouterr().err
    assert [line for line in said if line not in words] == []
    assert scene.end() is None


@pytest.mark.parametrize(("silences", "is_requeued"), [(5, True), (6, False)])
def test_a_requeue_that_slurmctld_did_not_hear_is_asked_again(
    scene: Scene, silences: int, is_requeued: bool
) -> None:
    scene.decisions = [REQUEUE]
    scene.refusals = [SchedulerUnreachableError("silent", cause="timed out")] * silences
    assert scene.fails(INTERRUPTED).run() == INTERRUPTED
    assert (("successor", ()) in scene.asked) is not is_requeued


def test_a_run_that_nobody_continues_has_failed_and_says_how_to(
    scene: Scene, capfd: pytest.CaptureFixture[str]
) -> None:
    scene.decisions, scene.successor = [REQUEUE], ClusterrunError("no")
    scene.refusals = ["no"]
    assert scene.fails(137).run() == 137
    assert "run 'clusterrun resume 42'" in capfd.readouterr().err
    assert scene.end() == (JobState.FAILED, 137)


# Warnings


def test_slurms_warning_is_a_request_to_the_head_once_the_disk_has_room(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, tries = module.write_request, count()
    monkeypatch.setattr(module, "write_request", lambda *of: next(tries) and write(*of))
    scene.attempts = [(3 * module.ROOM_POLL_S, 0)]
    scene.at(0.5, signal.SIGUSR2)
    assert scene.run() == 0
    assert read_request(scene.paths.request(1)) is Reason.TIME_LIMIT


def test_a_warning_is_passed_on_to_the_attempt_that_follows(scene: Scene) -> None:
    scene.decisions = [RELAUNCH]
    scene.at(0.5, signal.SIGUSR2)
    scene.fails(137, 0).run()
    assert read_request(scene.paths.request(2)) is Reason.TIME_LIMIT


# Lost nodes


@pytest.mark.parametrize(("lost", "wait_s"), [((), module.RELEASE_S), (("n2",), 0.0)])
def test_a_step_that_stays_once_the_agents_have_left_gets_a_moment_unless_a_node_is_lost(
    scene: Scene, lost: tuple[str, ...], wait_s: float
) -> None:
    scene.decisions, scene.attempts = [follow(Next.STOP, *lost)], [(STAYS, 0)]
    scene.at(1, scene.agents.leave)
    begin = scene.now
    assert scene.run() == LOST
    assert scene.steps[0].deeds == ["kill"]
    assert scene.now - begin == pytest.approx(1 + wait_s, abs=0.3)


# Agents that rest


def rest(scene: Scene, code: int = 137) -> Deed:
    """Have the agents of an attempt rest after a failure."""

    def resting() -> None:
        scene.agents.state, scene.agents.found = AgentsState.REST, ended(code)

    return resting


def begin(scene: Scene, attempt: int) -> Deed:
    """Have the agents that rest begin an attempt, if they were given it."""

    def beginning() -> None:
        assert scene.agents.deeds[-1] == attempt
        scene.agents.is_met = True

    return beginning


def started(scene: Scene) -> list[int]:
    return [what[0] for what in scene.asked if isinstance(what[0], int)]


def test_agents_that_rest_take_the_next_attempt_in_the_same_step(scene: Scene) -> None:
    scene.silent_until = STAYS  # as all agents are there, nobody else continues the run
    scene.decisions, scene.attempts = [RELAUNCH, RELAUNCH], [(5.0, 0)]
    scene.at(1, rest(scene))
    scene.at(2, begin(scene, 2))
    scene.at(3, rest(scene))
    scene.at(4, begin(scene, 3))
    assert scene.run() == 0
    assert (started(scene), scene.taken()) == ([1], ["1", "2", "3"])
    asked = [what for what in scene.asked if what[0] == "decide"]
    assert asked == [("decide", 1, 137), ("decide", 2, 137)]
    assert scene.steps[0].deeds == []


@pytest.mark.parametrize(
    "decision", [STOP, REQUEUE, SUCCESSOR, follow(Next.RELAUNCH, "n2"), KeyError("bug")]
)
def test_agents_that_rest_leave_if_their_step_takes_no_other_attempt(
    scene: Scene, decision: Decision | Exception
) -> None:
    scene.decisions, scene.attempts = [decision], [(STAYS, 0), (1.0, 0)]
    scene.at(1, rest(scene))
    scene.run()
    assert scene.agents.deeds == [0]
    is_relaunched = isinstance(decision, Decision) and decision.next is Next.RELAUNCH
    assert started(scene) == ([1, 2] if is_relaunched else [1])
    assert scene.steps[0].deeds == ["kill"]


@pytest.mark.parametrize(
    ("lasts_s", "code"),
    [(STAYS, 0), (1.0, 143), (1.1, 143)],
    ids=["they waited too long", "their step dies before", "their step dies after"],
)
def test_agents_that_cannot_take_the_next_attempt_are_replaced_and_it_costs_no_attempt(
    scene: Scene, lasts_s: float, code: int
) -> None:
    scene.decisions, scene.attempts = [RELAUNCH], [(lasts_s, code), (1.0, 0)]
    scene.at(0.95, rest(scene))
    if lasts_s == STAYS:
        scene.meanwhile = lambda: scene.at(0, scene.agents.leave)
    assert scene.run() == 0
    assert (started(scene), scene.taken()) == ([1, 2], ["1", "2"])
    assert scene.steps[0].deeds == (["kill"] if lasts_s == STAYS else [])


# How a job ends


End = tuple[JobState, int] | None
OVER = (JobState.CANCELLED, CANCELLED)


def ends(new: Callable[[], Scene]) -> Iterator[tuple[str, Scene, int, End, list[str]]]:
    """Yield jobs, and the exit status, the end and the attempts of each."""
    scene = new().fails(7).decides(KeyError("bug"))
    yield "nothing can be decided", scene, 7, (JobState.FAILED, 7), ["1"]
    yield "it stops", new().fails(3).decides(STOP), 3, (JobState.FAILED, 3), ["1"]
    for when_s in (0.0, 0.5):
        (scene := new().fails(143)).at(when_s, signal.SIGTERM)
        yield f"it is ended at {when_s}", scene, CANCELLED, OVER, ["1"]
    resting = new().fails(0, lasts_s=STAYS).decides(RELAUNCH)
    resting.at(1, rest(resting))
    resting.meanwhile = lambda: resting.at(0, signal.SIGTERM)
    yield "it is ended while its agents rest", resting, CANCELLED, OVER, ["1"]
    late = new().fails(137).decides(RELAUNCH)
    late.meanwhile = lambda: late.elsewhere(2)
    yield "another job takes the next attempt", late, INTERRUPTED, None, ["1", "2"]
    lost = new().fails(0, lasts_s=STAYS)
    lost.at(1, partial(lost.elsewhere, 2))
    lost.at(2, lost.agents.leave)
    yield "others took it for lost", lost, INTERRUPTED, None, ["1", "2"]
    (scene := new().fails(INTERRUPTED).decides(REQUEUE)).is_requeued = True
    yield "its script has requeued it", scene, INTERRUPTED, None, ["1"]
    (scene := new()).at(0.5, signal.SIGTERM)
    scene.is_requeued = True
    yield "Slurm ends it for that", scene, CANCELLED, None, ["1"]


def test_a_job_leaves_one_end_and_no_step(tmp_path: Path) -> None:
    paths = (tmp_path / str(number) for number in count())

    def new() -> Scene:
        (path := next(paths)).mkdir()
        return Scene(path)

    for what, scene, *expected in ends(new):
        assert [scene.run(), scene.end(), scene.taken()] == expected, what
        assert all(step.poll() is not None for step in scene.steps)
        is_kept_down = ("stay_down", scene.end()) in scene.asked
        assert is_kept_down is (scene.end() is not None and expected[0] != CANCELLED)
        assert not {"requeue", "successor"} & {asked[0] for asked in scene.asked}


# A slurmctld that is silent


def test_nothing_is_decided_while_slurmctld_is_silent(
    scene: Scene, capfd: pytest.CaptureFixture[str]
) -> None:
    scene.silent_until = scene.now + 60
    scene.decisions = [RELAUNCH]
    scene.at(50, lambda: scene.asked.append(("silent",)))
    assert scene.fails(137, 0).run() == 0
    asked = [what[0] for what in scene.asked]
    assert asked.index("silent") < asked.index("decide")
    assert capfd.readouterr().err.count("waits until slurmctld answers") == 1


# The end of the job from outside


@pytest.mark.parametrize("is_over", [True, False])
def test_the_end_is_written_as_soon_as_slurm_ends_the_job(scene: Scene, is_over: bool) -> None:
    """Slurm may kill the conductor before its step has left."""
    scene.attempts = [(60.0, 143)]
    if is_over:
        scene.over_at = scene.now
    state = JobState.TIMEOUT if is_over else JobState.CANCELLED
    scene.at(10, signal.SIGTERM)
    scene.at(11, lambda: scene.asked.append(("end", scene.end(), scene.steps[0].poll())))
    assert scene.run() == CANCELLED
    assert ("end", (state, CANCELLED), None) in scene.asked
    assert read_request(scene.paths.request(1)) is Reason.END
    assert scene.end() == (state, CANCELLED)
    assert not [what for what in scene.asked if what[0] == "decide"], "there is little time left"


# Where only end.json knows how the job ended, and nobody else holds its time limit


@pytest.fixture
def here(scene: Scene) -> Scene:
    scene.records_end = False
    return scene


@pytest.mark.parametrize(("code", "status"), [(143, 143), (0, CANCELLED)])
def test_a_job_here_ends_its_own_step_and_has_its_status(
    here: Scene, code: int, status: int
) -> None:
    here.attempts = [(60.0, code)]
    here.at(10, signal.SIGTERM)
    here.at(10.5, lambda: here.asked.append(("end", here.paths.end.exists())))
    assert here.run() == status
    assert ("end", False) in here.asked, "readers would take the job for ended"
    assert here.end() == (JobState.CANCELLED, status)
    assert here.steps[0].deeds == ["end"]


def test_the_time_limit_is_held_and_warned_of(here: Scene) -> None:
    here.time_limit_s, here.attempts = 600, [(STAYS, 143)]
    begin = here.now
    seen: list[Reason | None] = []
    for after_s in (-1, 1):
        here.at(600 - here.plan.warning_s + after_s, lambda: seen.append(here.request()))
    assert (here.run(), seen) == (143, [None, Reason.TIME_LIMIT])
    assert here.end() == (JobState.TIMEOUT, 143)
    assert here.now - begin == pytest.approx(601, abs=2)


def test_a_run_that_left_at_its_limit_gets_a_new_one_and_a_restart_shares_it(here: Scene) -> None:
    here.time_limit_s = 600
    here.attempts = [(500, 137), (50, INTERRUPTED), (550, 0)]
    here.decisions = [RELAUNCH, follow(Next.RELAUNCH, state=JobState.TIMEOUT)]
    assert here.run() == 0
    assert read_request(here.paths.request(3)) is Reason.TIME_LIMIT  # its own warning
    assert here.end() == (JobState.COMPLETED, 0)
