"""What follows an attempt: the table of causes and options, and that no loop is without end."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from clusterrun.config.choices import OnInterrupt
from clusterrun.errors import NodeExit
from clusterrun.launch.plan import Plan
from clusterrun.node.recovery.rules import FRUITLESS, LOSSES, PREEMPTIONS, Decision, Ground, decide
from clusterrun.rundir.end import Cause, Reason
from clusterrun.rundir.outcome import Next, Outcome
from tests.launch.samples import here, on_slurm

NODES = ("n1", "n2")
RELAUNCH, REQUEUE, SUCCESSOR, STOP = Next.RELAUNCH, Next.REQUEUE, Next.SUCCESSOR, Next.STOP

KILLED = {
    "code": 137,
    "cause": Cause.SIGNAL,
    "reason": "rank 1 on n2: killed by SIGKILL",
    "rank": 1,
}
LOST = {"code": 123, "cause": Cause.NODE_LOST, "reason": "n2: its agent is gone", "node": "n2"}
GONE = {"code": 123, "cause": Cause.VANISHED, "reason": "it left no report"}
HUNG = {"code": 126, "cause": Cause.HUNG, "reason": "rank 1 on n2: no step ended for 900 s"}
LAUNCHER = {"code": 137, "cause": Cause.LAUNCHER, "reason": "n2: the launcher ended", "node": "n2"}
LEFT = {"code": 125, "cause": Cause.INTERRUPTED}
TIME_LIMIT = {**LEFT, "interruption": Reason.TIME_LIMIT, "reason": "the time limit"}
PREEMPTED = {**LEFT, "interruption": Reason.PREEMPT, "reason": "some words"}
ASKED = {"code": 124, "cause": Cause.INTERRUPTED, "reason": "cancelled, after a checkpoint"}
CANCELLED = {"code": 124, "cause": Cause.CANCELLED, "reason": "n1: cancelled"}
APART = {"code": 121, "cause": Cause.RENDEZVOUS, "reason": "n2 did not join within 60 s"}
UNLIKE = {"code": 120, "cause": Cause.WORLD, "reason": "rank 0 on n1: 2 of 4 ranks"}
UNFIT = {"code": 122, "cause": Cause.NODE_UNFIT, "reason": "n2: only 1 GPU for 2 ranks"}
FAILED_CHECK = {"code": 122, "cause": Cause.PREFLIGHT, "reason": "preflight failed: node.tmp on n2"}
COMPLETED = {"code": 0, "cause": Cause.COMPLETED, "reason": "completed"}


NO_CHECKPOINT = (
    "checkpoints/ in the run directory has no complete checkpoint, and the script reported none; "
    "pass --max-restarts N if it saves elsewhere"
)


def ended(what: dict[str, Any], checkpoint: int | None = None, **more: Any) -> Outcome:
    """An attempt's end; the newest checkpoint by then."""
    about = {"attempt": 1, "job_id": "1", "started_at": 1.0, "ended_at": 2.0, "nodes": NODES}
    return Outcome(**{**about, "checkpoint": checkpoint, **what, **more})


@functools.cache
def slurm(**asked: Any) -> Plan:
    return on_slurm(nodes=2, gpus_per_node=2, **asked)


def after(
    *history: Outcome,
    plan: Plan | None = None,
    allocated: Sequence[str] = NODES,
    gone: Sequence[str] = (),
    saved_before: int = -1,
    savers: Sequence[int] = (),
    anew: Sequence[int] = (),
) -> Decision:
    ground = Ground(
        savers=frozenset(savers),
        anew=frozenset(anew),
        saved_before=saved_before,
        plan=plan or slurm(),
        allocated=tuple(allocated),
        unreachable=lambda nodes: tuple(node for node in nodes if node in gone),
    )
    return decide(history, ground)


WIDE = tuple(f"n{n}" for n in range(1, 9))


