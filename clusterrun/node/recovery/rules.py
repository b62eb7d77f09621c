"""Decide what follows an attempt, also by the verdict on a failure: its cause, by the logs."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile
from typing import Final, NamedTuple

from clusterrun.config.choices import OnInterrupt
from clusterrun.diagnosis.kinds import Certainty, Retry
from clusterrun.errors import ClusterrunError, NodeExit
from clusterrun.launch.plan import Plan
from clusterrun.node.base.processes import fork_answer
from clusterrun.rundir.end import Cause, Reason
from clusterrun.rundir.outcome import Next, Outcome, ShortVerdict, VerdictRule
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import shell
from clusterrun.shared.files import parse_object
from clusterrun.shared.state import JobState
from clusterrun.shared.typed import decoded
from clusterrun.shared.wording import count

FRUITLESS = 2  # consecutive attempts that may die without a new checkpoint
LOSSES = 5  # the same, including those that lost a node or only regained lost checkpoints
PREEMPTIONS = 20  # the same, for preemptions (any SIGTERM looks like Slurm's) and scripts that save

_NO_WORLD = "the ranks did not form one world; a restart would not help"
# Failures that a restart would repeat.
_LASTING = {
    Cause.WORLD: _NO_WORLD,
    Cause.WORLD_ELSEWHERE: _NO_WORLD,
    Cause.ENGINE: "the ranks would not train with the requested engine; a restart would not help",
    Cause.NODE_UNFIT: "a node is unfit; a restart would not help",
}
_LOST = (Cause.NODE_LOST, Cause.VANISHED)
_OF_NODES = (*_LOST, Cause.PREFLIGHT)  # not of the training; the logs say no more
# Possible first signs of a lost node.
_LOSS_SIGNS = (*_LOST, Cause.LAUNCHER, Cause.HUNG, Cause.HALTED, Cause.RENDEZVOUS)
JUDGE: Final = "clusterrun.verbs.diagnose"  # an upper room, which this one only starts
_QUIET = {"agents", "shared disk"}  # threads that hold no lock while an attempt is concluded
LIMIT_S: Final = 5.0  # a verdict that takes longer delays no restart
_MOST_FAULTY: Final = 1 / 4  # of the nodes: more point to something that they share
# Ends that the logs explain. Lost nodes and nodes that do not meet have rules of their own.
_EXPLAINED: Final = (Cause.EXCEPTION, Cause.EXIT, Cause.SIGNAL, Cause.LAUNCHER, Cause.HUNG)


class Decision(NamedTuple):
    """What comes next, why, which nodes to leave out, and the job's state if it ends here."""

    next: Next
    why: str
    exclude: tuple[str, ...] = ()
    state: JobState = JobState.FAILED
    rule: VerdictRule | None = None  # the rule on verdicts that decided, if one did


class Ground(NamedTuple):
    """What the decision depends on besides the attempts."""

    plan: Plan
    allocated: tuple[str, ...]  # the job's nodes
    unreachable: Callable[[Sequence[str]], tuple[str, ...]]  # those that can't be reached
    saved_before: int = -1  # the newest checkpoint before these attempts, -1 without one
    # Attempts that saved a step after their first, even if later steps had been saved and lost.
    savers: frozenset[int] = frozenset()
    anew: frozenset[int] = frozenset()  # those that began far behind the end of the one before
    is_ending: bool = False  # Slurm is about to take the nodes


def decide(history: Sequence[Outcome], ground: Ground) -> Decision:
    """Decide what follows the newest attempt; `history` has the oldest first and is not empty."""
    newest = history[-1]
    if newest.code == 0:
        return _stop("complete")
    if newest.cause is Cause.CANCELLED:
        return _stop("cancelled")
    if newest.cause is Cause.INTERRUPTED:
        return _after_interruption(history, ground)
    if newest.cause in _LASTING:
        return _stop(_LASTING[newest.cause])
    is_relaunch = len(history) > 1 and history[-2].next is Next.RELAUNCH
    # A relaunch failed before any agent ran: a lost step still holds the nodes.
    if ground.plan.cluster.scheduler.has_queue and is_relaunch and _is_unstarted(newest):
        return _in_the_queue(ground, "no job step could be started on these nodes", newest.exclude)
    bad = _Bad(  # each side of a broken network blames the other: all are asked
        lost=ground.unreachable(newest.nodes) if newest.cause in _LOSS_SIGNS else (),
        faulty=_faulty_nodes(newest),
        unfit=_few(newest.unfit, newest) if ground.plan.cluster.scheduler.can_lose_node else (),
    )
    if newest.cause is Cause.PREFLIGHT and not bad.unfit:
        return _stop("the nodes share the problem that preflight found; a restart would not help")
    exclude = _left_out(newest, bad)
    is_of_nodes = bool(bad.lost or bad.faulty)
    if not is_of_nodes and (decision := _stop_if_repeated(history, exclude)):
        return decision
    if reason := _why_futile(history, ground, are_nodes_to_blame=is_of_nodes):
        return _stop(reason, exclude)  # a person who resumes may want to know which nodes are bad
    return _restart(newest, ground, bad)


