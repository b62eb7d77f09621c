"""`submit`: start a job; stdout has what sbatch would print, stderr the rest."""

from __future__ import annotations

import dataclasses
import sys

import click
from click.exceptions import Exit as ClickExit

from clusterrun.advice.question import planned
from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared import output, submission
from clusterrun.cli.shared.job_text import failure_text, say_released
from clusterrun.cli.shared.options import (
    JobOptions,
    ScriptCommand,
    as_options,
    job_options,
    yes_option,
)
from clusterrun.config import Given
from clusterrun.config.spec import Device
from clusterrun.errors import Exit, SchedulerUnreachableError, UsageError, describe
from clusterrun.rundir.record import JobRecord
from clusterrun.verbs.render import Prepared, check, prepare
from clusterrun.verbs.status import wait as wait_until_ended
from clusterrun.verbs.submit import submit_prepared


@click.command(cls=ScriptCommand)
@job_options()
@click.option(
    "--plan", "plans", is_flag=True, help="train in the fastest way that fits: plan --recommend"
)
@click.option("--dry-run", is_flag=True, help="print the batch script, check it, submit nothing")
@click.option("--test-only", is_flag=True, help="ask Slurm when it would start, submit nothing")
@click.option("--parsable", is_flag=True, help="print the job id alone (with ;cluster if several)")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option("-W", "--wait", is_flag=True, help="wait for the end; exit with the job's status")
@click.option("--follow", is_flag=True, help="show the logs until the end, as --wait else")
@yes_option
@click.option("--keep-sbatch-env", is_flag=True, help="let SBATCH_* variables of the shell count")
@click.option(
    "--chain",
    metavar="N",
    type=click.IntRange(min=1),
    help="N jobs one after the other, for a run that is longer than the time limit",
)
@click.pass_context
def command(
    ctx: click.Context,
    job: JobOptions,
    *,
    plans: bool,
    dry_run: bool,
    test_only: bool,
    parsable: bool,
    as_json: bool,
    wait: bool,
    follow: bool,
    yes: bool,
    keep_sbatch_env: bool,
    chain: int | None,
) -> None:
    """Train a script on N nodes.

    Options come before the script; what follows it is the script's own (behind -- for -m).
    Without a script the one that clusterrun.yaml names is taken.

    \b
    clusterrun submit -N 2 --gpus-per-node 4 train.py --lr 1e-4
    clusterrun submit --profile a100 --follow
    clusterrun submit --cluster local -N 2 --nproc-per-node 2 -m my.training -- --lr 1
    """
    output.expect_json(as_json)
    _refuse_contradictions(as_json=as_json, parsable=parsable, follow=follow, dry_run=dry_run)
    job = _chained(job) if chain else job
    prepared = _prepare_planned(job) if plans else prepare(job.load())
    warnings = submission.print_notes(prepared, keep_sbatch_env=keep_sbatch_env)
    if dry_run or test_only:
        try:
            answer = check(prepared, keep_sbatch_env=keep_sbatch_env)
        except SchedulerUnreachableError as error:
            if test_only:
                raise
            output.warn(f"Slurm has not checked the script: {describe(error)}")
            answer = "bash finds no mistake"
        _show_unsent(prepared, answer, test_only=test_only, as_json=as_json)
        return
    submission.confirm_size(prepared.plan, yes=yes)
    submission.print_plan(prepared.plan)
    argv = ("clusterrun", *sys.argv[1:])
    record = submit_prepared(prepared, argv=argv, keep_sbatch_env=keep_sbatch_env, chain=chain or 0)
    data = submission.submission_object(record, prepared, warnings)
    submission.answer(record, data, as_json=as_json, parsable=parsable)
    if follow:
        _follow(ctx, record)
    if wait or follow:
        ctx.exit(_wait(record, is_followed=follow))