def histories() -> Iterator[tuple[str, Next, Decision]]:
    """Yield what happened, what must follow, and what does."""
    saved, lost = ended(KILLED, 100), ended(LOST, 100)
    failed = {"code": 3, "cause": Cause.EXIT, "reason": "x"}
    thrown = {"code": 1, "cause": Cause.EXCEPTION, "reason": "x"}
    for what in (KILLED, HUNG, LAUNCHER, LOST, failed):
        yield f"{what['cause']} with a checkpoint", RELAUNCH, after(ended(what, 100))
    for what in (UNLIKE, UNFIT, CANCELLED, ASKED):
        yield f"{what['cause']} of all nodes", STOP, after(ended(what, 100))
    yield "one rank threw", RELAUNCH, after(ended(thrown, 100, alike=1))
    yield "completed", STOP, after(ended(COMPLETED))
    yield "preempted before the first checkpoint", REQUEUE, after(ended(PREEMPTED))
    for choice, step in zip(OnInterrupt, (REQUEUE, SUCCESSOR, STOP), strict=True):
        local = here(nodes=2, nproc_per_node=2, on_interrupt=choice)
        at_once = STOP if step is STOP else RELAUNCH
        yield f"no queue, {choice}", at_once, after(ended(TIME_LIMIT, 100), plan=local)
        plan = slurm(on_interrupt=choice)
        yield f"a failure, {choice}", RELAUNCH, after(saved, plan=plan)
        for what in (TIME_LIMIT, PREEMPTED):
            yield f"{what['reason']}, {choice}", step, after(ended(what, 100), plan=plan)

    for most, failures, step in (0, 1, STOP), (1, 1, RELAUNCH), (1, 2, STOP), (3, 4, STOP):
        counted = [ended(KILLED, 100 * n) for n in range(1, failures + 1)]
        found = after(*counted, plan=slurm(max_restarts=most))
        yield f"failure {failures} of --max-restarts {most}", step, found
    others = [ended(what, 100 + n) for n, what in enumerate((PREEMPTED, LOST, TIME_LIMIT, KILLED))]
    yield "only failures count", RELAUNCH, after(*others, plan=slurm(max_restarts=1))
    unstarted = ended(LAUNCHER, 100, nodes=())  # Slurm refuses steps of a job just started again
    some = [saved, unstarted, unstarted, ended(KILLED, 200)]
    yield "a step that did not start", RELAUNCH, after(*some, plan=slurm(max_restarts=2))
    some.append(ended(KILLED, 300))
    yield "and a third failure", STOP, after(*some, plan=slurm(max_restarts=2))

    progress = [ended(KILLED, step) for step in (100, 100, 200, 200)]
    yield "progress in between", RELAUNCH, after(*progress)
    yield "and none twice", STOP, after(*progress, ended(KILLED, 200))
    yield "a checkpoint before the first step", RELAUNCH, after(ended(KILLED, 0))
    yield "which is progress only once", STOP, after(*[ended(KILLED, 0)] * 3)

    apart = ended(APART, 100)
    yield "nodes that do not meet", RELAUNCH, after(ended(APART))
    yield "twice", STOP, after(apart, apart)
    yield "twice, not in a row", RELAUNCH, after(apart, saved, apart)
    again = [ended(KILLED, 100, attempt=number) for number in range(1, 5)]
    yield "a lost checkpoint was made up for", RELAUNCH, after(*again, savers=[2, 3, 4])
    yield "only once", STOP, after(*again, savers=[2])
    yield "and one began anew", RELAUNCH, after(*again, savers=[2, 3, 4], anew=[3])
    yield "and two began anew", STOP, after(*again, savers=[2, 3, 4], anew=[3, 4])
    for count, anew, step in (19, (), REQUEUE), (20, (), STOP), (3, (2,), REQUEUE), (2, (2,), STOP):
        ends = [ended(TIME_LIMIT, attempt=n + 1, is_handled=True) for n in range(count)]
        yield f"{count} saves in own handlers, anew {anew}", step, after(*ends, anew=anew)

    preempted = ended(PREEMPTED, 100)
    yield "many preemptions", REQUEUE, after(*[preempted] * (PREEMPTIONS - 1))
    yield "more: any SIGTERM looks like one", STOP, after(*[preempted] * (PREEMPTIONS + 1))
    yield "one in between", RELAUNCH, after(saved, preempted, saved)
    yield "many in between", RELAUNCH, after(saved, *[preempted] * LOSSES, saved)
    yield "between two failures", STOP, after(saved, saved, preempted, saved)
    for code in (120, 122):
        own = {"code": code, "cause": Cause.EXIT, "reason": "x"}
        yield f"a script's own status {code}", RELAUNCH, after(ended(own, 100))
    yield "a node lost twice", RELAUNCH, after(saved, lost, lost)
    yield "a node lost often", RELAUNCH, after(saved, *[lost] * (LOSSES - 1))
    yield "without a checkpoint in between", STOP, after(saved, *[lost] * LOSSES)
    yield "a launcher that died of a lost node", SUCCESSOR, after(ended(LAUNCHER), gone=("n2",))
    yield "a launcher that died by itself", STOP, after(ended(LAUNCHER))
    failed_checks = [ended(FAILED_CHECK, unfit=("n2",))] * LOSSES
    spare = (*NODES, "n3")
    yield "preflight fails", RELAUNCH, after(*failed_checks[:-1], allocated=spare)
    yield "on ever new nodes", STOP, after(*failed_checks, allocated=spare)
    for number, step in (2, SUCCESSOR), (3, STOP):
        end = ended(FAILED_CHECK, unfit=WIDE[:number], nodes=WIDE)
        found = after(end, plan=on_slurm(nodes=8, gpus_per_node=2), allocated=WIDE)
        yield f"preflight fails on {number} of 8 nodes", step, found


