"""`resubmit`: a new run of what an earlier one was made of."""

from __future__ import annotations

import sys

import click

from clusterrun.cli import output, render, submit
from clusterrun.cli.options import JobCommand, JobOptions, job_options
from clusterrun.cli.resume import changes_object, tell_changes


@click.command(cls=JobCommand)
@click.argument("run", metavar="JOB")
@job_options(script=False, files=False)
@click.option(
    "--exclude-bad",
    is_flag=True,
    help="leave out nodes that gave no sign of life, or where ranks were stopped or blocked twice",
)
@click.option("--dry-run", is_flag=True, help="say what would be done, submit nothing")
@click.option("--parsable", is_flag=True, help="print the job id alone (with ;cluster if several)")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option(
    "-y", "--yes", is_flag=True, help=f"no question above {output.CONFIRM_ABOVE_NODES} nodes"
)
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
    from clusterrun.verbs import api, resume

    output.expect_json(as_json)
    submit.refuse_two_answers(as_json=as_json, parsable=parsable)
    prepared, changed = resume.prepare_resubmit(
        run, flags=job.flags, overrides=job.overrides, exclude_bad=exclude_bad
    )
    variables = render.tell(prepared, keep_sbatch_env=False)
    if exclude_bad and not changed.excluded:
        output.note("no node of that run is known to be bad: none is left out")
    tell_changes(changed.changes)
    submit.describe(prepared.plan)
    if dry_run:
        if as_json:
            render.show(prepared, as_json=True)
        return
    submit.confirm_size(prepared.plan, yes=yes)
    record = api.submit_prepared(prepared, argv=("clusterrun", *sys.argv[1:]))
    told = None
    if as_json:
        warnings = render.warnings_of(prepared, variables, keep=False)
        told = {
            **submit.job_object(record, prepared.resolved.spec, warnings),
            "schema": "clusterrun.resubmit/1",
            "changes": changes_object(changed.changes),
            "excluded": list(changed.excluded),
        }
    submit.answer(record, told=told, parsable=parsable)
