"""`status`: print the state of jobs; `top`: show one while it runs; `list`: list all."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import datetime

import click

from clusterrun.backends.evidence import AttemptSummary, ProgressSource
from clusterrun.backends.status import JobStatus, with_last_step
from clusterrun.cli.shared import complete, job_view, output
from clusterrun.cli.shared.closing import closing_rows
from clusterrun.errors import ClusterrunError, Exit, NotAdoptedError, describe
from clusterrun.launch.passed_on import REQUEUE_DELAY
from clusterrun.rundir.end import Cause
from clusterrun.rundir.outcome import Next, Outcome
from clusterrun.rundir.record import JobRecord, other_owner, remember_home
from clusterrun.shared.amounts import clock
from clusterrun.shared.hostlist import fold_hosts
from clusterrun.shared.state import JobState
from clusterrun.shared.wording import count
from clusterrun.verbs import find
from clusterrun.verbs.status import list_jobs, status, statuses_explained, wait

_SILENT_S = 300  # without output, a running job may hang
_ENGINES = {"ddp": "DDP", "fsdp": "FSDP", "deepspeed": "DeepSpeed"}


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=complete.jobs)
@click.option("--wait", "waiting", is_flag=True, help="wait until the job ends")
@click.option(
    "-f",
    "--follow",
    is_flag=True,
    help="on a terminal, show the job as 'clusterrun top' does until it ends",
)
@click.option(
    "--exit-status", is_flag=True, help="exit with 3 if the job did not complete or is suspect"
)
@click.option("--adopt", is_flag=True, help="trust job.json and run commands on the host it names")
@output.json_option
def command(
    jobs: tuple[str, ...],
    *,
    adopt: bool,
    as_json: bool,
    exit_status: bool,
    follow: bool,
    waiting: bool,
) -> int:
    """Show the state of jobs.

    If a job waits, also show why, and changes that may start it sooner.

    JOB is a job id, the name of a run or its directory  [default: the newest run]. The exit status
    is 0 even if the job failed. With --exit-status, it is 3 for a job that ended without
    completing, or whose own reports show that it trained nothing. For several jobs, the exit status
    is the largest one, and the output of --json is that of list --json.

    \b
    clusterrun status
    clusterrun status -f 4711
    clusterrun status 4711 --wait --exit-status && echo trained
    clusterrun status 4711 4712
    """
    wanted = jobs or (None,)  # None: the newest run
    for name in wanted if adopt else ():
        _adopt(find.locate(name))
    records = job_view.find_all_announced(wanted)
    shown: list[JobStatus] = []
    awaited = (_await_status(record, follow=follow, waiting=waiting) for record in records)
    for job in awaited if follow or waiting else statuses_explained(records):
        if not as_json:
            blank = [("", "")] if shown else []
            output.answer_rows([*blank, *_rows(job)])
        _say_notes(job)
        shown.append(job)
    if as_json:
        objects = [job_view.job_object(job) for job in shown]
        one = {"schema": "clusterrun.status/1", **objects[0]}
        several = {"schema": "clusterrun.list/1", "jobs": objects}
        output.answer_json(several if objects[1:] else one)
    failed = any(job.state.is_terminal and not job.state.is_success for job in shown)
    if (waiting or follow) and failed and not exit_status:
        output.note("pass --exit-status to exit with 3 if the job did not complete")
    is_no = exit_status and (failed or any(job.suspicions for job in shown))
    # The answer above comes from the files, and is already on stdout.
    return max(_report_no_answer([job.error for job in shown]), Exit.NO if is_no else Exit.OK)


def _await_status(record: JobRecord, *, follow: bool, waiting: bool) -> JobStatus:
    """Show a job until it ends (`follow`, on a terminal) or wait (`waiting`); return its status."""
    if follow:
        from clusterrun.cli.shared.screen import watch  # imports rich and the estimate

        if seen := watch(record):
            return seen
    if not waiting:
        return statuses_explained([record])[0]
    return wait(record, stuck=job_view.warn_stuck, rest=job_view.WaitLine().pause)


def _say_notes(job: JobStatus) -> None:
    what = "you cannot read" if other_owner(job.record.paths.root) else "damaged:"
    for text in (*job.notes, *(f"{what} {name}" for name in job.damaged)):
        output.note(text)
    if job.pending and job.pending.is_held:  # for two minutes after a requeue
        record = job.record
        cluster = f"-M {shlex.quote(record.slurm_cluster)} " if record.slurm_cluster else ""
        command = f"scontrol {cluster}update JobId={record.job_id} StartTime=now+2"
        output.note(f"to have Slurm start the job now, run: {command}")
        output.note(f"a site can shorten the two minutes: {REQUEUE_DELAY}")


@click.command()
@click.argument("job", required=False, shell_complete=complete.jobs)
def top_command(job: str | None) -> int:
    """Show a job while it runs.

    JOB is a job id, the name of a run or its directory  [default: the newest run]. Problems come
    first, then progress, nodes, GPUs and the last lines. top ends when the job ends or when you
    press q, which does not end the job. Above 32 nodes, each node has a cell, and only the 20 worst
    have a row. Without a terminal, top prints the screen once.

    \b
    clusterrun top 4711
    clusterrun top 4711 > now.txt
    """
    record = job_view.find_announced(job)
    from clusterrun.cli.shared import screen  # imports rich, the estimate and the logs

    seen = screen.watch(record) or status(record)
    screen.print_screen(seen)
    return _report_no_answer([seen.error])


def _adopt(record: JobRecord) -> None:
    """Trust the host that job.json names for a run, from now on."""
    try:
        remember_home(record)
    except OSError as error:
        raise ClusterrunError("cannot remember the host of the run", cause=str(error)) from error
    if home := record.home:
        output.note(f"commands for this run are now executed on {home.host}, with {home.python}")


def _rows(job: JobStatus) -> Iterator[tuple[str, str]]:
    """Yield labels and texts about a job; after a failure, its end replaces its start and paths."""
    record, closing = job.record, [*closing_rows(job)]
    yield "job", f"{record.job_id or '-'}  {record.name}"
    if owner := other_owner(record.paths.root):
        yield "owner", f"{owner}, another user"
    yield "state", "  ".join(_state_parts(job))
    yield from output.labelled("suspect", (each.text for each in job.suspicions))
    if why := job_view.where_or_why(job):
        yield ("waits" if job.pending else "nodes"), why
    yield from output.labelled("", job_view.facts(job))
    yield from output.labelled("sooner", job_view.sooner(job))
    yield from output.labelled("preflight", map(str, job.preflight))
    yield "world", _world(job)
    if not closing:
        yield from job_view.startup_lines(job)
    if job.progress.step is not None:
        yield "step", _progress(job)
    metrics = job.progress.metrics.items()
    numbers = [(name, value) for name, value in metrics if isinstance(value, int | float)]
    if numbers:
        yield "metrics", ", ".join(f"{name} {_metric(value)}" for name, value in numbers)
    yield from job_view.usage_lines(job)
    yield from _output_rows(job)
    if newest := _checkpoint(job):
        yield "checkpoint", newest
    yield from _attempt_rows(job, has_end_below=bool(closing))
    if record.chained_job_ids and not job.state.is_terminal:
        yield "chain", f"continues as {', '.join(record.chained_job_ids)}"
    logs = f"clusterrun logs {shlex.quote(record.job_id or record.run_dir)}"
    yield from closing or (("run dir", record.run_dir), ("logs", logs))


def _metric(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _output_rows(job: JobStatus) -> Iterator[tuple[str, str]]:
    silent_s = job_view.output_age_s(job.progress)
    if silent_s is None:
        return
    yield "output", f"last written {clock(silent_s)} ago"
    if job.state is JobState.RUNNING and silent_s >= _SILENT_S:
        name = shlex.quote(job.record.job_id or job.record.run_dir)
        yield "", f"if the job hangs, see where: clusterrun diagnose {name} --stacks"


def _checkpoint(job: JobStatus) -> str:
    """Name the newest checkpoint; an earlier attempt's by its step."""
    if job.checkpoint:
        is_of_trainer = job.checkpoint.rpartition("/")[2].startswith("checkpoint-")
        return f"{'the Trainer saved ' if is_of_trainer else ''}{job.checkpoint}"
    return job_view.earlier_checkpoint(job)


