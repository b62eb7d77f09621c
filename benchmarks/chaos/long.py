"""Inject random faults into one long training, with a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.chaos.figures import Interruption
from benchmarks.report import Section, Value, median
from clusterrun.rundir.end import read_end
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.state import JobState
from tests.chaos.checks import Reference, problems
from tests.chaos.faults import FAULTS, UNDISTURBED, Fault, Scene, TooLateError
from tests.chaos.training import SAVE_EVERY, Training, submit
from tests.chaos.undergo import stage, wait_until_over
from tests.cluster.cluster import Cluster
from tests.patience import wait_for

# Faults that can hit any run more than once.
REPEATED = (
    *("rank killed", "rank stopped", "agent killed", "head's agent killed", "node killed"),
    *("first node killed", "link cut for 20 s", "link cut for good", "preempted"),
    *("scontrol requeue", "slurmctld restarted", "slurmdbd down", "run directory full"),
    *("checkpoint corrupted", "shard missing", "ports taken"),
)
OPTIONS = (
    *("--partition", "low", "--max-restarts", "1000", "--on-interrupt", "successor"),
    *("--hang-timeout", "5s"),
)
MANY = replace(UNDISTURBED, name="many", attempts=None)
STEPS_A_FAULT = 5 * SAVE_EVERY  # a restart of slurmctld takes hundreds
COMES_BACK_S = 900.0  # a lost first node takes SlurmdTimeout and two minutes more


@dataclass(kw_only=True)
class Long:
    """A long run, its random numbers, and the faults that hit it."""

    training: Training
    cluster: Cluster
    dice: random.Random
    happened: list[tuple[str, int, float]] = field(default_factory=list)
    too_late: list[str] = field(default_factory=list)

    def hurt(self, fault: Fault) -> None:
        """Inject a fault once this attempt has made two checkpoints; one that is late is none."""
        try:
            with ExitStack() as undo:
                self._hurt(fault, undo)
        except TooLateError:
            self.too_late.append(fault.name)
        self.cluster.heal()

    def _hurt(self, fault: Fault, undo: ExitStack) -> None:
        attempt = self._wait(self._settled, "two checkpoints")
        time.sleep(self.dice.random())
        scene = Scene(cluster=self.cluster, training=self.training, attempt=attempt, undo=undo)
        at = fault.inject(scene)
        if fault.attempts is not None:
            last = attempt + fault.attempts - 1
            self._wait(lambda: self._has_come(last), f"attempt {last}")
        self._wait(lambda: self._trains_since(at), "a step after the fault")
        self.happened.append((fault.name, attempt, at))

    def _wait(self, condition: Callable[[], int], what: str) -> int:
        """Wait for a condition and return its value. Raises TooLateError if the run completes."""
        wait_for(lambda: condition() or self._is_over(), what, COMES_BACK_S)
        if not (value := condition()):
            raise TooLateError(f"{what}: the training was over")
        return value

    def _is_over(self) -> bool:
        end = read_end(RunPaths(root=self.training.root))
        return end is not None and end.state is JobState.COMPLETED

    def _settled(self) -> int:
        """Return the newest attempt if it trains and has saved twice."""
        attempt = self.training.newest_attempt
        return attempt if len(self.training.saved(attempt)) >= 2 and not self._is_over() else 0

    def _has_come(self, attempt: int) -> bool:
        self.cluster.start_requeued(self.training.job_ids[-1])
        return self.training.newest_attempt >= attempt

    def _trains_since(self, at: float) -> bool:
        lines = self.training.printed(self.training.newest_attempt)
        return bool(lines) and lines[-1].at > at


def endure(directory: Path, cluster: Cluster, *, faults: int, seed: int) -> Section:
    """Train once undisturbed and once with faults, and compare."""
    dice, steps = random.Random(seed), faults * STEPS_A_FAULT
    with stage(directory / "undisturbed", cluster) as here:
        calm = submit(here, steps=steps)
        wait_until_over(calm, cluster, timeout_s=3600)
        reference = Reference.of(calm)
    with stage(directory / "long", cluster) as here:
        training = submit(here, *OPTIONS, steps=steps)
        run = Long(training=training, cluster=cluster, dice=dice)
        begin = time.time()
        for _ in range(faults):
            run.hurt(FAULTS[dice.choice(REPEATED)])
        wait_until_over(training, cluster, timeout_s=3600)
        state = str(training.status()["state"])
        wrong = problems(training, reference, MANY, state, _unusable(run))
        cluster.wait_no_processes(60)
        return _section(run, state, wrong, seed=seed, took_s=time.time() - begin)


def _unusable(run: Long) -> dict[int, int]:
    """Return how many checkpoints were damaged right before each attempt."""
    return {attempt + 1: FAULTS[name].unusable for name, attempt, _ in run.happened}


def _section(run: Long, state: str, wrong: list[str], *, seed: int, took_s: float) -> Section:
    rows: list[dict[str, Value]] = []
    for name in sorted({name for name, _, _ in run.happened}):
        costs = [
            Interruption.of(run.training, attempt, at)
            for of, attempt, at in run.happened
            if of == name
        ]
        new_steps = [cost.trained_at - cost.hurt_at for cost in costs if cost.trained_at]
        lost = [cost.lost_steps for cost in costs if cost.lost_steps is not None]
        rows.append(
            {
                "fault": name,
                "times": len(costs),
                "new_step_s": median(new_steps) if new_steps else None,
                "slowest_s": max(new_steps, default=None),
                "lost_steps": max(lost, default=0),
            }
        )
    late = f"; too late, so none: {', '.join(run.too_late)}" if run.too_late else ""
    said = (
        "; ".join(wrong) or "nothing lost, the final state bit for bit that of the undisturbed run"
    )
    return Section(
        title=f"{len(run.happened)} faults at random in one run",
        about=f"Seed {seed}, {run.training.steps} steps, a checkpoint every {SAVE_EVERY}: {state} "
        f"after {took_s:.0f} s in {run.training.newest_attempt} attempts and "
        f"{len(run.training.job_ids)} jobs; {said}{late}. New step: from the fault to the first "
        "step of the next attempt, median and slowest; lost steps: the most that were repeated "
        "after the attempt with the fault, even if a later fault ended that attempt.",
        rows=rows,
    )
