"""`submit`: start a job; stdout has what sbatch would print, stderr the rest.

`render`: print the batch script that `submit` would send. `check`: look for pitfalls.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from clusterrun.backends.machine_facts import read_script
from clusterrun.cli.shared import options, output, submission
from clusterrun.cli.shared.help import explain_option
from clusterrun.config.choices import Device
from clusterrun.config.load import Given
from clusterrun.errors import ClusterrunError, Exit, SchedulerUnreachableError, UsageError, describe
from clusterrun.shared import files
from clusterrun.shared.finding import Finding, Severity, fail, note, ok, skip
from clusterrun.shared.wording import count
from clusterrun.verbs.render import Prepared, check, find_pitfalls, is_unsized, place, prepare
from clusterrun.verbs.submit import submit_prepared


@click.command(cls=options.SubmitCommand)
@options.job_options()
@options.submission_option(
    "--plan", "plans", is_flag=True, help="train with the fastest setup that plan --recommend finds"
)
@options.submission_option(
    "--dry-run", is_flag=True, help="check script, machine, memory and queue, and submit nothing"
)
@options.submission_option(
    "--chain",
    metavar="N",
    type=click.IntRange(min=1),
    help="queue N jobs in all, each of which continues where the one before ended",
)
@options.answer_options
def command(
    job: options.JobOptions,
    *,
    plans: bool,
    dry_run: bool,
    chain: int | None,
    answer: options.HowToAnswer,
) -> int:
    """Submit a training script to run on N nodes.

    Put options before SCRIPT and the script's arguments after it. An option of submit after SCRIPT
    is refused if the script has no such option; after --, every word goes to the script. With -m,
    write -- before the arguments of the module. SCRIPT defaults to the one in clusterrun.yaml.

    \b
    clusterrun submit -N 2 --gpus-per-node 4 train.py --lr 1e-4
    clusterrun submit --profile a100 --follow
    clusterrun submit --cluster local -N 2 --nproc-per-node 2 -m my.training -- --lr 1e-4
    """
    if answer.parsable and dry_run:
        raise UsageError("with --dry-run, --parsable has no job id to print", hint="keep one")
    if chain:  # the next job continues the run, unless --on-interrupt was given
        flags = {"on_interrupt": Given(value="successor", flag="--chain"), **job.flags}
        job = job._replace(flags=flags)
    prepared = _prepare_planned(job) if plans else prepare(job.load())
    prepared.refuse_problem()
    warnings = submission.print_notes(prepared)
    if dry_run:
        return _dry_run(prepared, warnings, as_json=answer.as_json)
    submission.confirm_size(prepared.plan, yes=answer.yes)
    submission.print_plan(prepared.plan)
    record = submit_prepared(prepared, argv=("clusterrun", *sys.argv[1:]), chain=chain or 0)
    data = submission.submission_object(record, prepared, warnings)
    return submission.answer_and_wait(record, data, answer)


def _prepare_planned(job: options.JobOptions) -> Prepared:
    """Prepare a job with the fastest setup that fits: strategy, batch and checkpointing."""
    from clusterrun.advice.question import fastest_choice  # half of what submit would import

    resolved = job.load()
    requested = resolved.spec.strategy if "strategy" in job.flags else None
    setup = fastest_choice(resolved, strategy=requested).setup
    output.detail("plan", options.as_options(setup))
    values = {
        "strategy": setup.strategy.value,
        "micro_batch": str(setup.micro_batch),
        "accumulation": str(setup.accumulation),
        "effective_batch": resolved.spec.effective_batch,  # keep it: accumulation would replace it
        "grad_ckpt": setup.grad_ckpt,
        "planned": True,
    }
    chosen = {name: Given(value=value, flag="--plan") for name, value in values.items()}
    prepared = prepare(job.with_flags(chosen).load())
    if prepared.plan.device is not Device.CUDA:
        text = f"--plan chooses a setup for GPUs, but the ranks run on {prepared.plan.device.value}"
        raise UsageError(text, hint="leave out --plan")
    return prepared


def _dry_run(prepared: Prepared, warnings: submission.Warnings, *, as_json: bool) -> Exit:
    """Print what each check before the queue found, and return the exit status."""
    ids = list(dict.fromkeys(each.id for each in prepared.pitfalls))
    pitfalls = ok("check", "no pitfall found")
    if ids:
        pitfalls = note("check", ", ".join(ids), f"clusterrun explain {ids[0]}")
    found = [ok("job", "; ".join(submission.plan_in_words(prepared.plan))), pitfalls]
    if not as_json:
        for each in found:
            output.answer_finding(each)
    for examine in (_check_machine, _check_estimate, _check_queue):
        found.append(examine(prepared))
        if not as_json:  # at once: the next check may take long
            output.answer_finding(found[-1])
    if as_json:
        findings = [each.to_data() for each in found]
        data = {"schema": "clusterrun.dry-run/1", "findings": findings, "warnings": warnings}
        output.answer_json(data)
    if any(each.severity is Severity.FAIL for each in found):
        return Exit.NO
    of_queue = found[-1]  # skipped if Slurm did not answer
    return Exit.UNREACHABLE if of_queue.severity is Severity.SKIP else Exit.OK


def _check_machine(prepared: Prepared) -> Finding:
    """Run doctor's checks of this machine, less those that `_check_queue` makes."""
    from clusterrun.verbs import doctor  # slow to import

    subject = doctor.Subject(prepared)
    found = doctor.examine(subject, doctor.chosen_checks(subject, (), doctor.ALONE))
    worst = [each for each in found if each.severity is Severity.FAIL]
    if worst:
        text = "; ".join(f"{each.id}: {each.summary}" for each in worst)
        return fail("doctor", text, "; ".join(filter(None, (each.fix for each in worst))))
    noted = [each.id for each in found if each.severity is Severity.NOTE]
    if noted:
        return note("doctor", ", ".join(noted), "run clusterrun doctor with the same options")
    passed = sum(each.severity is Severity.OK for each in found)
    slurm = " and Slurm" if prepared.plan.cluster.scheduler.reads_sbatch else ""
    return ok("doctor", f"{count(passed, 'check')} of this machine{slurm} passed")


