"""`resubmit`: a new run of what an earlier one was made of."""

from __future__ import annotations

import sys

import click

from clusterrun.cli.shared import output, submission
from clusterrun.cli.shared.options import (
    JobCommand,
    JobOptions,
    exclude_bad_option,
    job_options,
    yes_option,
)
from clusterrun.verbs.resubmit import prepare_resubmit
from clusterrun.verbs.submit import submit_prepared


@click.command(cls=JobCommand)
@click.argument("run", metavar="JOB")
@job_options(script=False, files=False)
@exclude_bad_option
@click.option("--dry-run", is_flag=True, help="print what would change, submit nothing")
@click.option("--parsable", is_flag=True, help="print the job id alone (with ;cluster if several)")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@yes_option
def command(
    run: str,
    job: JobOptions,
    *,
    exclude_bad: bool,
    dry_run: bool,
    parsable: bool,
    as_json: bool,
    yes: bool,
) -> None:
    """Run again what a job was made of.

    A new run, from its first step, with the configuration that JOB had last and what the options
    here change; clusterrun.yaml and the environment do not count.
    JOB is a job id, the name of a run (its newest) or a run's directory.

    \b
    clusterrun resubmit 4711
    clusterrun resubmit 4711 -N 4 --exclude-bad
    """
    output.expect_json(as_json)
    submission.refuse_two_answers(as_json=as_json, parsable=parsable)
    prepared, changed = prepare_resubmit(
        run, flags=job.flags, overrides=job.overrides, exclude_bad=exclude_bad
    )
    warnings = submission.print_notes(prepared)
    if exclude_bad and not changed.excluded:
        output.note("no node of that run is known to be bad: none is left out")
    submission.print_changes(changed.changes)
    submission.print_plan(prepared.plan)
    if dry_run:
        output.note("--dry-run: nothing was submitted")
        if as_json:
            submission.print_files(prepared, as_json=True)
        return
    submission.confirm_size(prepared.plan, yes=yes)
    record = submit_prepared(prepared, argv=("clusterrun", *sys.argv[1:]))
    data = {
        **submission.submission_object(record, prepared, warnings, verb="resubmit"),
        "changes": submission.changes_object(changed.changes),
        "excluded": list(changed.excluded),
    }
    submission.answer(record, data, as_json=as_json, parsable=parsable)
