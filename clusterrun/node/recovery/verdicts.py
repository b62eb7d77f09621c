"""Get the verdict on a failed attempt, and decide by it."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Final

from clusterrun.diagnosis.kinds import Certainty, Retry
from clusterrun.errors import ClusterrunError
from clusterrun.launch.plan import Plan
from clusterrun.node.base.processes import fork_answer
from clusterrun.rundir.outcome import Cause, Outcome, ShortVerdict, VerdictRule
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import shell
from clusterrun.shared.files import parse_object
from clusterrun.shared.typed import decoded

JUDGE: Final = "clusterrun.verbs.diagnose"  # an upper room, which this one only starts
_QUIET = {"agents", "shared disk"}  # threads that hold no lock while an attempt is concluded
LIMIT_S: Final = 5.0  # a verdict that takes longer delays no restart
_MOST_FAULTY: Final = 1 / 4  # of the nodes: more point to something that they share
# Ends that the logs explain. Lost nodes and nodes that do not meet have rules of their own.
_EXPLAINED: Final = (Cause.EXCEPTION, Cause.EXIT, Cause.SIGNAL, Cause.LAUNCHER, Cause.HUNG)
_KNOWN: Final = (Cause.NODE_LOST, Cause.VANISHED, Cause.PREFLIGHT)  # the logs cannot say more


def load_judge() -> None:
    """Import the judge in this process, so that a fork of it judges at once."""
    importlib.import_module(JUDGE).prepare()


def judge(paths: RunPaths, outcome: Outcome) -> ShortVerdict | None:
    """Diagnose a failed attempt, in a process that can be ended; None without a cause in time."""
    if not outcome.cause.is_failure or outcome.cause in _KNOWN:
        return None
    try:
        data = parse_object(_judged(paths, outcome) or "")
        return decoded(ShortVerdict, data) if data else None
    except (ClusterrunError, OSError, ValueError):
        return None


def _judged(paths: RunPaths, outcome: Outcome) -> str | None:
    loaded = sys.modules.get(JUDGE)
    others = {thread.name for thread in threading.enumerate()} - {threading.main_thread().name}
    if loaded is not None and others <= _QUIET:
        return fork_answer(partial(loaded.judged, paths.root, outcome), LIMIT_S)
    argv = (sys.executable, "-m", JUDGE, str(paths.root))
    # Not in the working directory: the user's modules may shadow ours.
    done = shell.run(argv, input=outcome.to_json(), timeout_s=LIMIT_S, cwd=paths.root, tries=1)
    return done.stdout if done.rc == 0 else None


def futile(history: Sequence[Outcome]) -> tuple[str, VerdictRule] | None:
    """Return why the newest failure would happen again, by which rule; None without a proof."""
    newest = history[-1]
    verdict = newest.verdict
    if verdict is None or newest.cause not in _EXPLAINED or not _is_certain(verdict):
        return None
    if _would_repeat(history, verdict):
        why = f"{verdict.cause}, before the first step: another try would fail the same way"
        return why, VerdictRule.WOULD_REPEAT
    if _is_repeated(history, verdict):
        why = f"{verdict.cause} at the same place for the second time, without a step in between"
        return why, VerdictRule.SAME_CAUSE
    return None


def faulty_nodes(newest: Outcome) -> tuple[str, ...]:
    """Return the nodes that the verdict blames, unless they are too many to be the cause."""
    verdict = newest.verdict
    if verdict is None or verdict.status is not Certainty.ESTABLISHED or not verdict.blames_node:
        return ()
    nodes = tuple(node for node in newest.nodes if node in verdict.nodes)
    return nodes if _are_few(nodes, newest) else ()


def unfit_nodes(newest: Outcome, plan: Plan) -> tuple[str, ...]:
    """Return the nodes that failed preflight, unless they are too many, or all this machine."""
    is_alone = plan.cluster.scheduler.can_lose_node and _are_few(newest.unfit, newest)
    return newest.unfit if is_alone else ()


def _are_few(nodes: Sequence[str], newest: Outcome) -> bool:
    return len(nodes) <= max(1, _MOST_FAULTY * len(newest.nodes))


def _is_certain(verdict: ShortVerdict) -> bool:
    """Return whether a verdict names what failed: a collective that timed out does not."""
    is_exception = verdict.generic and verdict.status is not Certainty.UNCONFIRMED
    return is_exception or verdict.status is Certainty.ESTABLISHED


def _would_repeat(history: Sequence[Outcome], verdict: ShortVerdict) -> bool:
    """Return whether the configuration is to blame: none of its attempts has trained."""
    *before, newest = history
    is_at_start = newest.step is None and not verdict.steps
    lasted_s = newest.ended_at - newest.started_at
    has_trained = any(  # a silent script that lasted longer got further
        each.step is not None or each.ended_at - each.started_at > lasted_s for each in before
    )
    return is_at_start and not has_trained and verdict.retry is Retry.NO


def _is_repeated(history: Sequence[Outcome], verdict: ShortVerdict) -> bool:
    """Return whether one cause ended two attempts in a row on one rank or node, at one step."""
    before = history[-2].verdict if len(history) > 1 else None
    if before is None or before.cause != verdict.cause or not _is_certain(before):
        return False
    reached = [
        [-1 if number is None else number for number in (end.step, end.checkpoint)]
        for end in history[-2:]
    ]
    is_further = any(new > old for old, new in zip(*reached, strict=True))
    if verdict.retry in (Retry.YES, Retry.EXCLUDE) or is_further:
        return False
    places = set(verdict.ranks) & set(before.ranks) or set(verdict.nodes) & set(before.nodes)
    return bool(places) and (not verdict.generic or verdict.text == before.text)