def _is_unstarted(outcome: Outcome) -> bool:
    """Return whether no agent met the others, as when Slurm refuses a step."""
    return outcome.cause is Cause.LAUNCHER and not outcome.nodes


def _stop(why: str, exclude: tuple[str, ...] = (), rule: VerdictRule | None = None) -> Decision:
    return Decision(next=Next.STOP, why=why, exclude=exclude, rule=rule)


def _after_interruption(history: Sequence[Outcome], ground: Ground) -> Decision:
    """Continue through the queue, unless the run cannot, or too many attempts saved nothing."""
    newest = history[-1]
    if newest.code == NodeExit.CANCELLED:
        return _stop("cancelled")
    if not (outlives := ground.plan.cluster.scheduler.outlives_shell):  # a Lack, which says why
        return _stop(f"{newest.reason}; {outlives}")
    is_preempted = newest.interruption is Reason.PREEMPT
    # Preempted attempts get more tries, and handlers: what these save may be unknown.
    if (is_preempted or newest.is_handled) and len(_unsaved(history, ground)) >= PREEMPTIONS:
        return _stop(f"{PREEMPTIONS} attempts ended without a new checkpoint")
    if not is_preempted and len(_of_training(_fruitless(history, ground))) >= FRUITLESS:
        return _stop(f"{FRUITLESS} attempts ended without a new checkpoint; last: {newest.reason}")
    return _in_the_queue(ground, newest.reason)


def _in_the_queue(ground: Ground, why: str, exclude: tuple[str, ...] = ()) -> Decision:
    """Requeue the job or submit a successor, as `on_interrupt` says; without a queue, relaunch."""
    plan = ground.plan
    if plan.on_interrupt is OnInterrupt.STOP:
        return _stop(f"{why}; --on-interrupt stop", exclude)
    if not plan.cluster.scheduler.has_queue:  # hosts that are lost may come back
        return Decision(next=Next.RELAUNCH, why=why, exclude=exclude)
    # A requeued job can't exclude nodes.
    requeues = plan.on_interrupt is not OnInterrupt.SUCCESSOR and plan.cluster.scheduler.can_requeue
    following = Next.REQUEUE if requeues and not exclude else Next.SUCCESSOR
    return Decision(next=following, why=why, exclude=exclude)


def _why_futile(history: Sequence[Outcome], ground: Ground, *, are_nodes_to_blame: bool) -> str:
    """Return why a restart would be useless, "" if it would not."""
    plan, newest = ground.plan, history[-1]
    from_outside = (Cause.COMPLETED, Cause.INTERRUPTED, Cause.CANCELLED, *_OF_NODES)
    failed = [o for o in history if o.cause not in from_outside and not _is_unstarted(o)]
    if plan.max_restarts is not None and len(failed) > plan.max_restarts:
        times = count(len(failed), "time")
        return f"--max-restarts {plan.max_restarts}: the run has failed {times}"
    ranks = len(newest.nodes) * plan.procs_per_node
    if newest.alike > ranks / 2:
        what = "every rank" if newest.alike == ranks else f"{newest.alike} of {ranks} ranks"
        return f"{what} failed at {newest.where}: an error in the script"
    # `stuck` includes attempts that only regained lost checkpoints; `fruitless` ends at them.
    fruitless, stuck = _fruitless(history, ground), _not_preempted(_no_further(history, ground))
    if newest.cause is Cause.RENDEZVOUS and len(stuck) < LOSSES:  # it is tried once more
        is_second = len(history) > 1 and history[-2].code == newest.code
        return "the nodes could not reach each other" if is_second else ""
    is_of_nodes = are_nodes_to_blame or newest.cause in _OF_NODES
    if needs_checkpoint(plan, newest.checkpoint) and not is_of_nodes:
        text = "checkpoints/ in the run directory has no complete checkpoint"
        return f"{text}, and the script reported none; pass --max-restarts N if it saves elsewhere"
    if len(_of_training(fruitless)) >= FRUITLESS or len(stuck) >= LOSSES:
        beyond = "" if newest.checkpoint is None else f" beyond step {newest.checkpoint}"
        return f"{len(stuck)} attempts died without a checkpoint{beyond}"
    return ""


