"""`resume`: continue a run that has ended; `resubmit`: start a new run with its settings."""

from __future__ import annotations

import sys
from typing import Any

import click

from clusterrun.cli.shared import complete, job_view, options, output, submission
from clusterrun.errors import Exit
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.wording import count
from clusterrun.verbs.find import FORWARDED
from clusterrun.verbs.render import prepare
from clusterrun.verbs.resume import (
    Resumption,
    change,
    newest_failed,
    prepare_resume,
    resume_prepared,
)
from clusterrun.verbs.submit import submit_prepared


@click.command(cls=options.ContinueCommand)
@click.argument("run", metavar="[JOB]", required=False, shell_complete=complete.jobs)
@options.job_options(script=False, files=False)
@options.submission_option(
    "--from",
    "start",
    metavar="POINT",
    default="latest",
    help="start from latest, step-N or scratch  [default: latest]",
)
@options.exclude_bad_option
@options.submission_option(
    "--force", is_flag=True, help="resume even if the run seems to be active"
)
@options.dry_run_option
@options.answer_options
def command(
    run: str | None,
    job: options.JobOptions,
    *,
    start: str,
    exclude_bad: bool,
    force: bool,
    dry_run: bool,
    answer: options.HowToAnswer,
) -> int:
    """Continue a run that has ended.

    Start the next attempt in the same run directory, from the newest complete checkpoint, with the
    settings of the run. Options change settings; ARGS after -- replace all arguments of the script.
    JOB is a job id, the name of a run or its directory  [default: the newest run that ended without
    completing].

    \b
    clusterrun resume 4711
    clusterrun resume 4711 --from step-350 --exclude-bad
    clusterrun resume 4711 --time 2-0 --partition long
    clusterrun resume 4711 -- --max-steps 400
    """
    plan = prepare_resume(
        _find_run(run), start, job.flags, job.overrides, exclude_bad=exclude_bad, force=force
    )
    if plan.is_complete:
        _say_complete(plan, answer)
        return Exit.OK
    plan.prepared.refuse_problem()
    warnings = submission.print_notes(plan.prepared)
    _print_steps(plan)
    if dry_run:
        output.note("--dry-run: nothing was submitted")
        if answer.as_json:
            output.answer_json(_object(plan, plan.status.record, []))
        return Exit.OK
    submission.confirm_size(plan.prepared.plan, yes=answer.yes)
    record = resume_prepared(plan)
    return submission.answer_and_wait(record, _object(plan, record, warnings), answer)


def _find_run(run: str | None) -> JobRecord:
    """Find a run; without a name, the newest that ended without completing, or the newest."""
    record = None if run or FORWARDED else newest_failed()
    if record is not None:
        output.say(f"using job {record.job_id} ({record.name}, the newest that did not complete)")
    return record or job_view.find_announced(run)


def _say_complete(plan: Resumption, answer: options.HowToAnswer) -> None:
    """Say that the run needs no further attempt, and how to train on."""
    name = plan.status.record.job_id or plan.status.record.run_id
    advice = f"to train further, pass new arguments: clusterrun resume {name} -- ARGS"
    if plan.start.checkpoint is None:
        advice = f"the run has no checkpoint; to train again: clusterrun resubmit {name}"
    output.note(f"run {plan.status.record.run_id} is complete; {advice}")
    if answer.as_json:
        output.answer_json(_object(plan, plan.status.record, []))
    elif answer.parsable:
        output.answer(plan.status.record.job_id)


def _print_steps(plan: Resumption) -> None:
    """Print how the run ended, where its next attempt starts, and what changes."""
    output.detail("ended", f"job {plan.status.record.job_id}: {_failure(plan)}")
    output.detail("from", _start_text(plan), *plan.start.passed_over)
    submission.print_changes(plan.changed)
    if batch := _batch_change(plan):
        output.detail("batch", batch)
    output.detail("attempt", str(plan.status.attempt + 1))
    if plan.status.record.paths.project.is_dir():
        again = f"clusterrun resubmit {plan.status.record.job_id}"
        output.note(f"the hosts run the copy that submit made; to run changed files: {again}")