def _state_parts(job: JobStatus) -> Iterator[str]:
    yield output.painted_state(job.state.value)
    # A job that was cancelled before it ran has status 0 to Slurm; that would read as success.
    has_code = job.exit_code or (job.exit_code == 0 and job.state.is_success)
    if job.state.is_terminal and (job.exit_signal or has_code):
        yield f"signal {job.exit_signal}" if job.exit_signal else f"exit {job.exit_code}"
    if job.elapsed_s is not None:
        limit = "" if job.limit_s is None else f" / {clock(job.limit_s)}"
        yield f"{clock(job.elapsed_s)}{limit}"
    if job.attempt > 1:
        yield f"attempt {job.attempt}"
    if job.reason:
        yield f"({job.reason})"


def _world(job: JobStatus) -> str:
    """Return the world that was requested, and whether the ranks have proved it."""
    record = job.record
    requested = f"{count(record.nodes, 'node')} x {count(record.procs_per_node, 'rank')}"
    if job.world_size is None:
        has_begun = job.attempt > 0 and job.state is not JobState.PENDING
        if record.world_size == 1 or not has_begun:
            return requested  # nothing to join, or no rank that could
        runs = job.state is JobState.RUNNING
        return f"{requested}, {'not joined yet' if runs else 'never joined a process group'}"
    if job.world_size != record.world_size:
        return f"{count(job.world_size, 'rank')}, but {requested} were requested"
    engine = f", {_ENGINES[job.engine]}" if job.engine in _ENGINES else ""
    return f"{count(job.world_size, 'rank')} in one world = {requested}{engine}"


