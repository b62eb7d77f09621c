"""What submit, resume and resubmit ask and print around a submission."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from clusterrun.backends.environment import SBATCH
from clusterrun.cli.shared import output
from clusterrun.errors import ElsewhereError, Exit
from clusterrun.launch.plan import Plan
from clusterrun.rendering.bundle import by_hand
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.wording import count
from clusterrun.verbs.render import Prepared, place

if TYPE_CHECKING:
    from clusterrun.cli.shared.options import HowToAnswer
    from clusterrun.verbs.resume import Changed

Warnings = list[dict[str, str]]

_FEW_NODES: Final = 2  # nearly all partitions have them: Slurm is not asked whether they can start
_PRECISIONS: Final = {
    "head": "bf16 or fp16, depending on the GPUs of the first node",
    "file": "from your configuration file",
}


def print_notes(prepared: Prepared) -> Warnings:
    """Print and return, for JSON, a job's notes and the SBATCH_* variables that it does not use."""
    script = prepared.resolved.spec.script or prepared.resolved.spec.module or ""
    notes = [("note", text) for text in prepared.notes]
    notes += [(x.id, f"{place(x, script)}: {x.text}; {x.fix}") for x in prepared.pitfalls]
    for _, text in notes:
        output.note(text)
    notes += [("sbatch_env_removed", text) for text in warn_of_sbatch_variables(prepared)]
    return [{"code": code, "message": text} for code, text in notes]


def warn_of_sbatch_variables(prepared: Prepared) -> list[str]:
    """Print and return the SBATCH_* variables that would override a job's options."""
    items = sorted(os.environ.items()) if prepared.plan.cluster.scheduler.reads_sbatch else ()
    removed = [f"{name}={value}" for name, value in items if name.startswith(SBATCH)]
    if removed:
        note = "clusterrun removes these variables for this submission; pass options instead"
        output.warn(f"set in your shell for sbatch: {', '.join(removed)}", notes=(note,))
    return removed


def print_files(prepared: Prepared, *, as_json: bool) -> None:
    """Print the batch script, for hosts a command for each, or all files as one JSON object."""
    if as_json:
        head = {"schema": "clusterrun.render/1", "name": prepared.plan.name}
        output.answer_json({**head, "files": prepared.bundle.files, "notes": prepared.notes})
    elif prepared.plan.hosts:
        output.answer("\n".join(by_hand(prepared.plan, prepared.bundle)), wraps=False)
    else:
        output.answer_exactly(prepared.bundle.script)


def print_changes(changed: Changed) -> None:
    """Print the settings that differ, a line each: `slurm.exclude: (none) -> node019`."""
    texts = (f"{x.key}: {x.old or '(none)'} -> {x.new or '(none)'}" for x in changed.changes)
    output.detail("changes", *texts)


def plan_in_words(plan: Plan) -> tuple[str, str]:
    """Return two texts: how many ranks run where, and how they start."""
    nodes, ranks = count(plan.nodes, "node"), count(plan.world_size, "rank")
    scheduler = plan.cluster.scheduler
    where = f"simulated on {scheduler.title}" if scheduler.is_this_machine else scheduler.title
    precision = _PRECISIONS.get(plan.precision.value, plan.precision.value)
    how = f"{plan.launcher.value}, strategy {plan.strategy.value}, {plan.device.value}"
    world = f"{ranks} = {nodes} x {plan.procs_per_node}, {where}"
    return world, f"{how}, precision {precision}"


def print_plan(plan: Plan) -> None:
    """Print what will run before it is sent."""
    world, launcher = plan_in_words(plan)
    output.detail("world", world)
    sizes = dataclasses.asdict(plan.parallel)  # printed if the strategy does not tell them
    if plan.parallel.model > 1 or (plan.strategy.is_fsdp and plan.parallel.replicate > 1):
        named = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        output.detail("parallel", f"{named}; {count(plan.data_parallel, 'data-parallel rank')}")
    output.detail("launcher", launcher)


