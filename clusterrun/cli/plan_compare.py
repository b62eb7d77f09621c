"""`plan --compare JOB`: compare the estimate of a run with its measurements."""

from __future__ import annotations

from typing import NamedTuple

from clusterrun.advice.measured import Measured, measure
from clusterrun.advice.question import question_of
from clusterrun.cli import plan_json
from clusterrun.cli.plan_numbers import gib, gigabytes
from clusterrun.cli.shared import output
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.estimates.disk import checkpoint_bytes
from clusterrun.estimates.estimate import Estimate, estimate, unknown_speed, usual_speedup
from clusterrun.estimates.inputs import total
from clusterrun.estimates.memory import CONTEXT
from clusterrun.shared.wording import count
from clusterrun.verbs.changes import configuration
from clusterrun.verbs.find import find_record


class Pair(NamedTuple):
    """One quantity, estimated and measured; None if one of them is not known."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Return measured / predicted."""
        if not self.predicted or self.measured is None:
            return None
        return self.measured / self.predicted


def compare(job: str | None, *, as_json: bool) -> None:
    """Compare a run with the estimate from its own configuration; None is the newest run.

    Raises ClusterrunError for a run that has reported nothing yet.
    """
    record = find_record(job)
    try:
        answer = estimate(question_of(configuration(record)))
    except UsageError as error:
        raise ClusterrunError(
            f"job {record.job_id} has no estimate: {error.message}",
            hint="describe the training under training: in clusterrun.yaml, and submit again",
        ) from error
    pairs = _pairs(answer, found := measure(record.paths))
    if all(pair.measured is None for pair in pairs):
        raise ClusterrunError(
            f"job {record.job_id} has no measurements yet",
            hint="call clusterrun.runtime.step in the script to measure steps; memory is measured "
            "when the ranks end",
        )
    pairs += _scaling(answer)
    if as_json:
        output.answer_json(_object(record.job_id, answer, pairs))
        return
    rows = [_cells(pair) for pair in pairs if pair.measured is not None]
    output.answer_table(("WHAT", "ESTIMATED", "MEASURED", "RATIO"), rows)
    if answer.time is None and found.step_s is not None:
        output.note(f"the step time is not estimated: {unknown_speed(answer.question)}")
    if found.step_s is not None:
        output.note(f"pass --step-time {found.step_s:.4g}s to plan with the measured time")
    if (speedup := answer.speedup) is not None and speedup.measured_at:
        when = speedup.measured_at[:10]
        base = count(speedup.base, "rank")
        output.note(f"the speed-up is relative to {base}, measured by clusterrun scaling on {when}")


def _pairs(answer: Estimate, found: Measured) -> list[Pair]:
    return [
        Pair("step time", "s", answer.time.step.mid_s if answer.time else None, found.step_s),
        Pair("steps", "", answer.steps.total, found.steps),
        Pair("allocated per GPU", "GiB", _allocated(answer), found.gpu_bytes),
        Pair("host memory", "GiB", answer.host_memory.total_bytes, found.host_bytes),
        Pair("checkpoint", "B", checkpoint_bytes(answer.question.setup), found.checkpoint_bytes),
    ]


def _scaling(answer: Estimate) -> list[Pair]:
    """Return what `clusterrun scaling` measured for a world of this size, if it did."""
    found, world = answer.speedup, answer.question.setup.world
    if found is None or not found.measured_at:
        return []
    usual = usual_speedup(answer.question) if found.base == 1 else None
    told = (usual.low + usual.high) / 2 if usual else None
    return [
        Pair("speed-up", "times", told, found.low),
        Pair("efficiency", "times", told and told / world, found.low * found.base / world),
    ]


def _allocated(answer: Estimate) -> int | None:
    """Return the estimate of what ranks report, torch's allocator: no margin, no context."""
    if answer.gpu_memory is None:
        return None
    return total(term for term in answer.gpu_memory.terms if term.name != CONTEXT)


def _cells(pair: Pair) -> tuple[str, ...]:
    ratio = f"{pair.ratio:.2f}" if pair.ratio is not None else "-"
    return (pair.name, _text(pair.predicted, pair.unit), _text(pair.measured, pair.unit), ratio)


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "unknown"
    if unit == "GiB":
        return f"{gib(value)} GiB"
    if unit == "B":
        return gigabytes(value)
    if unit == "times":
        return f"{value:.3g}"
    return f"{value:.4g} s" if unit == "s" else f"{value:,.0f}"


def _object(job_id: str, answer: Estimate, pairs: list[Pair]) -> dict[str, object]:
    rows = {
        pair.name: {"predicted": pair.predicted, "measured": pair.measured, "ratio": pair.ratio}
        for pair in pairs
    }
    return {**plan_json.of(answer), "job_id": job_id, "compared": rows}