def _chained(job: JobOptions) -> JobOptions:
    """Have the next job of the chain continue the run, unless something else was asked for."""
    flags = {"on_interrupt": Given(value="successor", flag="--chain"), **job.flags}
    return dataclasses.replace(job, flags=flags)


def _prepare_planned(job: JobOptions) -> Prepared:
    """Prepare a job in the fastest way that fits: strategy, batch and checkpointing."""
    resolved = job.load()
    asked = resolved.spec.strategy if "strategy" in job.flags else None
    setup = planned(resolved, strategy=asked).setup
    output.detail("plan", as_options(setup))
    values = {
        "strategy": setup.strategy.value,
        "micro_batch": str(setup.micro_batch),
        "accumulation": str(setup.accumulation),
        "effective_batch": resolved.spec.effective_batch,  # else accumulation replaces it
        "grad_ckpt": setup.grad_ckpt,
        "planned": True,
    }
    chosen = {name: Given(value=value, flag="--plan") for name, value in values.items()}
    prepared = prepare(dataclasses.replace(job, flags={**job.flags, **chosen}).load())
    if prepared.plan.device is not Device.CUDA:
        raise UsageError(
            f"--plan chooses for GPUs, and the ranks would compute on {prepared.plan.device.value}",
            hint="leave out --plan",
        )
    return prepared


def _refuse_contradictions(*, as_json: bool, parsable: bool, follow: bool, dry_run: bool) -> None:
    submission.refuse_two_answers(as_json=as_json, parsable=parsable)
    if as_json and follow:
        raise UsageError(
            "--json and --follow exclude each other",
            hint="submit with --json, then run: clusterrun logs -f JOB --json",
        )
    if parsable and dry_run:
        raise UsageError("--dry-run submits nothing, so there is no id for --parsable")


def _show_unsent(prepared: Prepared, answer: str, *, test_only: bool, as_json: bool) -> None:
    """Print the script (--dry-run) or Slurm's answer to it (--test-only)."""
    if not test_only:
        submission.print_check(answer)
        submission.print_files(prepared, as_json=as_json)
    elif not answer:
        raise UsageError(
            "--test-only asks Slurm, and this job is for this machine",
            hint="pass --cluster slurm on a login node",
        )
    elif as_json:
        output.answer_json({"schema": "clusterrun.test-only/1", "message": answer})
    else:
        output.answer(answer)


def _follow(ctx: click.Context, record: JobRecord) -> None:
    """Show the logs as `logs --follow` does; Ctrl-C does not end the job."""
    from clusterrun.cli.logs import command as logs

    try:
        with logs.command.make_context("logs", ["--follow", record.job_id], parent=ctx) as inner:
            status = logs.command.invoke(inner)
    except ClickExit as leaving:
        status = leaving.exit_code
    if status == Exit.INTERRUPTED:
        _tell_how_to_end(record)
        ctx.exit(Exit.INTERRUPTED)


def _tell_how_to_end(record: JobRecord) -> None:
    output.say(f"  clusterrun cancel --checkpoint {record.job_id} ends it")


def _wait(record: JobRecord, *, is_followed: bool) -> int:
    """Wait for the end and return the job's own exit status."""
    try:
        ended = wait_until_ended(record, released=say_released)
    except KeyboardInterrupt:
        output.say(f"\njob {record.job_id} keeps running")
        _tell_how_to_end(record)
        raise
    if not is_followed:
        output.say(f"job {record.job_id} {output.painted_state(ended.state.value)}")
    if ended.failure and not (is_followed and ended.failure.node):  # else its agent's line says it
        output.say(f"  failed     {failure_text(ended.failure)}")
    return _exit_code(ended)


def _exit_code(ended: JobStatus) -> int:
    """Return a job's own exit status, 1 if it has none and did not complete."""
    if ended.exit_code:
        return ended.exit_code
    if ended.exit_signal:
        return 128 + ended.exit_signal
    return Exit.OK if ended.state.is_success else Exit.FAILED
