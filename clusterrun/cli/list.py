"""`list`: print the runs of a project and their states."""

from __future__ import annotations

import click

from clusterrun.backends.evidence import ProgressSource
from clusterrun.backends.status import JobStatus, with_last_step
from clusterrun.cli.shared import output
from clusterrun.cli.shared.job_json import job_object
from clusterrun.cli.shared.job_text import (
    brief,
    failure_lines,
    local_time,
    verdict_line,
    where_or_why,
)
from clusterrun.cli.shared.progress_text import eta_s, rate, steps_done
from clusterrun.errors import ClusterrunError, Exit, NotAdoptedError, describe
from clusterrun.shared.durations import clock
from clusterrun.shared.state import JobState
from clusterrun.shared.wording import count
from clusterrun.verbs.find import is_elsewhere
from clusterrun.verbs.status import list_jobs

SPARE = ("START", "GPUS", "ELAPSED / LIMIT", "NODES", "PROJECT", "STEP", "NAME")
HEAD = ("JOB", "NAME", "STATE", "NODES", "GPUS", "START", "ELAPSED / LIMIT", "STEP", "WHY / WHERE")
ENDED_SHOWN = 5
READ_MARK = "*"
NEWEST_LOOKED_AT = 200  # without --all; active jobs are among the newest


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="list all runs")
@click.option(
    "-n", "--newest", type=click.IntRange(min=1), metavar="N", help="list only the N newest"
)
@click.option(
    "-s",
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.value for state in JobState], case_sensitive=False),
    metavar="STATE",
    help="list runs in this state, e.g. FAILED (repeatable)",
)
@output.json_option
@click.option("--ids-only", is_flag=True, help="print only job ids, one per line")
def command(
    *,
    everything: bool,
    newest: int | None,
    states: tuple[str, ...],
    as_json: bool,
    ids_only: bool,
) -> int:
    """List jobs and their states.

    List the active runs of this project, and the five newest that have ended. Outside a project,
    list those of all projects.

    \b
    clusterrun list --all --state FAILED
    clusterrun cancel -y $(clusterrun list --state PENDING --ids-only)
    """
    limit = newest or (None if everything or states else NEWEST_LOOKED_AT)
    found = list_jobs(limit=limit)
    shown = [job for job in found if not states or job.state.value in states]
    if not (everything or newest or states):
        dropped = {id(job) for job in [j for j in shown if j.state.is_terminal][ENDED_SHOWN:]}
        shown = [with_last_step(job) for job in shown if id(job) not in dropped]
    if as_json:
        jobs = [job_object(job) for job in shown]
        output.answer_json({"schema": "clusterrun.list/1", "jobs": jobs})
    elif ids_only:
        for job in shown:
            if job.record.job_id:
                output.answer(job.record.job_id)
    else:
        left_out = 0 if states else len(found) - len(shown)
        _print_table(shown, is_empty=not found, left_out=left_out)
    return _report_silence([job.error for job in found if job.error])


def _print_table(shown: list[JobStatus], *, is_empty: bool, left_out: int) -> None:
    if not shown:
        output.say("no runs yet" if is_empty else "no runs to show")
        return
    head: tuple[str, ...] = HEAD
    rows = [_row(job) for job in shown]
    if any(is_elsewhere(job.record) for job in shown):
        head = ("PROJECT", *HEAD)
        rows = [(job.record.workdir, *row) for job, row in zip(shown, rows, strict=True)]
    output.answer_table(head, rows, spare=SPARE)
    if any(job.progress.source is ProgressSource.OUTPUT for job in shown):
        output.note(f"{READ_MARK} was read from the output")
    if left_out:
        output.note(f"--all lists {count(left_out, 'more run')} that ended earlier")


def _row(job: JobStatus) -> tuple[str, ...]:
    record = job.record
    spent = "-" if job.elapsed_s is None else clock(job.elapsed_s)
    limit = "-" if job.limit_s is None else clock(job.limit_s)
    gpus = record.nodes * record.gpus_per_node
    return (
        record.job_id or "-",
        record.name,
        job.state.value,
        str(record.nodes),
        str(gpus) if gpus else "-",
        "-" if job.start is None else local_time(job.start),
        f"{spent} / {limit}",
        _step(job),
        _why_or_where(job),
    )


def _why_or_where(job: JobStatus) -> str:
    if job.damaged:
        return f"damaged: {job.damaged[0]}"
    if job.suspicions:
        return brief(f"suspect: {job.suspicions[0].text}")
    if job.error and job.record.home:
        return brief(describe(job.error))
    if job.failure is None or job.pending:
        return where_or_why(job)
    verdict = job.failure.verdict
    if verdict and not verdict.generic:  # the error itself is more specific
        return brief(verdict_line(verdict))
    return brief("\n".join(failure_lines(job.failure)))


def _step(job: JobStatus) -> str:
    """Write `450/1000 14.9 it/s, 00:00:37 left`; a mark shows that it comes from the output."""
    left_s = eta_s(job)
    left = "" if left_s is None else f"{clock(left_s)} left"
    speed = rate(job.progress) if job.state is JobState.RUNNING else ""
    mark = READ_MARK if job.progress.source is ProgressSource.OUTPUT else ""
    facts = ", ".join(filter(None, (speed, left)))
    return " ".join(filter(None, (steps_done(job.progress) + mark, facts))) or "-"


def _report_silence(found: list[ClusterrunError]) -> int:
    """Report once that a scheduler or host did not answer; return the exit status of the first."""
    if strange := [error for error in found if isinstance(error, NotAdoptedError)]:
        output.note(f"{describe(strange[0])}; {strange[0].hint}")
    errors = {str(error): error for error in found if error not in strange}
    for error in errors.values():
        output.print_error(error, is_answer=False)
    return next((error.exit_code for error in errors.values()), Exit.OK)
