"""`plan`: what a training will need, told before it is queued."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from clusterrun.cli import output, plan_json, plan_view
from clusterrun.cli.options import JobCommand, JobOptions, job_options
from clusterrun.errors import Exit, UsageError
from clusterrun.estimates.estimate import estimate
from clusterrun.estimates.recommend import WHAT_IF, best_per_strategy, recommend, smallest, what_if
from clusterrun.estimates.setup import Verdict

if TYPE_CHECKING:
    from clusterrun.estimates.estimate import Question
    from clusterrun.estimates.recommend import Choice


@click.command(cls=JobCommand)
@job_options(script=False, training=True)
@click.argument("job_file", metavar="[JOBFILE]", required=False, type=click.Path())
@click.option(
    "--recommend",
    "recommends",
    is_flag=True,
    help="the fastest strategy, micro-batch and accumulation that fit",
)
@click.option("--what-if", "what", metavar="|".join(WHAT_IF), type=click.Choice(WHAT_IF))
@click.option(
    "--compare", "job_id", metavar="JOB", help="what was told of a job beside what was measured"
)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.pass_context
def command(
    ctx: click.Context,
    job: JobOptions,
    *,
    job_file: str | None,
    recommends: bool,
    what: str | None,
    job_id: str | None,
    as_json: bool,
) -> None:
    """Tell what a training needs, before it is queued.

    Batch, steps, learning rate, memory, time and disk. Facts of the training come from options or
    from the section `training:` of clusterrun.yaml. Ends with 0 where it fits, be it tightly, and
    with 3 where it does not.

    \b
    clusterrun plan --model llama-3.1-8b --seq-len 4096 -N 4 --gpus-per-node 8 --gpu h100-80g
    clusterrun plan train.yaml --what-if strategy
    clusterrun plan --recommend --effective-batch 256
    """
    output.expect_json(as_json)
    if sum((recommends, what is not None, job_id is not None)) > 1:
        raise UsageError(
            "--recommend, --what-if and --compare exclude each other", hint="ask one by one"
        )
    if job_id is not None:
        from clusterrun.cli.plan_compare import compare

        compare(job_id, as_json=as_json)
        return
    question = _question(job, job_file, is_open=recommends)
    if recommends:
        ctx.exit(_recommend(question, as_json=as_json))
    answer = estimate(question)
    neighbours = what_if(question, what) if what else plan_view.usual_neighbours(question)
    if as_json:
        output.answer_json(plan_json.of(answer, neighbours))
    else:
        plan_view.show(answer, neighbours, is_asked=what is not None)
    if answer.verdict is Verdict.NO:
        ctx.exit(Exit.NO)


def _question(job: JobOptions, job_file: str | None, *, is_open: bool) -> Question:
    from clusterrun.estimation import assumptions_of, question_of

    if job_file is not None:
        if job.config_file is not None:
            raise UsageError("JOBFILE and --config exclude each other", hint="keep one of them")
        job = dataclasses.replace(job, config_file=job_file)
    resolved = job.load()
    question = question_of(resolved, is_open=is_open)
    for text in (*resolved.notes, *assumptions_of(resolved)):
        output.note(text)
    return question


def _recommend(question: Question, *, as_json: bool) -> int:
    from clusterrun.estimation import effective_batch

    effective = effective_batch(question)
    choices = best_per_strategy(recommend(question, effective))
    if as_json:
        output.answer_json(plan_json.of_choices(choices, question, effective))
    elif choices:
        plan_view.show_choices(choices, question)
    if not choices:
        _say_that_nothing_fits(smallest(question, effective), question)
        return Exit.NO
    answer = estimate(dataclasses.replace(question, setup=choices[0].setup))
    if answer.never_ends:
        output.warn("it takes longer than the time limit, and saves nothing (--save-every)")
    return Exit.NO if answer.never_ends else Exit.OK


def _say_that_nothing_fits(least: Choice, question: Question) -> None:
    output.warn(plan_view.nothing_fits(least, question))
