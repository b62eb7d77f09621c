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
    changed_settings,
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
    resumption = prepare_resume(
        _find_run(run), start, job.flags, job.overrides, exclude_bad=exclude_bad, force=force
    )
    if resumption.is_complete:
        _say_complete(resumption, answer)
        return Exit.OK
    resumption.prepared.refuse_problem()
    warnings = submission.print_notes(resumption.prepared)
    _print_resumption(resumption)
    if dry_run:
        output.note("--dry-run: nothing was submitted")
        if answer.as_json:
            output.answer_json(_to_object(resumption, resumption.status.record, []))
        return Exit.OK
    submission.confirm_size(resumption.prepared.plan, yes=answer.yes)
    record = resume_prepared(resumption)
    return submission.answer_and_wait(record, _to_object(resumption, record, warnings), answer)


def _find_run(run: str | None) -> JobRecord:
    """Find a run; without a name, the newest that ended without completing, or the newest."""
    record = None if run or FORWARDED else newest_failed()  # FORWARDED: chosen on another machine
    if record is not None:
        output.say(f"using job {record.job_id} ({record.name}, the newest that did not complete)")
    return record or job_view.find_announced(run)


def _say_complete(resumption: Resumption, answer: options.HowToAnswer) -> None:
    """Say that the run needs no further attempt, and how to train on."""
    name = resumption.status.record.job_id or resumption.status.record.run_id
    advice = f"to train further, pass new arguments: clusterrun resume {name} -- ARGS"
    if resumption.start.checkpoint is None:
        advice = f"the run has no checkpoint; to train again: clusterrun resubmit {name}"
    output.note(f"run {resumption.status.record.run_id} is complete; {advice}")
    if answer.as_json:
        output.answer_json(_to_object(resumption, resumption.status.record, []))
    elif answer.parsable:
        output.answer(resumption.status.record.job_id)


def _print_resumption(resumption: Resumption) -> None:
    """Print how the run ended, where its next attempt starts, and what changes."""
    output.detail("ended", f"job {resumption.status.record.job_id}: {_how_it_ended(resumption)}")
    output.detail("from", _start_text(resumption), *resumption.start.passed_over)
    submission.print_changes(resumption.changed)
    if batch := _batch_change(resumption):
        output.detail("batch", batch)
    output.detail("attempt", str(resumption.status.attempt + 1))
    if resumption.status.record.paths.project.is_dir():
        again = f"clusterrun resubmit {resumption.status.record.job_id}"
        output.note(f"the hosts run the project as it was submitted; to run changed files: {again}")


def _how_it_ended(resumption: Resumption) -> str:
    """Return why the last attempt ended: from its outcome, or else from its events."""
    last = resumption.status.attempts[-1].outcome if resumption.status.attempts else None
    if last is not None:
        return job_view.how_it_ended(last, job_view.brief(last.reason))
    failure, state = resumption.status.failure, resumption.status.state
    return job_view.failure_text(failure) if failure else state.value


def _start_text(resumption: Resumption) -> str:
    """Say where the next attempt starts: from a checkpoint, or from what the script saved."""
    found, newer = resumption.start.checkpoint, len(resumption.start.newer)
    last = resumption.status.attempts[-1].outcome if resumption.status.attempts else None
    no_checkpoint = "what the script itself saved" if last and last.is_handled else "the beginning"
    text = str(found.path) if found else no_checkpoint
    return f"{text} ({count(newer, 'newer checkpoint')} set aside)" if newer else text


def _batch_change(resumption: Resumption) -> str:
    """Say how the number of ranks changes the effective batch; "" if it does not or is unknown."""
    found, ranks = resumption.start.checkpoint, resumption.prepared.plan.world_size
    old = found.settings.get("effective_batch") if found else None
    if found is None or not isinstance(old, int) or found.world_size in (0, ranks):  # 0: unknown
        return ""
    new = f"{old * ranks / found.world_size:g} ({found.world_size} -> {ranks} ranks)"
    return f"{old} -> {new}; if the script refuses that, also change its batch size or accumulation"


def _to_object(
    resumption: Resumption, record: JobRecord, warnings: submission.Warnings
) -> dict[str, Any]:
    found = resumption.start.checkpoint
    return {
        **submission.submission_object(record, resumption.prepared, warnings, verb="resume"),
        "attempt": resumption.status.attempt + (0 if resumption.is_complete else 1),
        "checkpoint": str(found.path) if found else None,
        "step": found.step if found else None,
        "passed_over": list(resumption.start.passed_over),
        "set_aside": [str(path) for path in resumption.start.newer],
        **submission.changes_object(resumption.changed),
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
    changed = changed_settings(earlier, job.flags, job.overrides, exclude_bad=exclude_bad)
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
    data = submission.submission_object(record, prepared, warnings, verb="resubmit")
    data |= submission.changes_object(changed)
    return submission.answer_and_wait(record, data, answer)