def needs_checkpoint(plan: Plan, checkpoint: int | None) -> bool:
    """Return whether a failed run stops because it has saved nothing."""
    return plan.max_restarts is None and checkpoint is None


def _fruitless(history: Sequence[Outcome], ground: Ground) -> list[Outcome]:
    """Return the latest attempts that saved nothing, newest first, without preempted ones.

    A preemption says nothing about the training. An attempt whose own signal handlers saved ends
    the list, unless it began anew, and so repeated steps, or the next one did, ignoring the save.
    """

    def has_saved_nothing(outcome: Outcome) -> bool:
        return not outcome.is_handled or bool({outcome.attempt, outcome.attempt + 1} & ground.anew)

    return _not_preempted(takewhile(has_saved_nothing, _unsaved(history, ground)))


def _not_preempted(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.interruption is not Reason.PREEMPT]


def _unsaved(history: Sequence[Outcome], ground: Ground) -> list[Outcome]:
    """Return the latest consecutive attempts that saved nothing, or began anew despite saves."""
    useful = ground.savers - ground.anew
    found = _no_further(history, ground)
    return list(takewhile(lambda outcome: outcome.attempt not in useful, found))


def _no_further(history: Sequence[Outcome], ground: Ground) -> list[Outcome]:
    """Return the latest consecutive attempts that did not advance the newest checkpoint."""
    found: list[Outcome] = []
    for index in reversed(range(len(history))):
        before = max(_saved(o) for o in history[:index]) if index else ground.saved_before
        if _saved(history[index]) > before:
            break
        found.append(history[index])
    return found


def _saved(outcome: Outcome) -> int:
    return -1 if outcome.checkpoint is None else outcome.checkpoint


