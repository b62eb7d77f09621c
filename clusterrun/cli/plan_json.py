"""Build the objects of `plan --json`: every term with its formula, nothing rounded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from clusterrun.cli.plan_verdict import changed_options, tokens_per_s, verdict_line
from clusterrun.estimates.cost import assumption
from clusterrun.estimates.estimate import Estimate, Need, Question, Time
from clusterrun.estimates.inputs import Setup
from clusterrun.estimates.presets import Preset
from clusterrun.estimates.recommend import Choice
from clusterrun.estimates.speed import Duration

SCHEMA = "clusterrun.plan/1"


def of(
    answer: Estimate,
    neighbours: Sequence[Estimate] = (),
    alternatives: Sequence[Choice] = (),
) -> dict[str, Any]:
    """Describe an estimate and, in short, its neighbours and alternatives."""
    setup = answer.question.setup
    tokens = setup.effective_batch * setup.seq_len if setup.seq_len else None
    return {
        "schema": SCHEMA,
        "verdict": answer.verdict.value if answer.verdict else None,
        "summary": verdict_line(answer),
        "alternatives": [_alternative(choice, setup) for choice in alternatives],
        "inputs": inputs(answer.question),
        "batch": {"effective": setup.effective_batch, "tokens": tokens},
        "steps": dataclasses.asdict(answer.steps),
        "lr": dataclasses.asdict(answer.rates) if answer.rates else None,
        "gpu_memory": _need(answer.gpu_memory) if answer.gpu_memory else None,
        "host_memory": _need(answer.host_memory),
        "time": _time(answer.time, setup),
        "links": _links(answer.question),
        "gpu_hours": answer.gpu_hours,
        "cost": answer.cost,
        "speedup": dataclasses.asdict(answer.speedup) if answer.speedup else None,
        "disk": {
            **_need(answer.disk),
            "keep": answer.question.keep,
            "keep_best": answer.question.keep_best,
        },
        "loader": dataclasses.asdict(answer.loader),
        "preset": _preset(answer.preset) if answer.preset else None,
        "what_if": [_neighbour(found) for found in neighbours],
        "notes": list(answer.notes),
    }


def of_choices(choices: Sequence[Choice], question: Question, effective: int) -> dict[str, Any]:
    """Describe the setups that fit, the fastest first."""
    return {
        "schema": SCHEMA,
        "inputs": inputs(question),
        "batch": {"effective": effective, "tokens": effective * question.setup.seq_len},
        "recommended": [
            _choice(choice) | {"relative_time": choice.step_s / choices[0].step_s}
            for choice in choices
        ],
        "assumptions": [assumption(question.links(question.gpu))] if question.gpu else [],
    }


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        **_setup(choice.setup),
        "gpu_bytes": choice.gpu_bytes,
        "host_bytes": choice.host_bytes,
        "verdict": choice.verdict.value,
    }


def _alternative(choice: Choice, asked: Setup) -> dict[str, Any]:
    return {"options": changed_options(choice.setup, asked), **_choice(choice)}


def inputs(question: Question) -> dict[str, Any]:
    """Describe the question."""
    plain = {
        field.name: getattr(question, field.name)
        for field in dataclasses.fields(question)
        if field.name not in ("setup", "gpu", "lr_rule", "scaling")
    }
    model = dataclasses.asdict(question.setup.model)
    gpu = question.gpu.name if question.gpu else None
    rule = question.lr_rule.value
    return {"model": model, "gpu": gpu, **_setup(question.setup), **plain, "lr_rule": rule}


def _setup(setup: Setup) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(setup) if field.name != "model"]
    values = {name: getattr(setup, name) for name in names}
    parallel = {**dataclasses.asdict(setup.parallel), "data": setup.data_parallel}
    words = {"strategy": setup.strategy.value, "optimizer": setup.optimizer.value}
    return values | words | {"parallel": parallel}


def _need(need: Need) -> dict[str, Any]:
    return {
        "terms": [dataclasses.asdict(term) for term in need.terms],
        "total_bytes": need.total_bytes,
        "capacity_bytes": need.capacity_bytes,
        "band": list(need.band) if need.band else None,
        "verdict": need.verdict.value if need.verdict else None,
    }


def _time(time: Time | None, setup: Setup) -> dict[str, Any] | None:
    if time is None:
        return None
    spans = {"step_s": time.step, "epoch_s": time.epoch, "total_s": time.whole}
    return {
        **{name: _band(span) for name, span in spans.items()},
        "samples_per_s": time.samples_s,
        "tokens_per_s": tokens_per_s(time, setup),
        "filled": time.filled,
        "mfu": time.mfu,
        "parts": dataclasses.asdict(time.cost) if time.cost else None,
        "basis": time.step.basis,
        "segments": time.segments,
    }


def _links(question: Question) -> dict[str, float] | None:
    """Describe the links in bytes a second."""
    gpu = question.gpu
    return dataclasses.asdict(question.links(gpu)) if gpu else None


def _band(duration: Duration | None) -> dict[str, float] | None:
    if duration is None:
        return None
    return {"low": duration.low_s, "mid": duration.mid_s, "high": duration.high_s}


def _preset(preset: Preset) -> dict[str, Any]:
    values = {field.name: getattr(preset, field.name) for field in dataclasses.fields(preset)}
    return {**values, "precision": preset.precision.value, "why": dict(preset.why)}


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
        "verdict": found.verdict.value if found.verdict else None,
    }
