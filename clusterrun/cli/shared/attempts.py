"""The attempts of a run, a line each: how it ended, what it did, what was lost, what came next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from clusterrun.backends.attempts import AttemptSummary
from clusterrun.cli.shared.times import clock
from clusterrun.rundir.outcome import Cause, Next, Outcome
from clusterrun.shared.hostlist import fold_hosts
from clusterrun.shared.wording import count


def attempt_lines(
    attempts: Sequence[AttemptSummary], *, is_over: bool
) -> Iterator[tuple[str, str]]:
    """Yield label and text of each attempt; nothing of a run that needed but one.

    `is_over`: nothing follows the last; else Slurm may start a job again that it has ended.
    """
    outcomes = [attempt.outcome for attempt in attempts if attempt.outcome]
    if len(attempts) < 2 and all(outcome.cause is Cause.COMPLETED for outcome in outcomes):
        return
    for attempt in attempts:
        is_last = attempt is attempts[-1]
        label = "" if attempt.number > 1 else "attempts"
        yield label, f"{attempt.number}  {_text(attempt, is_last=is_last, is_over=is_over)}"


def _text(attempt: AttemptSummary, *, is_last: bool, is_over: bool) -> str:
    nodes = fold_hosts(attempt.nodes)
    outcome = attempt.outcome
    if outcome is None:
        if is_last and not is_over:
            return nodes or "no word of it yet"
        return "  ".join(filter(None, (nodes, "no word of its end")))
    head = "  ".join(filter(None, (*_times(outcome), nodes)))
    return f"{head}  {'; '.join(_facts(attempt, outcome, is_end=is_last and is_over))}"


def _times(outcome: Outcome) -> tuple[str, ...]:
    if not outcome.started_at:  # nobody was left to say
        return ()
    start = datetime.fromtimestamp(outcome.started_at)
    return f"{start:%m-%d %H:%M:%S}", clock(outcome.ended_at - outcome.started_at)


def _facts(attempt: AttemptSummary, outcome: Outcome, *, is_end: bool) -> Iterator[str]:
    how = " ".join((outcome.reason or outcome.cause.value).split())
    yield how if outcome.step is None else f"{how} at step {outcome.step}"
    if outcome.checkpoint is not None:
        yield f"checkpoint {outcome.checkpoint}"
    if attempt.lost_steps:
        about = f" (about {clock(attempt.lost_s)})" if attempt.lost_s is not None else ""
        yield f"lost {count(attempt.lost_steps, 'step')}{about}"
    went_on = outcome.next is Next.STOP and not is_end  # Slurm or a person had it go on
    if outcome.cause is not Cause.COMPLETED and not went_on:
        has_news = outcome.why not in ("", outcome.reason)
        yield f"{outcome.next.value}: {outcome.why}" if has_news else outcome.next.value