def _of_training(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the attempts that neither lost a node nor failed in preflight."""
    return [outcome for outcome in outcomes if outcome.cause not in _OF_NODES]


class _Bad(NamedTuple):
    """The nodes to leave out: gone, blamed by the verdict, or failed in preflight."""

    lost: tuple[str, ...]
    faulty: tuple[str, ...]
    unfit: tuple[str, ...]


def _left_out(newest: Outcome, bad: _Bad) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*newest.exclude, *bad.lost, *bad.faulty, *bad.unfit)))


def _are_enough(ground: Ground, exclude: Sequence[str]) -> bool:
    """Return whether a relaunch without these nodes has as many as the job needs."""
    left = [node for node in ground.allocated if node not in exclude]
    return len(left) >= ground.plan.nodes and not ground.is_ending


def _leaves_unfit(newest: Outcome, ground: Ground, bad: _Bad) -> bool:
    """Return whether the next attempt does without the nodes that failed preflight.

    If preflight only warned of them, it does if enough nodes are left, or if it may wait in the
    queue for others and they may be why this attempt failed.
    """
    if newest.cause is Cause.PREFLIGHT or _are_enough(ground, _left_out(newest, bad)):
        return True
    may_wait = len(newest.nodes) > 1 and ground.plan.on_interrupt is not OnInterrupt.STOP
    has_trained = newest.step is not None or newest.checkpoint is not None
    return may_wait and (newest.node in bad.unfit or not has_trained)


def _restart(newest: Outcome, ground: Ground, bad: _Bad) -> Decision:
    """Relaunch on the remaining nodes if they are enough, otherwise go through the queue."""
    if not _leaves_unfit(newest, ground, bad):
        bad = bad._replace(unfit=())
    exclude = _left_out(newest, bad)
    if ground.is_ending:
        return _in_the_queue(ground, newest.reason, exclude)
    if not any(bad):
        return Decision(next=Next.RELAUNCH, why=newest.reason, exclude=exclude)
    why = _why_excluded(newest, bad)
    rule = VerdictRule.FAULTY_NODE if bad.faulty and not bad.lost else None
    if _are_enough(ground, exclude):
        return Decision(next=Next.RELAUNCH, why=why, exclude=exclude, rule=rule)
    return _in_the_queue(ground, why, exclude)._replace(rule=rule)


def _why_excluded(newest: Outcome, bad: _Bad) -> str:
    """Return why the next attempt leaves out nodes: lost ones count first, then faulty ones."""
    if bad.lost:
        return _are(bad.lost, "lost")
    if bad.faulty:
        return _are(bad.faulty, f"at fault ({newest.verdict.cause if newest.verdict else ''})")
    left_out = f"{_are(bad.unfit, 'left out')}: failed in preflight"
    return left_out if newest.cause is Cause.PREFLIGHT else f"{newest.reason}; {left_out}"


def _are(nodes: Sequence[str], what: str) -> str:
    return f"{', '.join(nodes)} {'is' if len(nodes) == 1 else 'are'} {what}"


def load_judge() -> None:
    """Import the judge in this process, so that a fork of it judges at once."""
    importlib.import_module(JUDGE).prepare()


def judge(paths: RunPaths, outcome: Outcome) -> ShortVerdict | None:
    """Diagnose a failed attempt, in a process that can be ended; None without a cause in time."""
    if not outcome.cause.is_failure or outcome.cause in _OF_NODES:
        return None
    try:
        data = parse_object(_verdict_json(paths, outcome) or "")
        return decoded(ShortVerdict, data) if data else None
    except (ClusterrunError, OSError, ValueError):
        return None


def _verdict_json(paths: RunPaths, outcome: Outcome) -> str | None:
    """Run the judge in a fork if that is safe, or in a new interpreter; return its JSON."""
    judge_module = sys.modules.get(JUDGE)
    threads = {thread.name for thread in threading.enumerate()} - {threading.main_thread().name}
    if judge_module is not None and threads <= _QUIET:
        return fork_answer(partial(judge_module.judged, paths.root, outcome), LIMIT_S)
    argv = (sys.executable, "-m", JUDGE, str(paths.root))
    # Not in the working directory: the user's modules may shadow ours.
    done = shell.run(argv, input=outcome.to_json(), timeout_s=LIMIT_S, cwd=paths.root, tries=1)
    return done.stdout if done.rc == 0 else None


def _stop_if_repeated(history: Sequence[Outcome], exclude: tuple[str, ...]) -> Decision | None:
    """Return the decision to stop if the newest failure is certain to happen again, else None."""
    newest = history[-1]
    verdict = newest.verdict
    if verdict is None or newest.cause not in _EXPLAINED or not _is_certain(verdict):
        return None
    if _would_repeat(history, verdict):
        why = f"{verdict.cause}, before the first step: a new attempt would fail the same way"
        return _stop(why, exclude, VerdictRule.WOULD_REPEAT)
    if _is_repeated(history, verdict):
        why = f"{verdict.cause} twice in a row on the same rank or node, without a step in between"
        return _stop(why, exclude, VerdictRule.SAME_CAUSE)
    return None


def _faulty_nodes(newest: Outcome) -> tuple[str, ...]:
    """Return the nodes that an established verdict blames; none if they are too many."""
    verdict = newest.verdict
    if verdict is None or verdict.status is not Certainty.ESTABLISHED or not verdict.blames_node:
        return ()
    return _few(tuple(node for node in newest.nodes if node in verdict.nodes), newest)


def _few(nodes: tuple[str, ...], newest: Outcome) -> tuple[str, ...]:
    """Return these nodes, or none if they are too many to be the cause."""
    return nodes if len(nodes) <= max(1, _MOST_FAULTY * len(newest.nodes)) else ()


def _is_certain(verdict: ShortVerdict) -> bool:
    """Return whether a verdict names what failed: a collective that timed out does not."""
    is_exception = verdict.generic and verdict.status is not Certainty.UNCONFIRMED
    return is_exception or verdict.status is Certainty.ESTABLISHED


def _would_repeat(history: Sequence[Outcome], verdict: ShortVerdict) -> bool:
    """Return whether the configuration is to blame: none of its attempts has trained."""
    *before, newest = history
    is_at_start = newest.step is None and not verdict.steps  # in the logs
    lasted_s = newest.ended_at - newest.started_at
    has_trained = any(  # a script that reports no step got further if it ran longer
        each.step is not None or each.ended_at - each.started_at > lasted_s for each in before
    )
    return is_at_start and not has_trained and verdict.retry is Retry.NO


def _is_repeated(history: Sequence[Outcome], verdict: ShortVerdict) -> bool:
    """Return whether one cause ended two attempts in a row on one rank or node, at one step."""
    before = history[-2].verdict if len(history) > 1 else None
    if before is None or before.cause != verdict.cause or not _is_certain(before):
        return False
    steps = [-1 if outcome.step is None else outcome.step for outcome in history[-2:]]
    is_further = steps[1] > steps[0] or _saved(history[-1]) > _saved(history[-2])
    if verdict.retry in (Retry.YES, Retry.EXCLUDE) or is_further:
        return False
    places = set(verdict.ranks) & set(before.ranks) or set(verdict.nodes) & set(before.nodes)
    # A generic cause only says that the script failed: its text must also be the same.
    return bool(places) and (not verdict.generic or verdict.text == before.text)