def test_each_history_has_its_next_step() -> None:
    found = [(what, decision.next, step) for what, step, decision in histories()]
    assert [each for each in found if each[1] is not each[2]] == []
    assert len(found) > 60


SPARE = (*NODES, "n3")
BROKEN = {"code": 1, "cause": Cause.EXCEPTION, "reason": "x", "where": "train.py:7"}
DIED, DIED_AFTER = "2 attempts died without a checkpoint", " beyond step 100"


def reasons() -> Iterator[tuple[Decision, Next, str]]:
    """Yield what is decided, what must be, and why."""
    saved, limit, again = ended(KILLED, 100), ended(TIME_LIMIT, 100), ended(HUNG, 100)
    stops = here(nodes=2, nproc_per_node=2, on_interrupt=OnInterrupt.STOP)
    yield after(limit, plan=stops), STOP, "the time limit; --on-interrupt stop"
    never = "--max-restarts 0: the run has failed 1 time"
    yield after(saved, plan=slurm(max_restarts=0)), STOP, never
    yield after(ended(KILLED)), STOP, NO_CHECKPOINT
    yield after(ended(KILLED), plan=slurm(max_restarts=3)), RELAUNCH, str(KILLED["reason"])
    yield after(saved, saved, again), STOP, DIED + DIED_AFTER
    yield after(ended(KILLED), ended(KILLED), plan=slurm(max_restarts=9)), STOP, DIED
    yield after(saved, saved, saved_before=100), STOP, DIED + DIED_AFTER
    lost = [ended(KILLED, 100, attempt=number) for number in range(1, LOSSES + 2)]
    why = f"{LOSSES} attempts died without a checkpoint{DIED_AFTER}"
    yield after(*lost, savers=range(1, LOSSES + 2)), STOP, why
    yield after(limit, limit), REQUEUE, "the time limit"
    why = "2 attempts ended without a new checkpoint; last: the time limit"
    yield after(limit, limit, limit), STOP, why
    every = "every rank failed at train.py:7: an error in the script"
    yield after(ended(BROKEN, 100, alike=4)), STOP, every
    most = "3 of 4 ranks failed at train.py:7: an error in the script"
    yield after(ended(BROKEN, 100, alike=3)), STOP, most
    yield after(ended(BROKEN, 100, alike=2)), RELAUNCH, "x"
    alone = on_slurm(nodes=1, gpus_per_node=1)
    yield after(ended(BROKEN, 100, nodes=("n1",), alike=1), plan=alone), STOP, every
    out = "n2 is left out: failed in preflight"
    yield after(ended(LOST, 100), allocated=SPARE, gone=("n2",)), RELAUNCH, "n2 is lost"
    yield after(ended(FAILED_CHECK, unfit=("n2",)), allocated=SPARE), RELAUNCH, out
    warned = after(ended(KILLED, 100, unfit=("n2",)), allocated=SPARE)
    yield warned, RELAUNCH, f"{KILLED['reason']}; {out}"
    for code in (int(NodeExit.WORLD_BROKEN), int(NodeExit.NODE_UNFIT)):
        end = ended({"code": code, "cause": Cause.WORLD, "reason": "x"}, 100)
        why = "the ranks did not form one world; a restart would not help"
        yield after(end, plan=slurm(max_restarts=9)), STOP, why


