"""The end of a job, as status, submit, logs -f and diagnose print it, and the wait for it."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from clusterrun.cli.shared import job_view, output
from clusterrun.cli.shared.output import Command, Row, labelled
from clusterrun.diagnosis.kinds import Retry
from clusterrun.errors import Exit
from clusterrun.rundir.end import Cause
from clusterrun.rundir.outcome import HINT, Next, Outcome, ShortVerdict, hints_of
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.amounts import clock
from clusterrun.shared.state import JobState
from clusterrun.shared.wording import count
from clusterrun.verbs.find import find_record

if TYPE_CHECKING:  # slow to import
    from clusterrun.backends.status import JobStatus

_MOST_LINES: Final = 6  # of an error: the block fits a terminal of 24 rows
RETRIES: Final = {
    Retry.NO: "the same configuration will fail again",
    Retry.YES: "a new attempt will probably succeed",
    Retry.EXCLUDE: "a new attempt on other nodes will probably succeed",
    Retry.MAYBE: "a new attempt may succeed",
}


def say_end(title: str, job: JobStatus) -> None:
    """Print on stderr how a job ended."""
    spent = f" after {clock(job.elapsed_s)}" if job.elapsed_s is not None else ""
    output.say(f"{title} {output.painted_state(job.state.value)}{spent}")
    doubts = (each.text for each in job.suspicions)
    for label, text in (*labelled("suspect", doubts), *closing_rows(job)):
        wraps = not isinstance(text, Command)
        output.say(f"  {label:<10} {text}", indent=13, wraps=wraps)


def closing_rows(job: JobStatus) -> Iterator[Row]:
    """Yield labels and texts about the end of a job; nothing if it completed or has not ended."""
    if job.state.is_terminal and not job.state.is_success:
        verdict = job.failure.verdict if job.failure else None
        # Two pieces of advice are enough here: `diagnose` shows all of them.
        yield from failure_rows(job, job.failure, verdict, job.attempt, most=2)


def failure_rows(
    job: JobStatus | None,  # None: only logs are known
    failure: Outcome | None,  # as the agents reported it
    verdict: ShortVerdict | None,  # its cause, from the logs
    attempt: int = 0,  # the one that failed; 0: none, or unknown
    *,
    most: int | None = None,  # pieces of advice; None: all
    followed: Iterable[str] = (),  # the failures that it caused
) -> Iterator[Row]:
    """Yield the error, its victims, its cause, `most` pieces of advice, and the loss."""
    project = os.path.join(job.record.workdir, "") if job else ""
    yield from labelled("failed", _error_lines(failure, verdict, project))
    if verdict and verdict.victims:
        yield "", f"{count(verdict.victims, 'other rank')} failed because of it"
    if verdict and not verdict.generic:  # a generic one only says that the script failed
        yield "cause", job_view.verdict_line(verdict)
    yield from labelled("then", followed)
    name = shlex.quote(job.record.job_id or job.record.run_dir) if job else ""
    if verdict:
        yield from labelled("next", _next_steps(job, failure, verdict, attempt, most))
    elif job and job.has_checkpoint:
        yield "next", f"clusterrun resume {name}"
    if job:
        yield from _loss_rows(job, attempt)
        more = [f"clusterrun diagnose {name}"] if most else []  # advice may be left out
        if failure or job.state is not JobState.CANCELLED:
            yield from labelled("more", [*more, f"clusterrun logs {name} --errors"])
        yield "run dir", job.record.run_dir


def _next_steps(
    job: JobStatus | None,
    failure: Outcome | None,
    verdict: ShortVerdict,
    attempt: int,
    most: int | None,
) -> Iterator[str]:
    """Yield advice, each command on a line to copy, and whether a new attempt may succeed."""
    from clusterrun.verbs.remedies import retry_of, run_of, to_do  # slow to import

    run = run_of(job, verdict, attempt) if job else None
    for advice in to_do(verdict, run, failure)[:most]:
        yield f"{advice.text}:" if advice.run else advice.text
        if advice.run:
            yield Command(f"  {advice.run}")
    retry = retry_of(verdict, run)
    is_script_error = verdict.generic and retry is Retry.MAYBE
    if not is_script_error:  # such an error has to be corrected first
        yield RETRIES[retry]


def _loss_rows(job: JobStatus, attempt: int) -> Iterator[Row]:
    """Yield what an attempt that did not complete has lost, and why no other attempt followed."""
    summary = next((each for each in job.attempts if each.number == attempt), None)
    end = summary.outcome if summary else None
    if summary is None or end is None or end.cause is Cause.COMPLETED:
        return
    if summary.lost_steps:
        saved = "" if end.checkpoint is None else f": the newest checkpoint is {end.checkpoint}"
        yield "lost", f"{job_view.lost_steps(summary)}{saved}"
    elif end.checkpoint is None and end.is_handled:
        yield "ended", "in the script's own signal handler"
    elif end.checkpoint is None and end.step:
        yield "lost", f"all {count(end.step, 'step')}, unless the script saved its own checkpoints"
    if end.next is Next.STOP and end.why not in ("", end.reason):  # more than how it ended
        yield "no restart", end.why + (f" [{end.rule.value}]" if end.rule else "")


def _error_lines(
    failure: Outcome | None, verdict: ShortVerdict | None, project: str
) -> Iterator[str]:
    """Yield the error that began the failure, with its rank; then file (in `project`) and line."""
    line_of_code = verdict.frame if verdict else ""
    if failure and (verdict is None or _is_agents_error(failure, verdict)):
        hints = hints_of(failure, verdict)  # they are printed as advice, in the rows `next`
        lines = [x for x in job_view.failure_lines(failure) if x.removeprefix(HINT) not in hints]
        yield from map(job_view.cut, lines[:_MOST_LINES])
        line_of_code = f"at {failure.where}" if failure.where else line_of_code
    elif verdict:
        yield ": ".join(filter(None, (verdict.place, job_view.cut(verdict.text))))
    # The row `cause` names the ranks, but a generic verdict has no such row.
    ranks = len(verdict.ranks) if verdict and verdict.generic else 0
    alike = max(ranks, failure.alike if failure else 0)
    others = f"as on {count(alike - 1, 'other rank')}" if alike > 1 else ""
    if where := ", ".join(filter(None, (line_of_code.replace(project, "", 1), others))):
        yield where


def _is_agents_error(failure: Outcome, verdict: ShortVerdict) -> bool:
    """Return whether the error that the agents report began the failure, not one in the logs."""
    if not verdict.text or verdict.is_reported:  # no first sign, or one from the agents
        return True
    # The logs say more if this rank only exited, or if another rank's error began the failure.
    return failure.cause is not Cause.EXIT and failure.rank in (verdict.ranks or (failure.rank,))


def await_end(record: JobRecord, data: dict[str, Any] | None, *, follow: bool) -> int:
    """Follow or wait for a job, and return its own exit status; 1 if it has none and failed.

    `data` describes the submission for JSON (None: no JSON). It is printed with the job's end
    added, and after Ctrl-C without it.
    """
    _pass_warnings_on(record)
    how_to_end = f"  to end it, run: clusterrun cancel --checkpoint {record.job_id}"
    if follow and _follow(record) == Exit.INTERRUPTED:
        output.say(how_to_end)
        return Exit.INTERRUPTED
    from clusterrun.verbs.status import wait

    end: dict[str, Any] = {}
    try:
        ended = wait(record, stuck=job_view.warn_stuck, rest=job_view.WaitLine().pause)
        end = job_view.end_object(ended)
    except KeyboardInterrupt:
        output.say_interrupted(f"job {record.job_id} keeps running")
        output.say(how_to_end)
        raise
    finally:
        if data is not None:
            output.answer_json({**data, **end})
    if not follow:  # `logs` has printed the end
        say_end(f"job {record.job_id}", ended)
    if ended.exit_signal and not ended.exit_code:
        return 128 + ended.exit_signal
    return ended.exit_code or (Exit.OK if ended.state.is_success else Exit.FAILED)


def _pass_warnings_on(record: JobRecord) -> None:
    """In an allocation, make the ranks save a checkpoint when its scheduler warns this process."""
    is_allocation = not record.cluster.scheduler.outlives_shell
    if not is_allocation:  # the job does not depend on this process
        return
    from clusterrun.backends.hosts.backend import HostsBackend  # slow to import

    backend = HostsBackend(runs_dir=record.paths.runs_dir)
    for warning in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(warning, lambda *_: backend.signal(record.job_id, signal.SIGUSR2))


def _follow(record: JobRecord) -> int:
    """Run `logs --follow`, for a resumed run without old lines; return its exit status."""
    from clusterrun.cli import logs

    newest = record.paths.newest_attempt()
    is_resumed = bool(newest) and record.paths.earlier_end(newest).exists()  # kept by `resume`
    args = ["--follow", *(["-n", "0"] if is_resumed else []), record.run_dir]
    with logs.command.make_context("logs", args, parent=click.get_current_context()) as inner:
        status: int = logs.command.invoke(inner)
    return status


@click.command()
@click.option("--follow", is_flag=True)
@click.option("--json", "submission", help="the object to complete")
def command(*, follow: bool, submission: str | None) -> int:
    """Follow or wait for a run that another machine has forwarded, and exit with its status."""
    output.session.json = submission is not None
    return await_end(find_record(), json.loads(submission or "null"), follow=follow)
