"""`plan`: estimate what a training will need, before it is queued."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import click

from clusterrun.advice.question import Measured, assumptions_of, measure, question_of
from clusterrun.cli import plan_view
from clusterrun.cli.shared import complete, output
from clusterrun.cli.shared.options import JobCommand, JobOptions, job_options
from clusterrun.cli.shared.spellings import refuse_other_program
from clusterrun.config.load import Given
from clusterrun.errors import ClusterrunError, Exit, UsageError
from clusterrun.estimates.estimate import (
    Estimate,
    Question,
    counts_activations,
    estimate,
    unknown_speed,
)
from clusterrun.estimates.inputs import Fit, Setup, total
from clusterrun.estimates.memory import CONTEXT, checkpoint_terms
from clusterrun.estimates.recommend import (
    WHAT_IF,
    Choice,
    alternatives,
    best_per_strategy,
    neighbours,
    recommend,
    smallest,
)
from clusterrun.estimates.speed import assumption
from clusterrun.verbs.find import configuration, find_record

SCHEMA: Final = "clusterrun.plan/1"
_NEWEST: Final = "\0"  # no job has that name


@click.command(cls=JobCommand)
@job_options(script=False, training=True)
@click.argument("script", metavar="[SCRIPT]", required=False, type=click.Path())
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
    help="show the estimate for other values of this setting",
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
@output.json_option
def command(
    job: JobOptions,
    *,
    script: str | None,
    recommends: bool,
    what: str | None,
    job_id: str | None,
    as_json: bool,
) -> Exit:
    """Estimate memory, time and cost before you submit.

    Describe the training with options or in the section `training:` of clusterrun.yaml. plan also
    accepts the options of submit. The exit status is 0 if the training fits, even tightly, 3 if it
    does not fit, and 1 if too little is known for a verdict.

    \b
    clusterrun plan --model qwen3-8b --seq-len 4096 -N 4 --gpus-per-node 8 --gpu h100-80g
    clusterrun plan --config train.yaml --what-if strategy
    clusterrun plan --recommend --effective-batch 256
    """
    if sum((recommends, what is not None, job_id is not None)) > 1:
        text = "--recommend, --what-if and --compare cannot be combined"
        raise UsageError(text, hint="pass one of them")
    if job_id is not None:
        _compare(None if job_id == _NEWEST else job_id, as_json=as_json)
        return Exit.OK
    if script is not None:
        refuse_other_program([script], "plan")
        job = job.with_flags({"script": Given(value=script)})
    resolved = job.load()
    for text in resolved.notes:
        output.note(text)
    question = question_of(resolved, undecided=recommends)  # its setup is still to be chosen
    for text in assumptions_of(resolved):
        output.note(text)
    if recommends:
        return _recommend(question, as_json=as_json)
    questions = neighbours(question, what) if what else []
    if not what and question.gpu_bytes and counts_activations(question.setup):
        questions = neighbours(question, "micro-batch")[-2:]  # those with larger micro-batches
    answer, *near = map(estimate, (question, *questions))
    choices = alternatives(question) if answer.lacks_memory else []
    if as_json:
        output.answer_json(_estimate_object(answer, near, choices))
    else:
        plan_view.show(answer, near, what_if=what, would_fit=choices)
    return {None: Exit.FAILED, Fit.NO: Exit.NO}.get(answer.verdict, Exit.OK)


def _recommend(question: Question, *, as_json: bool) -> Exit:
    """Print the best setup of each strategy; return Exit.NO if none fits or the best never ends."""
    choices = best_per_strategy(recommend(question))
    if as_json:
        output.answer_json(_choices_object(choices, question))
    elif choices:
        plan_view.show_choices(choices, question)
    if not choices:
        output.warn(plan_view.nothing_fits(smallest(question), question))
        return Exit.NO
    answer = estimate(dataclasses.replace(question, setup=choices[0].setup))
    if answer.never_ends:
        output.warn("the fastest setup exceeds the time limit and saves nothing; pass --save-every")
    return Exit.NO if answer.never_ends else Exit.OK


def _compare(job: str | None, *, as_json: bool) -> None:
    """Print a run's estimate beside its measurements (None: the newest). Raises ClusterrunError."""
    record = find_record(job)
    try:
        answer = estimate(question_of(configuration(record)))
    except UsageError as error:
        text = f"job {record.job_id} has no estimate: {error.message}"
        hint = "describe the training under training: in clusterrun.yaml, and submit again"
        raise ClusterrunError(text, hint=hint) from error
    measured = measure(record.paths)
    compared, rows = _compared(answer, measured)
    if not rows:
        text = f"job {record.job_id} has no measurements yet"
        steps = "call clusterrun.runtime.step in the script to measure steps"
        raise ClusterrunError(text, hint=f"{steps}; memory is measured when the ranks end")
    if as_json:
        head = _estimate_object(answer)
        output.answer_json({**head, "job_id": record.job_id, "compared": compared})
        return
    output.answer_table(("WHAT", "ESTIMATED", "MEASURED", "RATIO"), rows)
    if measured.step_s is not None:
        if answer.time is None:
            output.note(f"the step time is not estimated: {unknown_speed(answer.question)}")
        output.note(f"pass --step-time {measured.step_s:.4g}s to plan with the measured time")


