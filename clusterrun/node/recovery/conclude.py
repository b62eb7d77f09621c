"""Record an attempt in its `outcome.json`, and decide what the conductor does next."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clusterrun.config.choices import Scheduler
from clusterrun.config.hosts import node_names
from clusterrun.errors import ClusterrunError, NodeExit
from clusterrun.launch.plan import Plan
from clusterrun.node.base.causes import Ending, NodeError, time_left_s, warning_reason
from clusterrun.node.base.identity import local_node
from clusterrun.node.recovery import printed
from clusterrun.node.recovery.rules import LOSSES, Decision, Ground, decide, judge
from clusterrun.rundir.attempt import amend_attempt, read_attempt
from clusterrun.rundir.end import Cause, Reason, read_request
from clusterrun.rundir.events import EventType, read
from clusterrun.rundir.outcome import Next, Outcome, read_outcome, write_outcome
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.reading import read_plan
from clusterrun.rundir.record import job_id_in
from clusterrun.shared import checkpoint_files
from clusterrun.shared.hostlist import parse_hostlist

# The causes of exit statuses if the agents left no outcome, as after a failed setup line.
_CAUSES = {
    int(NodeExit.NODE_UNFIT): Cause.NODE_UNFIT,
    int(NodeExit.RENDEZVOUS_FAILED): Cause.RENDEZVOUS,
}
_KILLED = (Cause.SIGNAL, Cause.LAUNCHER, Cause.CANCELLED)
_INTERRUPTIONS = (Reason.TIME_LIMIT, Reason.PREEMPT, Reason.SIGNAL)  # the job gives up its nodes


class Account:
    """Record how far the training got; rank 0 reports it."""

    def __init__(self, paths: RunPaths, number: int, job_id: str) -> None:
        self._paths, self._number, self._job_id = paths, number, job_id
        self._started_at = time.time()
        self._step: int | None = None
        self._total = 0  # steps of the training, as far as they are known
        self.checkpoint: int | None = None  # the newest step saved, also by earlier attempts
        self.is_at_last_step = False  # the last step has been reported
        self.unfit: tuple[str, ...] = ()  # nodes that failed a check before the launch

    def open(self) -> None:
        """Read what was saved before. Raises NodeError after LOSSES attempts without a report."""
        if earlier := past(self._paths, self._number):
            self._correct(earlier[-1])
        saved = [outcome.checkpoint for outcome in earlier if outcome.checkpoint is not None]
        self.checkpoint = max(saved, default=None)
        vanished = [outcome for outcome in earlier[-LOSSES:] if outcome.cause is Cause.VANISHED]
        if len(vanished) == LOSSES:
            text = f"{LOSSES} attempts in a row left no report: each lost its batch host"
            raise NodeError(NodeExit.NODE_LOST, text)

    def _correct(self, last: Outcome) -> None:
        """Record that Slurm has requeued the job, if the last outcome says something else."""
        is_undecided = last.code != 0 and not last.why
        is_same_job = last.job_id == self._job_id
        was_cancelled = last.cause is Cause.CANCELLED and last.next is Next.STOP
        is_requeued = is_same_job and (was_cancelled or last.next is Next.SUCCESSOR)
        if is_undecided or is_requeued:  # why a successor followed also explains a requeue
            why = last.why if last.next is Next.SUCCESSOR else "Slurm started the job again"
            with contextlib.suppress(OSError):
                write_outcome(self._paths, dataclasses.replace(last, next=Next.REQUEUE, why=why))

    def take(self, event: Mapping[str, Any]) -> None:
        """Record a step, a checkpoint, or the step from which the attempt resumed."""
        step = event.get("step")
        if not isinstance(step, int):
            return
        if event.get("type") == "step":
            self._step = step
            # A trainer that is stopped early reports its last step as the total.
            total = event.get("total")
            self._total = max(self._total, total if isinstance(total, int) else 0)
            self.is_at_last_step = step == self._total > 0  # 0: no total is known
        elif event.get("type") == "checkpoint":
            if self._step is not None:  # steps are reported once a second
                self._step = max(step, self._step)
            self.checkpoint = max(step, self.checkpoint or 0)
        elif event.get("type") == "resumed":
            with contextlib.suppress(OSError):
                if read_attempt(self._paths, self._number).resumed is None:  # the first one counts
                    amend_attempt(self._paths, self._number, resumed=step)

    def close(self, ending: Ending, nodes: tuple[str, ...]) -> None:
        """Write the outcome; a full disk must not stop the run."""
        outcome = outcome_of(ending, self._number, self._job_id, nodes, self._started_at)
        outcome = dataclasses.replace(
            outcome, step=self._step, checkpoint=self.checkpoint, unfit=self.unfit
        )
        with contextlib.suppress(OSError):
            write_outcome(self._paths, outcome)


def outcome_of(
    ending: Ending, number: int, job_id: str, nodes: tuple[str, ...], started_at: float
) -> Outcome:
    """Return the outcome of an attempt, without how far it got."""
    failure = ending.failure
    return Outcome(
        attempt=number,
        job_id=job_id,
        started_at=started_at,
        ended_at=time.time(),
        nodes=nodes,
        code=ending.code,
        cause=ending.cause,
        reason=ending.reason,
        interruption=ending.interruption,
        is_handled=ending.is_handled,
        failed_at=failure.at if failure else None,
        node=failure.node if failure else None,
        rank=failure.rank if failure else None,
        where=(failure.where or None) if failure else None,
        signal=failure.signal if failure else 0,
        message=failure.message if failure else "",
        alike=ending.alike,
    )


def conclude(
    paths: RunPaths,
    number: int,
    code: int,
    env: Mapping[str, str],
    unreachable: Callable[[Sequence[str]], tuple[str, ...]],
) -> Decision:
    """Decide what follows an attempt that ended with exit status `code`, and record it.

    `unreachable` returns those of some nodes that can't be reached.
    Raises OSError or ValueError if the run's files can't be read.
    """
    plan = read_plan(paths)
    record = StepRecord(paths, range(_first(paths, number), number + 1))
    before = [_with_checkpoint(outcome, record) for outcome in past(paths, number)]
    newest = read_outcome(paths, number) or _unreported(paths, number, code, env)
    newest = _blame_interruption(paths, newest, plan.cluster.scheduler)
    if newest.interruption is Reason.TIME_LIMIT:  # or a person's signal, if much time is left
        left_s = time_left_s(env, newest.ended_at)
        if left_s is None and not plan.time_minutes:
            left_s = float("inf")  # the job has no time limit
        if left_s is not None:
            newest = _interrupted(newest, warning_reason(left_s, plan.warning_s))
    before_resume = (read_outcome(paths, n) for n in range(1, _first(paths, number)))
    saved = [each.checkpoint for each in before_resume if each and each.checkpoint is not None]
    newest = dataclasses.replace(
        newest,
        step=record.ended.get(number) if newest.step is None else newest.step,
        checkpoint=_newest_saved(paths, [*before, newest], record),
        # A relaunch runs without the nodes that the decision before it left out.
        exclude=before[-1].exclude if before and before[-1].next is Next.RELAUNCH else (),
    )
    newest = dataclasses.replace(newest, verdict=judge(paths, newest))
    ground = Ground(
        plan=plan,
        saved_before=max(saved, default=-1),
        savers=record.savers,
        anew=record.anew,
        allocated=_allocated(plan, env),
        is_ending=read_request(paths.request(number)) in _INTERRUPTIONS,
        unreachable=unreachable,
    )
    decision = decide([*before, newest], ground)._replace(state=newest.state)
    decided = {name: getattr(decision, name) for name in ("next", "why", "exclude", "rule")}
    with contextlib.suppress(OSError):  # a full disk must not stop the run
        write_outcome(paths, dataclasses.replace(newest, **decided))
    return decision


def past(paths: RunPaths, number: int) -> list[Outcome]:
    """Return the outcomes before attempt `number` since a person resumed the run, oldest first.

    An attempt without an outcome was lost with its batch host.
    """
    first = _first(paths, number)

    def vanished(attempt: int) -> Outcome:
        return Outcome(
            attempt=attempt,
            job_id="",
            started_at=0.0,
            ended_at=0.0,
            nodes=read_attempt(paths, attempt).nodes,
            code=int(NodeExit.NODE_LOST),
            cause=Cause.VANISHED,
            reason="it left no report",
            next=Next.REQUEUE,
        )

    return [read_outcome(paths, n) or vanished(n) for n in range(first, number)]


def _first(paths: RunPaths, number: int) -> int:
    """Return the number of the first attempt since a person started or resumed the run."""
    return 1 + max((n for n in range(1, number) if paths.earlier_end(n).exists()), default=0)


def _unreported(paths: RunPaths, number: int, code: int, env: Mapping[str, str]) -> Outcome:
    """Return what is known if the agents left no outcome."""
    record = read_attempt(paths, number)
    hosts = (*_hostlist(env), socket.gethostname())
    message = printed.last_reason(paths.batch_output, record.printed, hosts)  # from that byte on
    return Outcome(
        attempt=number,
        job_id=job_id_in(env),
        started_at=record.taken_at or time.time(),
        ended_at=time.time(),
        nodes=record.nodes,
        code=code,
        cause=_CAUSES.get(code, Cause.LAUNCHER),
        reason=message or f"the agents exited with status {code} and reported no reason",
        message=message,
        node=record.nodes[0] if record.nodes else None,
    )


def _blame_interruption(paths: RunPaths, outcome: Outcome, scheduler: Scheduler) -> Outcome:
    """Change the outcome's cause if ranks were killed because they did not exit when asked to.

    A run that a person ends does not continue, even if its ranks failed while they saved.
    """
    requested = read_request(paths.request(outcome.attempt))
    if requested is Reason.CANCEL and outcome.cause is not Cause.INTERRUPTED:
        return dataclasses.replace(outcome, cause=Cause.CANCELLED)
    if outcome.cause not in _KILLED:
        return outcome
    # Slurm signals a preemption to the agents only, all other ends also to the conductor. A host
    # that has lost the controller also signals its agent: that is no cancellation, either.
    if requested is None and outcome.cause is Cause.CANCELLED and not scheduler.is_this_machine:
        requested = Reason.PREEMPT
    return _interrupted(outcome, requested) if requested in _INTERRUPTIONS else outcome


def _interrupted(outcome: Outcome, reason: Reason) -> Outcome:
    return dataclasses.replace(
        outcome,
        code=int(NodeExit.INTERRUPTED),
        cause=Cause.INTERRUPTED,
        interruption=reason,
        reason=reason.text,
    )


def _newest_saved(paths: RunPaths, history: Sequence[Outcome], record: StepRecord) -> int | None:
    """Return the step of the newest checkpoint, also if no agent lived to report it.

    `record` also has checkpoints of this attempt on the disk whose event was not written.
    """
    known = [record.newest(history[-1].attempt), *(outcome.checkpoint for outcome in history)]
    if steps := [step for step in known if step is not None]:
        return max(steps)
    # These attempts have saved nothing. A resumed run has checkpoints of earlier ones.
    on_disk, _ = checkpoint_files.newest(paths.checkpoints_dir, contents=False)
    return on_disk.step if on_disk else None


def _with_checkpoint(outcome: Outcome, record: StepRecord) -> Outcome:
    """Add the newest checkpoint at the end of an attempt: its agents may have missed it."""
    newest = record.newest(outcome.attempt)
    if outcome.checkpoint is not None:  # the agents' report includes earlier attempts
        newest = max(0, outcome.checkpoint, *record.saved.get(outcome.attempt, ()))
    return dataclasses.replace(outcome, checkpoint=newest)


def _allocated(plan: Plan, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the job's nodes, which may be more than an attempt needs."""
    if plan.cluster.scheduler.is_this_machine:
        return tuple(map(local_node, range(plan.nodes)))
    if plan.cluster.scheduler.has_hosts:
        return node_names(plan.hosts)
    return _hostlist(env)