def test_each_decision_has_its_reason() -> None:
    found = [((decision.next, decision.why), (step, why)) for decision, step, why in reasons()]
    assert [pair for pair in found if pair[0] != pair[1]] == []


ON_UNFIT = {"unfit": ("n2",), "node": "n2"}
ONE = on_slurm(nodes=1, gpus_per_node=2, max_restarts=9)


def exclusions() -> Iterator[tuple[str, Decision, Next, tuple[str, ...]]]:
    """Yield what is decided, the step that must follow, and the nodes to leave out."""
    n2, stops = ("n2",), slurm(on_interrupt=OnInterrupt.STOP)
    gone: dict[str, Any] = {"gone": n2}
    lost, before = ended(LOST, 100), ended(KILLED, 100, next=RELAUNCH)
    unstarted = ended(LAUNCHER, 100, nodes=())
    apart = ended(LAUNCHER, 100, nodes=(), exclude=("n3",))
    yield "a step that cannot start in what is left", after(before, unstarted), REQUEUE, ()
    yield "the first step", after(unstarted), RELAUNCH, ()
    yield "without the excluded", after(before, apart), SUCCESSOR, ("n3",)

    yield "a spare node", after(lost, allocated=SPARE, **gone), RELAUNCH, n2
    yield "no spare node", after(lost, **gone), SUCCESSOR, n2
    out = ended(LOST, exclude=("n3",))
    yield "lost too often", after(*[out] * LOSSES, **gone), STOP, ("n3", "n2")
    yield "lost, and to stop", after(out, plan=stops, **gone), STOP, ("n3", "n2")
    second = ended({**LOST, "node": "n3"}, 100, nodes=("n1", "n3"), exclude=n2)
    both: dict[str, Any] = {"gone": ("n2", "n3")}
    room = (*SPARE, "n4")
    yield "a second lost node", after(second, allocated=room, **both), RELAUNCH, ("n2", "n3")
    yield "without room", after(second, allocated=SPARE, **both), SUCCESSOR, ("n2", "n3")
    yield "left out before", after(ended(KILLED, 100, exclude=n2), allocated=SPARE), RELAUNCH, n2

    for checkpoint, most in (None, None), (100, 0):  # nothing of the training has failed
        unfit = ended(FAILED_CHECK, checkpoint, unfit=n2)
        plan = slurm(max_restarts=most)
        yield "unfit, a spare", after(unfit, plan=plan, allocated=SPARE), RELAUNCH, n2
        yield "unfit, no spare", after(unfit, plan=plan), SUCCESSOR, n2
    yield "all unfit", after(ended(FAILED_CHECK, unfit=NODES), allocated=room), STOP, ()
    yield "the directory of the runs", after(ended(FAILED_CHECK, unfit=())), STOP, ()
    local = ended(FAILED_CHECK, unfit=("local1",), nodes=("local0", "local1"))
    yield "simulated nodes", after(local, plan=here(nodes=2, nproc_per_node=2)), STOP, ()

    warned = ended(KILLED, 100, unfit=n2)  # it started in spite of its preflight
    yield "warned, a spare", after(warned, allocated=SPARE), RELAUNCH, n2
    also = ended(LOST, 100, unfit=n2)
    yield "and one lost", after(also, allocated=room, gone=("n1",)), RELAUNCH, ("n1", "n2")
    yield "warned, to stop", after(ended(KILLED, unfit=n2)), STOP, n2
    yield "warned, interrupted", after(ended(TIME_LIMIT, 100, unfit=n2)), REQUEUE, ()
    yield "warned, it may wait", after(warned), RELAUNCH, ()
    yield "warned, to blame", after(ended(KILLED, 100, **ON_UNFIT)), SUCCESSOR, n2
    yield "no queue", after(ended(KILLED, 100, **ON_UNFIT), plan=stops), RELAUNCH, ()
    for step, follows in (None, SUCCESSOR), (3, RELAUNCH):
        end = ended(KILLED, unfit=n2, step=step)
        left_out = n2 if follows is SUCCESSOR else ()
        yield f"step {step}", after(end, plan=slurm(max_restarts=9)), follows, left_out
    alone: dict[str, Any] = {"plan": ONE, "allocated": n2}
    end = ended(KILLED, 100, **ON_UNFIT, nodes=n2)
    yield "the only node was warned of", after(end, **alone), RELAUNCH, ()
    end = ended(FAILED_CHECK, 100, **ON_UNFIT, nodes=n2)
    yield "the only node failed", after(end, **alone), SUCCESSOR, n2


