"""`plan`: estimate what a training will need, before it is queued."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath
from typing import Final

import click

from clusterrun.advice.question import (
    assumptions_of,
    effective_batch,
    inherited_of,
    question_of,
)
from clusterrun.cli import plan_json, plan_view
from clusterrun.cli.shared import complete, output
from clusterrun.cli.shared.options import (
    JobCommand,
    JobOptions,
    job_options,
    json_option,
)
from clusterrun.config import Given, Resolved
from clusterrun.errors import Exit, UsageError
from clusterrun.estimates.alternatives import alternatives
from clusterrun.estimates.estimate import Estimate, Question, estimate
from clusterrun.estimates.inputs import Fit
from clusterrun.estimates.recommend import (
    WHAT_IF,
    best_per_strategy,
    neighbours,
    recommend,
    smallest,
)

_NEWEST: Final = "\0"  # no job has that name


@click.command(cls=JobCommand)
@job_options(script=False, training=True)
@click.argument("job_file", metavar="[JOBFILE|SCRIPT]", required=False, type=click.Path())
@click.option(
    "--recommend",
    "recommends",
    is_flag=True,
    help="find the fastest strategy, micro-batch and accumulation that fit",
)
@click.option(
    "--what-if",
    "what",
    metavar="|".join(WHAT_IF),
    type=click.Choice(WHAT_IF),
    help="vary one setting",
)
@click.option(
    "--compare",
    "job_id",
    metavar="[JOB]",
    is_flag=False,
    flag_value=_NEWEST,
    shell_complete=complete.jobs,
    help="compare the estimate of a job with its measurements  [default: the newest]",
)
@click.option("--explain", "explains", is_flag=True, help="print the formulas and their symbols")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    job: JobOptions,
    *,
    job_file: str | None,
    recommends: bool,
    what: str | None,
    job_id: str | None,
    explains: bool,
    as_json: bool,
) -> None:
    """Estimate memory, time and cost before you queue.

    Describe the training with options or in the section `training:` of clusterrun.yaml. Options
    of submit are also accepted. Exit with 0 if the training fits, even tightly, with 3 if it does
    not, and with 1 if too little is known for a verdict.

    \b
    clusterrun plan --model qwen3-8b --seq-len 4096 -N 4 --gpus-per-node 8 --gpu h100-80g
    clusterrun plan train.yaml --what-if strategy
    clusterrun plan --recommend --effective-batch 256
    """
    output.expect_json(as_json)
    if sum((recommends, what is not None, job_id is not None)) > 1:
        raise UsageError(
            "--recommend, --what-if and --compare cannot be combined", hint="pass one of them"
        )
    if job_id is not None:
        from clusterrun.cli.plan_compare import compare

        compare(None if job_id == _NEWEST else job_id, as_json=as_json)
        return
    resolved = _resolved(job, job_file)
    question = _question(resolved, is_open=recommends)
    if recommends:
        ctx.exit(_recommend(question, as_json=as_json))
    around = neighbours(question, what) if what else plan_view.usual_neighbours(question)
    answer, *near = map(estimate, (question, *around))
    others = alternatives(question) if answer.lacks_memory else []
    if as_json:
        output.answer_json(plan_json.of(answer, near, others))
    else:
        plan_view.show(answer, near, what=what, alternatives=others, explains=explains)
    ctx.exit(_exit_code(answer))


def _exit_code(answer: Estimate) -> Exit:
    if answer.verdict is None:
        return Exit.FAILED
    return Exit.NO if answer.verdict is Fit.NO else Exit.OK


def _resolved(job: JobOptions, job_file: str | None) -> Resolved:
    """Resolve the configuration; a script is planned as it would be submitted."""
    if job_file is not None and PurePath(job_file).suffix == ".py":
        job = job._replace(flags={**job.flags, "script": Given(value=job_file)})
    elif job_file is not None:
        if job.config_file is not None:
            raise UsageError("JOBFILE and --config cannot be combined", hint="keep one of them")
        job = job._replace(config_file=job_file)
    return job.load()


def _question(resolved: Resolved, *, is_open: bool) -> Question:
    for text in (*resolved.notes, *inherited_of(resolved)):
        output.note(text)
    question = question_of(resolved, is_open=is_open)
    for text in assumptions_of(resolved):
        output.note(text)
    return question


def _recommend(question: Question, *, as_json: bool) -> int:
    effective = effective_batch(question)
    choices = best_per_strategy(recommend(question, effective))
    if as_json:
        output.answer_json(plan_json.of_choices(choices, question, effective))
    elif choices:
        plan_view.show_choices(choices, question)
    if not choices:
        output.warn(plan_view.nothing_fits(smallest(question, effective), question))
        return Exit.NO
    answer = estimate(dataclasses.replace(question, setup=choices[0].setup))
    if answer.never_ends:
        output.warn("the fastest setup exceeds the time limit and saves nothing; pass --save-every")
    return Exit.NO if answer.never_ends else Exit.OK