def confirm_size(plan: Plan, *, yes: bool) -> None:
    """Ask before submitting to many nodes. Raises UsageError if this is not a terminal."""
    if yes or plan.nodes <= output.CONFIRM_ABOVE_NODES:
        return
    question, hint = f"Submit to {plan.nodes} nodes?", f"pass -y to submit to {plan.nodes} nodes"
    deed = f"a job on more than {output.CONFIRM_ABOVE_NODES} nodes"
    output.confirm(question, deed, yes=hint, otherwise="nothing was submitted")


def answer_and_wait(record: JobRecord, data: dict[str, Any], asked: HowToAnswer) -> int:
    """Print the submission; with `wait` or `follow`, return the job's exit status at its end."""
    if asked.as_json and not asked.wait:  # else `await_end` prints it, completed by the end
        output.answer_json(data)
    elif asked.parsable and not asked.as_json:
        output.answer(";".join(filter(None, (record.job_id, record.slurm_cluster))))
    elif not asked.as_json:
        output.answer(f"Submitted batch job {record.job_id}")
    print_where(record)
    if not (asked.wait or asked.follow):
        _warn_of_lost_job(record)
        return Exit.OK
    from clusterrun.cli.shared.closing import await_end  # most submissions need none of it
    from clusterrun.verbs.find import refuse_elsewhere

    try:
        refuse_elsewhere([("", record)])
    except ElsewhereError as there:  # that host waits for the end
        from clusterrun.cli.shared import forward

        options = ["--follow"] if asked.follow else []
        options += ["--json", json.dumps(data)] if asked.as_json else []
        return forward.forward(["await-end", *options], there)
    return await_end(record, data if asked.as_json else None, follow=asked.follow)


def _warn_of_lost_job(record: JobRecord) -> None:
    """Warn of a job that ends with this shell, or that can never start, e.g. on so many nodes."""
    scheduler = record.cluster.scheduler
    if not scheduler.outlives_shell and not sys.stdin.isatty():
        output.note("the job ends with this allocation; pass --wait if the script would end first")
    if scheduler.reads_sbatch and record.nodes > _FEW_NODES:
        from clusterrun.backends.slurm.outlook import explained
        from clusterrun.cli.shared.job_view import warn_stuck
        from clusterrun.verbs.status import quick_status

        now = quick_status(record, max_age_s=0)
        if now.pending and now.pending.can_start is False:
            warn_stuck(explained(now))


def print_where(record: JobRecord) -> None:
    """Print the run directory, and how to follow and cancel the job."""
    host = f"{record.home.host}:" if record.home else ""
    output.detail("run dir", f"{host}{(record.home or record).run_dir}")
    output.detail("follow", f"clusterrun logs -f {record.job_id}")
    if record.chained_job_ids:
        output.detail("chain", f"continues as {', '.join(record.chained_job_ids)}")
    output.detail("cancel", f"clusterrun cancel {record.job_id}")


def submission_object(
    record: JobRecord, prepared: Prepared, warnings: Warnings, *, verb: str = "submit"
) -> dict[str, Any]:
    """Describe a submitted job; `job_view.end_object` describes its end."""
    spec, ranks = prepared.resolved.spec, prepared.plan.data_parallel
    batch = spec.effective_batch
    if spec.micro_batch is not None:
        batch = batch or spec.micro_batch * (spec.accumulation or 1) * ranks
    names = ("name", "run_id", "world_size", "nodes", "procs_per_node", "gpus_per_node")
    return {
        "schema": f"clusterrun.{verb}/1",
        "job_id": record.job_id,
        "backend": record.cluster.value,
        "cluster": record.slurm_cluster,
        "chained_job_ids": list(record.chained_job_ids),
        **{name: getattr(record, name) for name in names},
        "run_dir": (record.home or record).run_dir,
        "script": str(record.paths.script),
        "log_dir": str(record.paths.logs_dir),
        "effective_batch": batch,
        "warnings": warnings,
        **dict.fromkeys(("state", "exit", "verdict")),  # `await_end` fills them in
    }


def changes_object(changed: Changed) -> dict[str, Any]:
    """Describe the settings that differ, and the nodes that are excluded."""
    return {"changes": [x._asdict() for x in changed.changes], "excluded": changed.excluded}