def _failure(plan: Resumption) -> str:
    """Return why the last attempt ended: from its outcome, or else from its events."""
    last = plan.status.attempts[-1].outcome if plan.status.attempts else None
    if last is not None:
        return job_view.how_it_ended(last, job_view.brief(last.reason))
    failure, state = plan.status.failure, plan.status.state
    return job_view.failure_text(failure) if failure else state.value


def _start_text(plan: Resumption) -> str:
    """Name the checkpoint that the next attempt starts from."""
    found, newer = plan.start.checkpoint, len(plan.start.newer)
    last = plan.status.attempts[-1].outcome if plan.status.attempts else None
    own = "what the script itself saved" if last and last.is_handled else "the beginning"
    what = str(found.path) if found else own
    return f"{what} ({count(newer, 'newer checkpoint')} set aside)" if newer else what


def _batch_change(plan: Resumption) -> str:
    """Say how the number of ranks changes the effective batch; "" if it does not or is unknown."""
    found, ranks = plan.start.checkpoint, plan.prepared.plan.world_size
    old = found.settings.get("effective_batch") if found else None
    if found is None or not isinstance(old, int) or found.world_size in (0, ranks):  # 0: unknown
        return ""
    new = f"{old * ranks / found.world_size:g} ({found.world_size} -> {ranks} ranks)"
    return f"{old} -> {new}; if the script refuses that, also change its batch size or accumulation"


def _object(plan: Resumption, record: JobRecord, warnings: submission.Warnings) -> dict[str, Any]:
    found = plan.start.checkpoint
    return {
        **submission.submission_object(record, plan.prepared, warnings, verb="resume"),
        "attempt": plan.status.attempt + (0 if plan.is_complete else 1),
        "checkpoint": str(found.path) if found else None,
        "step": found.step if found else None,
        "passed_over": list(plan.start.passed_over),
        "set_aside": [str(path) for path in plan.start.newer],
        **submission.changes_object(plan.changed),
    }


@click.command(cls=options.ContinueCommand)
@click.argument("run", metavar="JOB", shell_complete=complete.jobs)
@options.job_options(script=False, files=False)
@options.exclude_bad_option
@options.dry_run_option
@options.answer_options
def resubmit_command(
    run: str,
    job: options.JobOptions,
    *,
    exclude_bad: bool,
    dry_run: bool,
    answer: options.HowToAnswer,
) -> int:
    """Start a new run like an earlier one.

    Train from the first step in a new run directory, with the settings of JOB. Options change them;
    ARGS after -- replace all arguments of the script. clusterrun.yaml and CLUSTERRUN_* variables
    are ignored. JOB is a job id, the name of a run (the newest of that name) or a run directory.

    \b
    clusterrun resubmit 4711
    clusterrun resubmit 4711 -- --lr 3e-5
    clusterrun resubmit 4711 -N 4 --exclude-bad
    """
    earlier = job_view.locate_announced(run)
    changed = change(earlier, job.flags, job.overrides, exclude_bad=exclude_bad)
    prepared = prepare(changed.resolved, is_again=True)
    prepared.refuse_problem()
    warnings = submission.print_notes(prepared)
    submission.print_changes(changed)
    submission.print_plan(prepared.plan)
    if dry_run:
        output.note("--dry-run: nothing was submitted")
        if answer.as_json:
            submission.print_files(prepared, as_json=True)
        return Exit.OK
    submission.confirm_size(prepared.plan, yes=answer.yes)
    record = submit_prepared(prepared, argv=("clusterrun", *sys.argv[1:]))
    data = {
        **submission.submission_object(record, prepared, warnings, verb="resubmit"),
        **submission.changes_object(changed),
    }
    return submission.answer_and_wait(record, data, answer)