def _progress(job: JobStatus) -> str:
    """Write the progress: `380/46880  1.2 steps/s, 10:45:00 to go`."""
    progress = job.progress
    done = "  ".join(filter(None, (job_view.steps_done(progress), job_view.rate(progress))))
    if job.state is not JobState.RUNNING:
        return done
    left_s = job_view.eta_s(job)
    left = job_view.silence(progress) or ("" if left_s is None else f"{clock(left_s)} to go")
    bar = f": {progress.bar}" if progress.bar else ""
    origin = f"  (from its output{bar})" if progress.source is ProgressSource.OUTPUT else ""
    return f"{', '.join(filter(None, (done, left)))}{origin}"


def _attempt_rows(job: JobStatus, *, has_end_below: bool) -> Iterator[tuple[str, str]]:
    """Yield a row for each attempt; none for a single one that needs no explanation.

    `has_end_below`: the lines below say how the last attempt ended, so its row is brief.
    """
    attempts, is_over = job.attempts, job.state.is_terminal
    outcomes = [attempt.outcome for attempt in attempts if attempt.outcome]
    is_good = all(outcome.cause is Cause.COMPLETED for outcome in outcomes)
    if len(attempts) < 2 and (is_good or (has_end_below and outcomes)):
        return
    for attempt in attempts:
        is_last = attempt is attempts[-1]
        may_run, has_end = is_last and not is_over, is_last and has_end_below
        ended = _attempt_line(attempt, may_run=may_run, has_end_below=has_end)
        yield "" if attempt.number > 1 else "attempts", f"{attempt.number}  {ended}"


def _attempt_line(attempt: AttemptSummary, *, may_run: bool, has_end_below: bool) -> str:
    """Write when and where an attempt ran and how it ended; `may_run`: it may not have ended."""
    nodes, outcome = fold_hosts(attempt.nodes), attempt.outcome
    if outcome is None:
        missing = "end not reported"
        if may_run:
            missing = "" if nodes else "not reported yet"
        return "  ".join(filter(None, (nodes, missing)))
    span = ""
    if outcome.started_at:  # an agent reported it
        start = datetime.fromtimestamp(outcome.started_at)
        span = f"{start:%m-%d %H:%M:%S}  {clock(outcome.ended_at - outcome.started_at)}"
    head = "  ".join(filter(None, (span, nodes)))
    if has_end_below:
        return f"{head}  {job_view.how_it_ended(outcome)}"
    return f"{head}  {'; '.join(_ending_facts(attempt, outcome))}"


def _ending_facts(attempt: AttemptSummary, outcome: Outcome) -> Iterator[str]:
    """Yield how an attempt ended, what it saved and lost, and what followed."""
    yield job_view.how_it_ended(outcome, job_view.brief(outcome.reason))
    if outcome.checkpoint is not None:
        yield f"checkpoint {outcome.checkpoint}"
    elif outcome.is_handled:
        yield "ended in the script's own signal handler"
    if attempt.lost_steps:
        yield f"lost {job_view.lost_steps(attempt)}"
    # STOP is not shown: if an attempt followed, Slurm or a person began it.
    if outcome.cause is not Cause.COMPLETED and outcome.next is not Next.STOP:
        has_news = outcome.why not in ("", outcome.reason)  # the reason was given above
        rule = f" [{outcome.rule.value}]" if outcome.rule else ""
        yield f"{outcome.next.value}: {outcome.why}{rule}" if has_news else outcome.next.value


