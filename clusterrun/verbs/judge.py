"""Print the verdict on an attempt as JSON, for the rule book.

`python -m clusterrun.verbs.judge RUN_DIR` reads the outcome of the attempt from standard input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Final

from clusterrun.diagnosis.scan import Scanner
from clusterrun.diagnosis.table import built_in
from clusterrun.diagnosis.weigh import Verdict
from clusterrun.rundir.outcome import Outcome
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import read
from clusterrun.rundir.verdict import ShortVerdict
from clusterrun.verbs.diagnose import diagnose_attempt

MOST: Final = 64  # ranks; nodes are all named: many faulty ones are no fault of theirs
_LETTERS: Final = 300


def prepare() -> None:
    """Parse the table of causes: a fork of this process then judges at once."""
    Scanner(table=built_in())


def judge(run_dir: Path, outcome: Outcome) -> ShortVerdict | None:
    """Diagnose an attempt by what its agents and logs report."""
    record = read(RunPaths(root=run_dir))
    with contextlib.suppress(OSError):
        os.chdir(record.workdir)  # the project's causes.yaml
    found = diagnose_attempt(record, outcome.attempt, outcome).verdict
    return short(found) if found else None


def judged(run_dir: Path, outcome: Outcome) -> str:
    """Return the verdict as JSON."""
    verdict = judge(run_dir, outcome)
    return json.dumps(dataclasses.asdict(verdict) if verdict else None)


def short(verdict: Verdict) -> ShortVerdict:
    """Return what `outcome.json` keeps of a verdict."""
    cause, first = verdict.cause, verdict.first
    return ShortVerdict(
        cause=cause.id,
        means=cause.means,
        status=verdict.status,
        retry=verdict.retry,
        text=first.line.text.strip()[:_LETTERS],
        ranks=verdict.ranks[:MOST],
        nodes=verdict.nodes,
        blames_node=cause.blames_node,
        generic=cause.generic,
        steps=first.steps,
    )


if __name__ == "__main__":
    sys.stdout.write(judged(Path(sys.argv[1]), Outcome.from_json(sys.stdin.read())))
