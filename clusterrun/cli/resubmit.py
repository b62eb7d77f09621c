"""`resubmit`: start a new run with the settings of an earlier one."""

from __future__ import annotations

import sys

import click

from clusterrun.cli.shared import complete, output, submission
from clusterrun.cli.shared.job_text import locate_announced
from clusterrun.cli.shared.options import (
    ContinueCommand,
    HowToAnswer,
    JobOptions,
    answer_options,
    dry_run_option,
    exclude_bad_option,
    job_options,
)
from clusterrun.cli.shared.submission import answer_and_wait
from clusterrun.verbs.resume import prepare_resubmit
from clusterrun.verbs.submit import submit_prepared


@click.command(cls=ContinueCommand)
@click.argument("run", metavar="JOB", shell_complete=complete.jobs)
@job_options(script=False, files=False)
@exclude_bad_option
@dry_run_option
@answer_options
@click.pass_context
def command(
    ctx: click.Context,
    run: str,
    job: JobOptions,
    *,
    exclude_bad: bool,
    dry_run: bool,
    answer: HowToAnswer,
) -> None:
    """Start a new run like an earlier one.

    Train from the first step in a new run directory, with the settings of JOB. Options change them;
    ARGS after -- replace all arguments of the script. clusterrun.yaml and CLUSTERRUN_* variables
    are ignored. JOB is a job id, the name of a run (the newest of that name) or a run directory.

    \b
    clusterrun resubmit 4711
    clusterrun resubmit 4711 -- --lr 3e-5
    clusterrun resubmit 4711 -N 4 --exclude-bad
    """
    prepared, changed = prepare_resubmit(
        locate_announced(run), flags=job.flags, overrides=job.overrides, exclude_bad=exclude_bad
    )
    prepared.refuse_problem()
    warnings = submission.print_notes(prepared)
    if exclude_bad and not changed.excluded:
        output.note("no bad nodes are known for that run; none are excluded")
    submission.print_changes(changed.changes)
    submission.print_plan(prepared.plan)
    if dry_run:
        output.note("--dry-run: nothing was submitted")
        if answer.as_json:
            submission.print_files(prepared, as_json=True)
        return
    submission.confirm_size(prepared.plan, yes=answer.yes)
    record = submit_prepared(prepared, argv=("clusterrun", *sys.argv[1:]))
    data = {
        **submission.submission_object(record, prepared, warnings, verb="resubmit"),
        "changes": submission.changes_object(changed.changes),
        "excluded": list(changed.excluded),
    }
    answer_and_wait(ctx, record, data, answer)