# The table of `list`

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
    *("-s", "--state", "states"),
    multiple=True,
    type=click.Choice([state.value for state in JobState], case_sensitive=False),
    metavar="STATE",
    help="list runs in this state, e.g. FAILED (repeatable)",
)
@output.json_option
@click.option("--ids-only", is_flag=True, help="print only job ids, one per line")
def list_command(
    *, everything: bool, newest: int | None, states: tuple[str, ...], as_json: bool, ids_only: bool
) -> int:
    """List jobs and their states.

    List the active runs of this project, and the five newest that have ended. Outside a project,
    list the runs of all projects.

    \b
    clusterrun list --all --state FAILED
    clusterrun cancel -y $(clusterrun list --state PENDING --ids-only)
    """
    limit = newest or (None if everything or states else NEWEST_LOOKED_AT)
    found = list_jobs(limit=limit)
    shown = [job for job in found if not states or job.state.value in states]
    if not (everything or newest or states):  # few jobs: their last steps are read from logs
        ended = [job for job in shown if job.state.is_terminal]
        dropped = {id(job) for job in ended[ENDED_SHOWN:]}
        shown = [with_last_step(job) for job in shown if id(job) not in dropped]
    if as_json:
        jobs = [job_view.job_object(job) for job in shown]
        output.answer_json({"schema": "clusterrun.list/1", "jobs": jobs})
    elif ids_only:
        for job in shown:
            if job.record.job_id:
                output.answer(job.record.job_id)
    else:
        left_out = 0 if states else len(found) - len(shown)
        _print_table(shown, is_empty=not found, left_out=left_out)
    return _report_no_answer([job.error for job in found])


def _print_table(shown: list[JobStatus], *, is_empty: bool, left_out: int) -> None:
    if not shown:
        output.say("no runs yet" if is_empty else "no runs to show")
        return
    head: tuple[str, ...] = HEAD
    rows = [_columns(job) for job in shown]
    if any(find.is_of_other_project(job.record) for job in shown):
        head = ("PROJECT", *HEAD)
        rows = [(job.record.workdir, *row) for job, row in zip(shown, rows, strict=True)]
    output.answer_table(head, rows, spare=SPARE)
    if any(job.progress.source is ProgressSource.OUTPUT for job in shown):
        output.note(f"progress marked {READ_MARK} was read from the output")
    if left_out:
        output.note(f"--all lists {count(left_out, 'more run')} that ended earlier")


def _columns(job: JobStatus) -> tuple[str, ...]:
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
        "-" if job.start is None else job_view.local_time(job.start),
        f"{spent} / {limit}",
        _step(job),
        _why_or_where(job),
    )


def _why_or_where(job: JobStatus) -> str:
    """Say what matters most: damage, a suspicion, why it failed, or where it runs."""
    if job.damaged:
        return f"damaged: {job.damaged[0]}"
    if job.suspicions:
        return job_view.brief(f"suspect: {job.suspicions[0].text}")
    if job.error and job.record.home:  # the host of the run gave no answer
        return job_view.brief(describe(job.error))
    if job.failure is None or job.pending:
        return job_view.where_or_why(job)
    verdict = job.failure.verdict
    if verdict and not verdict.generic:  # the error itself says more than a generic one
        return job_view.brief(job_view.verdict_line(verdict))
    return job_view.brief("\n".join(job_view.failure_lines(job.failure)))


def _step(job: JobStatus) -> str:
    """Write `450/1000 14.9 it/s, 00:00:37 left`; a mark shows that it comes from the output."""
    left_s = job_view.eta_s(job)
    left = "" if left_s is None else f"{clock(left_s)} left"
    speed = job_view.rate(job.progress) if job.state is JobState.RUNNING else ""
    mark = READ_MARK if job.progress.source is ProgressSource.OUTPUT else ""
    facts = ", ".join(filter(None, (speed, left)))
    return " ".join(filter(None, (job_view.steps_done(job.progress) + mark, facts))) or "-"


def _report_no_answer(errors: list[ClusterrunError | None]) -> int:
    """Report once that a scheduler or host did not answer; return the exit status of the first."""
    if not_adopted := [error for error in errors if isinstance(error, NotAdoptedError)]:
        output.note(f"{describe(not_adopted[0])}; {not_adopted[0].hint}")  # never asked: no failure
    distinct = {str(error): error for error in errors if error and error not in not_adopted}
    for error in distinct.values():
        output.print_error(error, is_answer=False)
    return next((error.exit_code for error in distinct.values()), Exit.OK)
