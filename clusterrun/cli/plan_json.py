"""Build the objects of `plan --json`: every term with its formula, nothing rounded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from clusterrun.cli.plan_view import changed_options, tokens_per_s, verdict_line
from clusterrun.estimates.estimate import Estimate, Question
from clusterrun.estimates.inputs import Setup
from clusterrun.estimates.recommend import Choice
from clusterrun.estimates.speed import assumption

SCHEMA = "clusterrun.plan/1"


def of(
    answer: Estimate,
    neighbours: Sequence[Estimate] = (),
    alternatives: Sequence[Choice] = (),
) -> dict[str, Any]:
    """Describe an estimate and, in short, its neighbours and alternatives."""
    question, setup = answer.question, answer.question.setup
    found = {name: _plain(getattr(answer, name)) for name in ("host_memory", "gpu_memory", "disk")}
    found["disk"] |= {"keep": question.keep, "keep_best": question.keep_best}
    names = ("steps", "gpu_hours", "cost", "speedup", "loader", "preset", "notes", "verdict")
    return {
        "schema": SCHEMA,
        "summary": verdict_line(answer),
        "alternatives": [
            {"options": changed_options(choice.setup, setup), **_choice(choice)}
            for choice in alternatives
        ],
        "inputs": _inputs(question),
        "batch": _batch(setup.effective_batch, setup),
        "lr": _plain(answer.rates),
        "time": _time(answer),
        "links": _plain(question.links(question.gpu)) if question.gpu else None,
        "what_if": [_neighbour(each) for each in neighbours],
        **{name: _plain(getattr(answer, name)) for name in names},
        **found,
    }


def of_choices(choices: Sequence[Choice], question: Question, effective: int) -> dict[str, Any]:
    """Describe the setups that fit, the fastest first."""
    return {
        "schema": SCHEMA,
        "inputs": _inputs(question),
        "batch": _batch(effective, question.setup),
        "recommended": [
            _choice(choice) | {"relative_time": choice.step_s / choices[0].step_s}
            for choice in choices
        ],
        "assumptions": [assumption(question.links(question.gpu))] if question.gpu else [],
    }


def _plain(value: Any) -> Any:
    """Return a dataclass as an object; of a need, what is shown instead of how it is judged."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    found = dataclasses.asdict(value)
    if "capacity_bytes" in found:
        left_out = ("margin", "is_part", "fits_below")
        found |= {name: getattr(value, name) for name in ("total_bytes", "verdict")}
        return {key: each for key, each in found.items() if key not in left_out}
    return found


def _inputs(question: Question) -> dict[str, Any]:
    own = dataclasses.asdict(dataclasses.replace(question, scaling=None))
    own |= {"gpu": question.gpu.name if question.gpu else None, **_setup(question.setup)}
    model = dataclasses.asdict(question.setup.model)
    return {"model": model, **{key: own[key] for key in own if key not in ("setup", "scaling")}}


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
        "tokens_per_s": tokens_per_s(time, answer.question.setup),
        "parts": _plain(time.cost),
        "basis": time.step.basis,
        **{name: getattr(time, name) for name in ("filled", "mfu", "segments")},
    }


def _neighbour(found: Estimate) -> dict[str, Any]:
    gpu, time = found.question.gpu, found.time
    return {
        **_setup(found.question.setup),
        "gpu": gpu.name if gpu else None,
        "step_s": time.step.mid_s if time else None,
        "total_s": time.whole.mid_s if time and time.whole else None,
        "cost": found.cost,
        "gpu_bytes": found.gpu_memory.total_bytes if found.gpu_memory else None,
        "host_bytes": found.host_memory.total_bytes,
        "verdict": found.verdict,
    }