def test_each_history_leaves_out_its_nodes() -> None:
    found = [(name, (d.next, d.exclude), (step, nodes)) for name, d, step, nodes in exclusions()]
    assert [each for each in found if each[1] != each[2]] == []


def test_a_warning_does_not_change_how_a_job_that_slurm_ends_goes_on() -> None:
    end = ended(KILLED, 100, unfit=("n2",))
    ground = Ground(plan=slurm(), allocated=SPARE, is_ending=True, unreachable=lambda _: ())
    assert decide([end], ground).next is REQUEUE


_CAUSES = st.sampled_from((KILLED, HUNG, LAUNCHER, APART, TIME_LIMIT, LOST, UNFIT, ASKED, GONE))
_CHECKPOINTS = st.one_of(st.none(), st.integers(0, 5))
_PASTS = st.lists(st.tuples(_CAUSES, _CHECKPOINTS), max_size=6)


@given(_PASTS, st.lists(_CAUSES, min_size=30, max_size=30), st.sampled_from((None, 0, 2, 99)))
def test_a_run_that_saves_nothing_new_ends_after_a_few_attempts(
    past: list[tuple[dict[str, Any], int | None]], ends: list[dict[str, Any]], most: int | None
) -> None:
    """Preemptions alone go on without end: the queue bounds them, as Slurm's own requeue does."""
    plan = slurm(max_restarts=most)
    history = [ended(what, checkpoint) for what, checkpoint in past]
    newest = max((o.checkpoint for o in history if o.checkpoint is not None), default=None)
    for what in ends:
        history.append(ended(what, newest))
        if after(*history, plan=plan).next is STOP:
            break
    # Losses may stand between two fruitless attempts, or two that did not meet.
    assert len(history) - len(past) <= LOSSES + FRUITLESS


@given(
    st.lists(st.sampled_from((LOST, GONE)), max_size=LOSSES - 2),
    st.one_of(st.none(), st.integers(0, 5)),
    st.sets(st.sampled_from(NODES), max_size=1),
    st.sampled_from((NODES, ("n1", "n2", "n3"))),
)
def test_a_lost_node_is_never_taken_for_a_fault_of_the_script(
    before: list[dict[str, Any]], checkpoint: int | None, gone: set[str], allocated: tuple[str, ...]
) -> None:
    """Neither before the first checkpoint nor after it; a spare node is used at once."""
    history = [ended(what, checkpoint) for what in (*before, LOST)]
    decision = after(*history, allocated=allocated, gone=tuple(gone))
    has_room = not gone or len(allocated) > len(NODES)
    assert decision.next is (RELAUNCH if has_room else SUCCESSOR)
    assert decision.exclude == tuple(gone)


@given(_PASTS, _CAUSES, st.sets(st.sampled_from(("n1", "n2", "n3"))))
def test_no_node_is_left_out_without_evidence(
    past: list[tuple[dict[str, Any], int | None]], what: dict[str, Any], gone: set[str]
) -> None:
    history = [ended(what, checkpoint) for what, checkpoint in past]
    decision = after(
        *history, ended(what, 9, node="n2"), allocated=("n1", "n2", "n3"), gone=tuple(gone)
    )
    is_evident = what["cause"] in ("node_lost", "vanished", "launcher", "hung", "rendezvous")
    assert set(decision.exclude) <= (gone if is_evident else set())