def _hostlist(env: Mapping[str, str]) -> tuple[str, ...]:
    text = env.get("CLUSTERRUN_HOSTS_NODES") or env.get("SLURM_JOB_NODELIST", "")
    with contextlib.suppress(ClusterrunError):
        return tuple(parse_hostlist(text))
    return ()


MARKERS = 8  # a run may keep hundreds, and each lists all files of all ranks


class StepRecord:
    """By attempt: the first and the last step, and the steps that were saved.

    It reads the events of rank 0's nodes, once: a run of a month has millions of steps. It also
    reads the newest checkpoints on disk: an agent that is killed right after a save has not written
    its event.
    """

    def __init__(self, paths: RunPaths, attempts: range) -> None:
        self.began: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.saved: dict[int, set[int]] = {}
        listed = checkpoint_files.listed(paths.checkpoints_dir, checkpoint_files.ANY)
        for _, path in listed[:MARKERS]:
            with contextlib.suppress(checkpoint_files.IncompleteError):
                found, _ = checkpoint_files.read_marker(path)
                if found.attempt in attempts:
                    self.saved.setdefault(found.attempt, set()).add(found.step)
        worlds = [read_attempt(paths, n).nodes for n in attempts]
        for first_node in {nodes[0] for nodes in worlds if nodes}:
            for event in read(paths.events(first_node), (EventType.STEP, EventType.CHECKPOINT)):
                attempt, step = event.attempt, event.step
                if attempt not in attempts or step is None:
                    continue
                if event.type is EventType.CHECKPOINT:
                    self.saved.setdefault(attempt, set()).add(step)
                else:
                    self.began[attempt] = min(step, self.began.get(attempt, step))
                    self.ended[attempt] = max(step, self.ended.get(attempt, step))

    def newest(self, attempt: int) -> int | None:
        """Return the newest step that had been saved when an attempt ended."""
        saved = (max(steps) for number, steps in self.saved.items() if number <= attempt)
        return max(saved, default=None)

    @property
    def anew(self) -> frozenset[int]:
        """The attempts whose first step is below half of the last step of the attempt before."""
        return frozenset(n for n, step in self.began.items() if 2 * step < self.ended.get(n - 1, 0))

    @property
    def savers(self) -> frozenset[int]:
        """The attempts that saved a step after their first step."""
        last_saved = {attempt: max(steps) for attempt, steps in self.saved.items()}
        return frozenset(n for n, step in last_saved.items() if step > self.began.get(n, step))
