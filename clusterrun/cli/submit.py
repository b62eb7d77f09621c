"""`submit`: start a job; stdout holds what sbatch would print, all else is on stderr."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click
from click.exceptions import Exit as ClickExit

from clusterrun.cli import output, render
from clusterrun.cli.options import JobOptions, ScriptCommand, job_options
from clusterrun.cli.status import failure_text, say_released
from clusterrun.errors import Exit, UsageError
from clusterrun.shared.wording import count

if TYPE_CHECKING:
    from clusterrun.backends.status import JobStatus
    from clusterrun.config.spec import JobSpec
    from clusterrun.launch.plan import Plan
    from clusterrun.rundir.record import JobRecord
    from clusterrun.verbs.api import Prepared


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
@click.option(
    "-y", "--yes", is_flag=True, help=f"no question above {output.CONFIRM_ABOVE_NODES} nodes"
)
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
    from clusterrun.verbs import api

    output.expect_json(as_json)
    _refuse_contradictions(as_json=as_json, parsable=parsable, follow=follow, dry_run=dry_run)
    job = _chained(job) if chain else job
    prepared = render.prepare(_planned(job) if plans else job)
    if plans:
        _refuse_plan_without_gpus(prepared.plan)
    variables = render.tell(prepared, keep_sbatch_env=keep_sbatch_env)
    if dry_run or test_only:
        verdict = api.check(prepared, keep_sbatch_env=keep_sbatch_env)
        _show_unsent(prepared, verdict, test_only=test_only, as_json=as_json)
        return
    confirm_size(prepared.plan, yes=yes)
    describe(prepared.plan)
    argv = ("clusterrun", *sys.argv[1:])
    record = api.submit_prepared(
        prepared, argv=argv, keep_sbatch_env=keep_sbatch_env, chain=chain or 0
    )
    warnings = render.warnings_of(prepared, variables, keep=keep_sbatch_env)
    told = job_object(record, prepared.resolved.spec, warnings) if as_json else None
    answer(record, told=told, parsable=parsable)
    if follow:
        _follow(ctx, record)
    if wait or follow:
        ctx.exit(_wait(record, is_told=follow))


def _chained(job: JobOptions) -> JobOptions:
    """Have the next job of the chain go on with the run, unless something else was asked for."""
    from clusterrun.config import Given

    flags = {"on_interrupt": Given(value="successor", flag="--chain"), **job.flags}
    return dataclasses.replace(job, flags=flags)


def _planned(job: JobOptions) -> JobOptions:
    """Set strategy, micro-batch, accumulation and checkpointing to the fastest way that fits."""
    from clusterrun.advice.question import planned
    from clusterrun.cli.plan_view import as_options
    from clusterrun.config import Given

    resolved = job.load()
    asked = resolved.spec.strategy if "strategy" in job.flags else None
    setup = planned(resolved, strategy=asked).setup
    output.detail("plan", as_options(setup))
    values = {
        "strategy": setup.strategy.value,
        "micro_batch": str(setup.micro_batch),
        "accumulation": str(setup.accumulation),
        "grad_ckpt": setup.grad_ckpt,
        "planned": True,
    }
    chosen = {name: Given(value=value, flag="--plan") for name, value in values.items()}
    return dataclasses.replace(job, flags={**job.flags, **chosen})


def _refuse_plan_without_gpus(plan: Plan) -> None:
    from clusterrun.config.spec import Device

    if plan.device is not Device.CUDA:
        raise UsageError(
            f"--plan chooses for GPUs, and the ranks would compute on {plan.device.value}",
            hint="leave out --plan",
        )


def _refuse_contradictions(*, as_json: bool, parsable: bool, follow: bool, dry_run: bool) -> None:
    refuse_two_answers(as_json=as_json, parsable=parsable)
    if as_json and follow:
        raise UsageError(
            "--json and --follow exclude each other",
            hint="submit with --json, then run: clusterrun logs -f JOB --json",
        )
    if parsable and dry_run:
        raise UsageError("--dry-run submits nothing, so there is no id for --parsable")


def refuse_two_answers(*, as_json: bool, parsable: bool) -> None:
    """Refuse two forms of the one answer. Raises UsageError."""
    if as_json and parsable:
        raise UsageError("--json and --parsable exclude each other", hint="keep one of them")


def _show_unsent(prepared: Prepared, verdict: str, *, test_only: bool, as_json: bool) -> None:
    """Print the script (--dry-run) or what Slurm said of it (--test-only)."""
    if not test_only:
        output.say(verdict or "bash finds no mistake; there is no Slurm to ask")
        render.show(prepared, as_json=as_json)
    elif not verdict:
        raise UsageError(
            "--test-only asks Slurm, and this job is for this machine",
            hint="pass --cluster slurm on a login node",
        )
    elif as_json:
        output.answer_json({"schema": "clusterrun.test-only/1", "message": verdict})
    else:
        output.answer(verdict)


def confirm_size(plan: Plan, *, yes: bool) -> None:
    """Ask about a job on many nodes. Raises UsageError where nobody can be asked."""
    if yes or plan.nodes <= output.CONFIRM_ABOVE_NODES:
        return
    if not output.is_interactive():
        raise UsageError(
            f"{plan.nodes} nodes are more than {output.CONFIRM_ABOVE_NODES} "
            "and nobody can be asked",
            hint="pass -y if you mean it",
        )
    output.confirm(f"Submit to {plan.nodes} nodes?", otherwise="nothing was submitted")


def describe(plan: Plan) -> None:
    """Say what will run before it is sent."""
    nodes = count(plan.nodes, "node")
    ranks = count(plan.world_size, "rank")
    where = "simulated on this machine" if plan.cluster.value == "local" else "Slurm"
    output.detail("world", f"{ranks} = {nodes} x {plan.procs_per_node}, {where}")
    output.detail(
        "launcher",
        f"accelerate, strategy {plan.strategy.value}, {plan.device.value}, "
        f"precision {_PRECISIONS.get(plan.precision.value, plan.precision.value)}",
    )


_PRECISIONS: Final = {
    "head": "bf16 or fp16, as the first node can",
    "file": "as your configuration says",
}


def answer(record: JobRecord, *, told: Mapping[str, Any] | None, parsable: bool) -> None:
    """Say which job it is, as the object `told` where there is one, and how to watch it."""
    if told is not None:
        output.answer_json(told)
    elif parsable:
        output.answer(";".join(filter(None, (record.job_id, record.slurm_cluster))))
    else:
        output.answer(f"Submitted batch job {record.job_id}")
    output.detail("run dir", record.run_dir)
    output.detail("follow", f"clusterrun logs -f {record.job_id}")
    if record.chained_job_ids:
        output.detail("chain", f"{', '.join(record.chained_job_ids)} go on after it")
    output.detail("cancel", f"clusterrun cancel {record.job_id}")


def job_object(record: JobRecord, spec: JobSpec, warnings: list[dict[str, str]]) -> dict[str, Any]:
    """Describe a job that was submitted."""
    from clusterrun.advice.question import told_batch

    return {
        "schema": "clusterrun.submit/1",
        "job_id": record.job_id,
        "backend": record.cluster.value,
        "cluster": record.slurm_cluster,
        "chained_job_ids": list(record.chained_job_ids),
        "name": record.name,
        "run_id": record.run_id,
        "run_dir": record.run_dir,
        "script": str(record.paths.script),
        "log_dir": str(record.paths.logs_dir),
        "world_size": record.world_size,
        "nodes": record.nodes,
        "procs_per_node": record.procs_per_node,
        "gpus_per_node": record.gpus_per_node,
        "effective_batch": told_batch(spec, record.world_size),
        "warnings": warnings,
    }


def _follow(ctx: click.Context, record: JobRecord) -> None:
    """Show the logs as `logs --follow` does; a watcher who leaves does not end the job."""
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


def _wait(record: JobRecord, *, is_told: bool) -> int:
    """Wait for the end and give the job's own exit status."""
    from clusterrun.verbs import api

    try:
        ended = api.wait(record, released=say_released)
    except KeyboardInterrupt:
        output.say(f"\njob {record.job_id} keeps running")
        _tell_how_to_end(record)
        raise
    if not is_told:
        output.say(f"job {record.job_id} {output.painted_state(ended.state.value)}")
    if ended.failure:
        output.say(f"  failed     {failure_text(ended.failure)}")
    return job_exit_code(ended)


def job_exit_code(ended: JobStatus) -> int:
    """Give a job's own exit status, 1 where it has none and did not complete."""
    if ended.exit_code:
        return ended.exit_code
    if ended.exit_signal:
        return 128 + ended.exit_signal
    return Exit.OK if ended.state.is_success else Exit.FAILED
