"""`resume`: go on with a run that has ended, in its own directory, from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from clusterrun.cli import output, render, submit
from clusterrun.cli.options import JobCommand, JobOptions, job_options
from clusterrun.cli.status import failure_text, find_announced
from clusterrun.shared.wording import count

if TYPE_CHECKING:
    from clusterrun.rundir.record import JobRecord
    from clusterrun.verbs.changes import Change
    from clusterrun.verbs.resume import Resumption


@click.command(cls=JobCommand)
@click.argument("run", metavar="[JOB]", required=False)
@job_options(script=False, files=False)
@click.option(
    "--from",
    "start",
    metavar="POINT",
    default="latest",
    help="latest (the default), step-N, the path of a checkpoint of the run, or scratch",
)
@click.option(
    "--exclude-bad",
    is_flag=True,
    help="leave out nodes that gave no sign of life, or where ranks were stopped or blocked twice",
)
@click.option("--force", is_flag=True, help="go on although the run seems to be active")
@click.option("--dry-run", is_flag=True, help="say what would be done, submit nothing")
@click.option("--parsable", is_flag=True, help="print the job id alone (with ;cluster if several)")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option(
    "-y", "--yes", is_flag=True, help=f"no question above {output.CONFIRM_ABOVE_NODES} nodes"
)
def command(
    run: str | None,
    job: JobOptions,
    *,
    start: str,
    exclude_bad: bool,
    force: bool,
    dry_run: bool,
    parsable: bool,
    as_json: bool,
    yes: bool,
) -> None:
    """Go on with a run that has ended.

    The next attempt runs in the same run directory, from the newest complete checkpoint, with the
    configuration that the run had last and what the options here change.
    JOB is a job id, the name of a run or its directory; without it the newest run is taken.

    \b
    clusterrun resume 4711
    clusterrun resume 4711 --from step-350 --exclude-bad
    clusterrun resume 4711 --time 2-0 --partition long
    clusterrun resume 4711 --set 'args=[--max-steps, 400]'
    """
    from clusterrun.verbs import resume

    output.expect_json(as_json)
    submit.refuse_two_answers(as_json=as_json, parsable=parsable)
    plan = resume.prepare_resume(
        find_announced(run),
        start=start,
        flags=job.flags,
        overrides=job.overrides,
        exclude_bad=exclude_bad,
        force=force,
    )
    if plan.is_complete:
        _say_complete(plan, as_json=as_json, parsable=parsable)
        return
    variables = render.tell(plan.prepared, keep_sbatch_env=False)
    if exclude_bad and not plan.changed.excluded:
        output.note("no node of this run is known to be bad: none is left out")
    _tell(plan)
    if dry_run:
        if as_json:
            output.answer_json(_object(plan, plan.record, []))
        return
    submit.confirm_size(plan.prepared.plan, yes=yes)
    record = resume.resume_prepared(plan)
    warnings = render.warnings_of(plan.prepared, variables, keep=False)
    told = _object(plan, record, warnings) if as_json else None
    submit.answer(record, told=told, parsable=parsable)


def _say_complete(plan: Resumption, *, as_json: bool, parsable: bool) -> None:
    record = plan.record
    output.note(
        f"run {record.run_id} is complete; change something to go on with it, "
        "as --set 'args=[--max-steps, 400]'"
    )
    if as_json:
        output.answer_json(_object(plan, record, []))
    elif parsable:
        output.answer(record.job_id)


# What will be done


def _tell(plan: Resumption) -> None:
    output.detail("ended", f"{plan.record.job_id}  {_failure(plan)}")
    output.detail("from", _from(plan))
    for text in plan.start.passed_over:
        output.detail("", text)
    tell_changes(plan.changed.changes)
    if batch := _batch(plan):
        output.detail("batch", batch)
    output.detail("attempt", str(plan.attempt))


def tell_changes(changes: Iterable[Change]) -> None:
    """Print the settings that differ, a line each: `slurm.exclude: (none) -> node019`."""
    label = "changes"
    for change in changes:
        output.detail(label, f"{change.key}: {_shown(change.old)} -> {_shown(change.new)}")
        label = ""


def _shown(text: str | None) -> str:
    return "(none)" if text is None else text


def _failure(plan: Resumption) -> str:
    """Say why the last attempt ended, as its outcome has it, else as its events do."""
    last = plan.seen.attempts[-1].outcome if plan.seen.attempts else None
    if last is not None:
        at = f" at step {last.step}" if last.step is not None else ""
        return f"{last.reason or last.cause.value}{at}"
    return failure_text(plan.seen.failure) if plan.seen.failure else plan.seen.state.value


def _from(plan: Resumption) -> str:
    found, newer = plan.start.checkpoint, len(plan.start.newer)
    what = str(found.path) if found else "the beginning"
    return f"{what} ({count(newer, 'newer checkpoint')} set aside)" if newer else what


def _batch(plan: Resumption) -> str:
    """Compare effective batches, where the script said what it was when it saved."""
    found = plan.start.checkpoint
    old = found.settings.get("effective_batch") if found else None
    if found is None or not isinstance(old, int):
        return ""
    ranks = plan.prepared.plan.world_size
    if ranks == found.world_size or not found.world_size:
        return f"{old} -> {old} (unchanged)"
    new = old * ranks / found.world_size
    return f"{old} -> {new:g} ({found.world_size} -> {ranks} ranks), unless the script keeps it"


# For programs


def _object(plan: Resumption, record: JobRecord, warnings: list[dict[str, str]]) -> dict[str, Any]:
    found = plan.start.checkpoint
    return {
        **submit.job_object(record, plan.changed.resolved.spec, warnings),
        "schema": "clusterrun.resume/1",
        "attempt": plan.seen.attempt if plan.is_complete else plan.attempt,
        "checkpoint": str(found.path) if found else None,
        "step": found.step if found else None,
        "passed_over": list(plan.start.passed_over),
        "set_aside": [str(path) for path in plan.start.newer],
        "changes": changes_object(plan.changed.changes),
        "excluded": list(plan.changed.excluded),
    }


def changes_object(changes: Iterable[Change]) -> list[dict[str, str | None]]:
    """Describe the settings that differ."""
    return [{"key": c.key, "old": c.old, "new": c.new} for c in changes]
