"""Published trainings: the right strategy first, and a measured table beside the estimates."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusterrun.config.choices import Strategy
from clusterrun.estimates import gpus
from clusterrun.estimates.estimate import Question, gpu_need, step_duration
from clusterrun.estimates.inputs import GIB, Model, Setup
from clusterrun.estimates.models import BUILT_IN, from_numbers
from clusterrun.estimates.recommend import recommend

KNOWN = yaml.safe_load(Path(__file__).with_name("known.yaml").read_text(encoding="utf-8"))
DOC = Path(__file__).parents[2] / "docs/plan.md"
CASES = KNOWN["cases"]


def model_of(case: dict[str, Any]) -> Model:
    named = case["model"]
    if isinstance(named, str):
        return BUILT_IN[named]
    shape = {name: value for name, value in named.items() if name not in ("params", "gated")}
    return replace(
        from_numbers(Model(name="", params=round(float(named["params"])), **shape)),
        gated=named.get("gated", True),
    )


def question_of(case: dict[str, Any]) -> Question:
    gpu = gpus.find(case["gpu"])
    setup = Setup(
        model=model_of(case),
        nodes=case.get("nodes", 1),
        procs_per_node=case["procs_per_node"],
        seq_len=case["seq_len"],
        lora=case.get("lora", 0),
        precision=gpus.precision_of(gpu),
    )
    return Question(
        setup=setup,
        gpu=gpu,
        gpu_bytes=gpu.memory_bytes,
        host_bytes=case["host_gib"] * GIB,
        wanted_batch=case["batch"],
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["title"])
def test_of_a_known_training_the_right_strategy_comes_first(case: dict[str, Any]) -> None:
    assert case["source"]
    assert case["asserted"]
    best = recommend(question_of(case))[0].setup
    assert best.strategy.value in case["first"]
    assert best.grad_ckpt == case.get("grad_ckpt", best.grad_ckpt)


@pytest.mark.parametrize(
    "case", [case for case in CASES if "tokens_per_gpu" in case], ids=lambda case: case["title"]
)
def test_of_a_known_training_the_speed_is_estimated(case: dict[str, Any]) -> None:
    asked = question_of(case)
    step_s = recommend(asked)[0].step_s
    tokens = case["batch"] * case["seq_len"] / asked.setup.world / step_s
    assert 0.7 < tokens / case["tokens_per_gpu"] < 1.1


A800 = CASES[0]
ROWS = KNOWN["measured"]["rows"]


def told(row: dict[str, Any]) -> tuple[float, float]:
    """Estimate a row: GiB of a GPU, and samples a second."""
    asked = question_of(A800)
    setup = replace(
        asked.setup,
        strategy=Strategy(row["strategy"]),
        grad_ckpt=row["grad_ckpt"],
        micro_batch=row["micro_batch"],
        accumulation=A800["batch"] // (8 * row["micro_batch"]),
    )
    asked = replace(asked, setup=setup)
    need, step = gpu_need(asked), step_duration(asked)
    assert need is not None
    assert step is not None
    return need.total_bytes / GIB, A800["batch"] / step.mid_s


def test_memory_is_an_upper_bound_and_speed_within_a_fifth_of_what_was_measured() -> None:
    for row in ROWS:
        gib, samples_s = told(row)
        assert 0.6 < row["peak_gib"] / gib <= 1.0, row
        assert samples_s == pytest.approx(row["samples_s"], rel=0.2), row


def test_what_was_a_tenth_faster_is_told_faster() -> None:
    pairs = [
        (fast, slow)
        for fast, slow in permutations(ROWS, 2)
        if fast["samples_s"] > 1.1 * slow["samples_s"]
    ]
    assert len(pairs) > len(ROWS)
    assert [pair for pair in pairs if told(pair[0])[1] <= told(pair[1])[1]] == []


def table() -> str:
    """Return the table of the documentation, from the data and the estimates."""
    lines = [
        "| strategy | checkpointing | micro-batch | peak GiB | plan | samples/s | plan |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        gib, samples = told(row)
        is_on = "on" if row["grad_ckpt"] else "off"
        measured = f"{row['peak_gib']} | {gib:.1f} | {row['samples_s']} | {samples:.2f}"
        lines.append(f"| {row['strategy']} | {is_on} | {row['micro_batch']} | {measured} |")
    return "\n".join(lines)


def test_the_documentation_shows_the_table() -> None:
    assert table() in DOC.read_text(encoding="utf-8"), table()