def _check_estimate(prepared: Prepared) -> Finding:
    if not prepared.resolved.spec.names_model:
        return ok("plan", "no estimate: no model is set (--set training.model=NAME)")
    from clusterrun.advice.question import host_bytes_and_warnings  # slow to import

    host_bytes, reasons = host_bytes_and_warnings(prepared.resolved)
    if not host_bytes:  # there is no estimate
        return note("plan", "; ".join(reasons), "run clusterrun plan with the same options")
    if reasons:
        return fail("plan", "; ".join(reasons), "clusterrun plan --recommend")
    return ok("plan", "memory, disk and time suffice, as far as plan can tell")


def _check_queue(prepared: Prepared) -> Finding:
    name = "sbatch" if prepared.plan.cluster.scheduler.reads_sbatch else "script"
    try:
        answer = check(prepared)
    except SchedulerUnreachableError as error:
        return skip(name, f"Slurm has not checked the script: {describe(error)}")
    except ClusterrunError as error:
        return fail(name, describe(error), "; ".join(error.hints))
    return ok(name, answer or "bash finds no errors")


@click.command(cls=options.ScriptCommand)
@options.job_options()
@click.option("-O", "--output-dir", metavar="DIR", help="write all files to a new directory")
@click.option("--check", "checks", is_flag=True, help="check the batch script with bash and Slurm")
@output.json_option
def render_command(
    job: options.JobOptions, *, output_dir: str | None, checks: bool, as_json: bool
) -> None:
    """Print the batch script that submit sends.

    submit sends the same bytes; you can also pass them to sbatch yourself. For hosts (--cluster
    ssh, allocation), render prints one command per host, to start the training by hand.

    \b
    clusterrun render -N 2 --gpus-per-node 4 train.py | less
    clusterrun render -N 2 --gpus-per-node 4 -O job train.py && sbatch job/job.sbatch
    """
    prepared = prepare(job.load())
    submission.print_notes(prepared)
    if prepared.problem:
        output.note(f"submit would refuse this job here: {prepared.problem.message}")
    if checks:
        output.say(check(prepared) or "bash finds no errors")
    if output_dir is not None:
        _write_files(prepared, Path(output_dir))
    if output_dir is None or as_json:
        submission.print_files(prepared, as_json=as_json)


def _write_files(prepared: Prepared, directory: Path) -> None:
    """Write every file into a directory that is new or empty; all of them or none."""
    is_new = not directory.exists()
    written: list[Path] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(f"the directory '{directory}' is not empty", hint="choose a new one")
        for name, text in prepared.bundle.files.items():
            written.append(directory / name)
            is_script = written[-1].suffix in (".sh", ".sbatch")
            mode = 0o777 if is_script else files.BY_UMASK  # the umask is applied to both
            files.write_whole(written[-1], text, mode=mode)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        if is_new and directory.is_dir():
            directory.rmdir()
        text, hint = f"cannot write into '{directory}'", "choose another directory"
        raise ClusterrunError(text, cause=str(error), hint=hint) from error
    output.detail("wrote", f"{len(written)} files to {directory}")
    if not prepared.plan.hosts:
        output.detail("submit", shlex.join(["sbatch", str(directory / "job.sbatch")]))


@click.command(cls=options.ScriptCommand)
@options.job_options()
@explain_option
@output.json_option
def check_command(job: options.JobOptions, *, as_json: bool) -> Exit:
    """Look for pitfalls in a script and its launch.

    check reads the script without running it. The exit status is 3 if check found something, 0 if
    not. If you set no number of nodes, GPUs or ranks, check assumes two nodes with two ranks each.
    submit and render print the same findings as notes. A comment `# clusterrun: ignore RULE`
    switches a rule off for its line.

    \b
    clusterrun check -N 2 --gpus-per-node 4 train.py --epochs 3
    clusterrun explain fixed-port
    """
    resolved = job.load()
    prepared = prepare(resolved)
    prepared.refuse_problem()
    source = read_script(resolved)
    found = find_pitfalls(resolved, prepared.plan, source, of_many_ranks=True)
    is_assumed = is_unsized(resolved, prepared.plan)
    notes_on_one_rank = prepared.plan.notes if is_assumed else ()  # check assumes four ranks
    notes = [text for text in prepared.notes if text not in notes_on_one_rank]
    if source is None:
        notes.append("no source was read: SCRIPT is an archive or a module outside this project")
    for text in notes:
        output.note(text)
    variables = submission.warn_of_sbatch_variables(prepared)
    script = resolved.spec.script or resolved.spec.module or ""
    if as_json:
        notes += variables
        data = {"script": script, "findings": [each.to_data() for each in found], "notes": notes}
        output.answer_json({"schema": "clusterrun.check/2", **data})
    else:
        for each in found:
            output.answer_finding(each, place(each, script))
        number = count(len(found), "finding") if found else "no pitfall found"
        output.say(f"{number}, assuming two nodes with two ranks each" if is_assumed else number)
    return Exit.NO if found else Exit.OK
