"""The end of a job: wait for it, and print a failure and what to do.

`status`, `submit`, `logs -f` and `diagnose` end with this block.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import Any, Final, TypeAlias

import click

from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared import job_view, output
from clusterrun.cli.shared.output import Command
from clusterrun.diagnosis.kinds import Retry
from clusterrun.errors import Exit
from clusterrun.rundir.outcome import HINT, Cause, Next, Outcome, ShortVerdict, hints_of
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.durations import clock
from clusterrun.shared.state import JobState
from clusterrun.shared.wording import count
from clusterrun.verbs.find import find_record
from clusterrun.verbs.status import wait

Row: TypeAlias = tuple[str, str]

_LINES: Final = 6  # of an error: the block fits a terminal of 24 rows
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
        yield from block(job, job.failure, verdict, job.attempt, most=2)  # `diagnose` shows all


def block(
    job: JobStatus | None,
    failure: Outcome | None,
    verdict: ShortVerdict | None,
    attempt: int = 0,
    *,
    most: int | None = None,
    followed: Iterable[str] = (),
) -> Iterator[Row]:
    """Yield the error, its victims, its cause and what followed, advice, and the loss.

    `most` bounds the pieces of advice.
    """
    project = os.path.join(job.record.workdir, "") if job else ""
    yield from labelled("failed", _error_lines(failure, verdict, project))
    if verdict and verdict.victims:
        yield "", f"{count(verdict.victims, 'other rank')} failed because of it"
    if verdict and not verdict.generic:
        yield "cause", job_view.verdict_line(verdict)
    yield from labelled("then", followed)
    name = shlex.quote(job.record.job_id or job.record.run_dir) if job else ""
    if verdict:
        from clusterrun.verbs.remedies import retry_of, run_of, to_do  # slow to import

        run = run_of(job, verdict, attempt) if job else None
        advice = list[str]()
        for each in to_do(verdict, run, failure)[:most]:  # a command can be copied whole
            advice += [f"{each.text}:", Command(f"  {each.run}")] if each.run else [each.text]
        retry = retry_of(verdict, run)
        is_for_script = verdict.generic and retry is Retry.MAYBE  # its error has to be corrected
        hope = () if is_for_script else (RETRIES[retry],)
        yield from labelled("next", (*advice, *hope))
    elif job and job.has_checkpoint:
        yield "next", f"clusterrun resume {name}"
    if job:
        yield from _lost(job, attempt)
        more = (*[f"clusterrun diagnose {name}"] * bool(most), f"clusterrun logs {name} --errors")
        yield from labelled("more", more if failure or job.state is not JobState.CANCELLED else ())
        yield "run dir", job.record.run_dir


def _lost(job: JobStatus, attempt: int) -> Iterator[Row]:
    """Yield what an attempt that did not complete has lost, and why none followed."""
    found = next((each for each in job.attempts if each.number == attempt), None)
    last = found.outcome if found else None
    if found is None or last is None or last.cause is Cause.COMPLETED:
        return
    if found.lost_steps:
        saved = "" if last.checkpoint is None else f": the newest checkpoint is {last.checkpoint}"
        yield "lost", f"{job_view.lost_steps(found)}{saved}"
    elif last.checkpoint is None and last.is_handled:
        yield "ended", "in the script's own signal handler"
    elif last.checkpoint is None and last.step:
        yield "lost", f"all {count(last.step, 'step')}, unless the script saved its own checkpoints"
    if last.next is Next.STOP and last.why not in ("", last.reason):
        yield "no restart", last.why + (f" [{last.rule.value}]" if last.rule else "")


def labelled(label: str, texts: Iterable[str]) -> Iterator[Row]:
    """Yield texts, the first with the label."""
    return zip(chain((label,), repeat("")), texts, strict=False)


def _error_lines(
    failure: Outcome | None, verdict: ShortVerdict | None, project: str
) -> Iterator[str]:
    """Yield the error that began the failure: with rank and node, file and line."""
    place = verdict.frame if verdict else ""
    is_of_it = failure and verdict and failure.rank in (verdict.ranks or (failure.rank,))
    is_told = bool(verdict and (not verdict.text or verdict.is_reported))
    # The log may have the error of a rank that only exited, or of another rank.
    is_told |= bool(failure and failure.cause is not Cause.EXIT and is_of_it)
    if verdict and not (failure and is_told):
        text = job_view.cut(verdict.text)
        yield ": ".join(filter(None, (verdict.place, text)))
    elif failure:
        told = hints_of(failure, verdict)  # `next` has them
        lines = [x for x in job_view.failure_lines(failure) if x.removeprefix(HINT) not in told]
        yield from map(job_view.cut, lines[:_LINES])
        place = f"at {failure.where}" if failure.where else place
    ranks = len(verdict.ranks) if verdict and verdict.generic else 0
    alike = max(ranks, failure.alike if failure else 0)
    others = f"as on {count(alike - 1, 'other rank')}" if alike > 1 else ""
    yield from filter(None, (", ".join(filter(None, (place.replace(project, "", 1), others))),))


# Wait for the end of a submitted job: `submit`, `resume`, `resubmit`


def await_end(record: JobRecord, data: dict[str, Any] | None, *, follow: bool) -> int:
    """Follow or wait for a job, and return its own exit status; 1 if it has none and failed.

    `data` is of its submission: for JSON, one object is printed at the end, also after Ctrl-C.
    """
    _pass_warnings_on(record)
    how_to_end = f"  to end it, run: clusterrun cancel --checkpoint {record.job_id}"
    if follow and _follow(record) == Exit.INTERRUPTED:
        output.say(how_to_end)
        return Exit.INTERRUPTED
    end: dict[str, Any] = {}
    try:
        rest = job_view.WaitLine().rest
        ended = wait(record, stuck=job_view.warn_stuck, rest=rest)
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
    """In an allocation, have the ranks save when its scheduler warns this process."""
    if record.cluster.scheduler.outlives_shell:
        return
    from clusterrun.backends.hosts.backend import HostsBackend  # slow to import

    backend = HostsBackend(runs_dir=record.paths.runs_dir)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, lambda *_: backend.signal(record.job_id, signal.SIGUSR2))


def _follow(record: JobRecord) -> int:
    """Print the logs as `logs --follow` does, of a resumed run those of the next attempt.

    Ctrl-C does not end the job.
    """
    from clusterrun.cli import logs

    newest = record.paths.newest_attempt()
    is_over = bool(newest) and record.paths.earlier_end(newest).exists()
    args = ["--follow", *["-n", "0"] * is_over, record.run_dir]
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