def _compared(
    answer: Estimate, reported: Measured
) -> tuple[dict[str, dict[str, float | None]], list[tuple[str, ...]]]:
    """Return all quantities, for --json, and the rows of a table of those that were measured."""
    gpu, step = answer.gpu_memory, answer.time.step.mid_s if answer.time else None
    # Ranks report what torch's allocator holds: without the CUDA context and the margin.
    allocated = total(term for term in gpu.terms if term.name != CONTEXT) if gpu else None
    saved = total(checkpoint_terms(answer.question.setup))
    quantities: list[tuple[str, Callable[[float], str], float | None, float | None]] = [
        ("step time", "{:.4g} s".format, step, reported.step_s),
        ("steps", "{:,.0f}".format, answer.steps.total, reported.steps),
        ("allocated per GPU", _gib, allocated, reported.gpu_bytes),
        ("host memory", _gib, answer.host_memory.total_bytes, reported.host_bytes),
        ("checkpoint", plan_view.gigabytes, saved, reported.checkpoint_bytes),
    ]
    compared, rows = {}, list[tuple[str, ...]]()
    for name, write, predicted, measured in quantities:
        ratio = measured / predicted if predicted and measured is not None else None
        compared[name] = {"predicted": predicted, "measured": measured, "ratio": ratio}
        if measured is not None:
            guess = "unknown" if predicted is None else write(predicted)
            rows.append((name, guess, write(measured), "-" if ratio is None else f"{ratio:.2f}"))
    return compared, rows


def _gib(size: float) -> str:
    return f"{plan_view.gib(size)} GiB"


def _estimate_object(
    answer: Estimate, near: Sequence[Estimate] = (), choices: Sequence[Choice] = ()
) -> dict[str, Any]:
    """Describe an estimate with its formulas; describe neighbours and alternatives in short."""
    question, setup = answer.question, answer.question.setup
    needs = {name: _plain(getattr(answer, name)) for name in ("host_memory", "gpu_memory", "disk")}
    needs["disk"] |= {"keep": question.keep, "keep_best": question.keep_best}
    names = ("steps", "gpu_hours", "cost", "speedup", "loader", "notes", "verdict")
    return {
        "schema": SCHEMA,
        "summary": plan_view.verdict_line(answer),
        "alternatives": [
            {"options": plan_view.changed_options(choice.setup, setup), **_choice(choice)}
            for choice in choices
        ],
        "inputs": _inputs(question),
        "batch": _batch(setup.effective_batch, setup),
        "lr": _plain(answer.rates),
        "time": _time(answer),
        "links": _plain(question.links(question.gpu)) if question.gpu else None,
        "what_if": [_neighbour_object(each) for each in near],
        **{name: _plain(getattr(answer, name)) for name in names},
        **needs,
    }


def _choices_object(choices: Sequence[Choice], question: Question) -> dict[str, Any]:
    """Describe the setups that fit, the fastest first."""
    return {
        "schema": SCHEMA,
        "inputs": _inputs(question),
        "batch": _batch(question.effective_batch, question.setup),
        "recommended": [
            _choice(choice) | {"relative_time": choice.step_s / choices[0].step_s}
            for choice in choices
        ],
        "assumptions": [assumption(question.links(question.gpu))] if question.gpu else [],
    }


def _plain(value: Any) -> Any:
    """Return a dataclass as a dict for JSON; a `Need` with its total and its verdict."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = dataclasses.asdict(value)
    if "capacity_bytes" in fields:  # it is a `Need`
        left_out = ("margin", "is_part", "fits_below")  # total and verdict include them
        fields |= {name: getattr(value, name) for name in ("total_bytes", "verdict")}
        return {key: each for key, each in fields.items() if key not in left_out}
    return fields


def _inputs(question: Question) -> dict[str, Any]:
    own = dataclasses.asdict(question)
    shown = {key: own[key] for key in own if key not in ("setup", "scaling")}
    gpu = question.gpu.name if question.gpu else None
    return {"model": own["setup"]["model"], **shown, "gpu": gpu, **_setup(question.setup)}


def _setup(setup: Setup) -> dict[str, Any]:
    found = dataclasses.asdict(setup)
    del found["model"]
    return {**found, "parallel": {**found["parallel"], "data": setup.data_parallel}}


def _batch(effective: int, setup: Setup) -> dict[str, Any]:
    tokens = effective * setup.seq_len if setup.seq_len else None
    return {"effective": effective, "tokens": tokens}


def _choice(choice: Choice) -> dict[str, Any]:
    needs = {name: getattr(choice, name) for name in ("gpu_bytes", "host_bytes", "verdict")}
    return {**_setup(choice.setup), **needs}


def _time(answer: Estimate) -> dict[str, Any] | None:
    time = answer.time
    if time is None:
        return None
    spans = {"step_s": time.step, "epoch_s": time.epoch, "total_s": time.whole}
    return {
        **{
            name: {"low": span.low_s, "mid": span.mid_s, "high": span.high_s} if span else None
            for name, span in spans.items()
        },
        "samples_per_s": time.samples_s,
        "tokens_per_s": plan_view.tokens_per_s(time, answer.question.setup),
        "parts": _plain(time.cost),  # of a step
        "basis": time.step.basis,
        **{name: getattr(time, name) for name in ("filled", "mfu", "segments")},
    }


def _neighbour_object(answer: Estimate) -> dict[str, Any]:
    """Describe in short an estimate that differs from the requested one in a single setting."""
    time, gpu = answer.time, answer.question.gpu
    return {
        **_setup(answer.question.setup),
        "gpu": gpu.name if gpu else None,
        "step_s": time.step.mid_s if time else None,
        "total_s": time.whole.mid_s if time and time.whole else None,
        "cost": answer.cost,
        "gpu_bytes": answer.gpu_memory.total_bytes if answer.gpu_memory else None,
        "host_bytes": answer.host_memory.total_bytes,
        "verdict": answer.verdict,
    }
