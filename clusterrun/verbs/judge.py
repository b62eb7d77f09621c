"""Print the verdict on an attempt as JSON, for the rule book.

`python -m clusterrun.verbs.judge RUN_DIR` reads the outcome of the attempt from standard input.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Final

from clusterrun.diagnosis.scan import Scanner
from clusterrun.diagnosis.table import built_in
from clusterrun.rundir.outcome import Outcome, ShortVerdict
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import read
from clusterrun.verbs.diagnose import Diagnosis, diagnose_attempt, place_of
from clusterrun.verbs.evidence import AGENTS

MOST: Final = 64  # ranks; nodes are all named: many faulty ones are no fault of theirs
_LETTERS: Final = 300


def prepare() -> None:
    """Parse the table of causes: a fork of this process then judges at once."""
    Scanner(table=built_in())


def judged(run_dir: Path, outcome: Outcome) -> str:
    """Diagnose an attempt by what its agents and logs report; return the verdict as JSON."""
    record = read(RunPaths(root=run_dir))
    verdict = short(diagnose_attempt(record, outcome.attempt, outcome), most=MOST)
    return json.dumps(dataclasses.asdict(verdict) if verdict else None)


def short(
    found: Diagnosis, *, most: int | None = None, is_of_job: bool = True
) -> ShortVerdict | None:
    """Return what `outcome.json` keeps of a verdict, with `most` ranks at most."""
    if (verdict := found.verdict) is None:
        return None
    cause, first = verdict.cause, verdict.first
    failed = {rank for each in verdict.consequences for rank in each.ranks}
    text, *more = (each.line.text.strip()[:_LETTERS] for each in verdict.evidence)
    limits = (found.memory[node].limit for node in verdict.nodes if node in found.memory)
    return ShortVerdict(
        cause=cause.id,
        means=cause.means,
        status=verdict.status,
        retry=verdict.retry,
        text=text,
        ranks=verdict.ranks[:most],
        nodes=verdict.nodes,
        blames_node=cause.blames_node,
        generic=cause.generic,
        steps=first.steps,
        advice=cause.do,
        place=place_of(first.line, is_of_job=is_of_job),
        frame=verdict.frame,
        more=tuple(more),
        is_reported=first.line.source == AGENTS,
        victims=len(failed.difference(verdict.ranks)),
        allowed=min((limit for limit in limits if limit), default=None),
    )


if __name__ == "__main__":
    sys.stdout.write(judged(Path(sys.argv[1]), Outcome.from_json(sys.stdin.read())))
