"""Build sbatch's command, and parse its output."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clusterrun.backends.base import Submission
from clusterrun.errors import SubmissionError, UsageError
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.job_id import JobId

SBATCH_TIMEOUT_S = 60.0
CHAINED = "chained"  # second argument of the script: a job that waits for the one before it

_PARSABLE = re.compile(r"([0-9]+)(?:;(\S+))?\Z")


class NoJobIdError(SubmissionError):
    """sbatch printed more than a job id, or none; `candidates` may be the job."""

    def __init__(self, printed: str, candidates: tuple[Submission, ...]) -> None:
        what = "more than a job id" if candidates else "no job id"
        super().__init__(f"sbatch printed {what}", cause=printed or None)
        self.candidates = candidates


def command(
    plan: Plan, paths: RunPaths, *, options: Sequence[str], words: Sequence[str]
) -> list[str]:
    """Return the command that submits a run's script, which does not name the run directory.

    `options` are additional options of sbatch, `words` additional arguments of the script.
    Raises UsageError for a directory that sbatch can't name.
    """
    if "\\" in str(paths.root):
        raise UsageError(
            f"the run directory {paths.root} has a backslash in its name",
            hint="choose another directory with --run-dir: sbatch can't write to this one",
        )
    output = str(paths.batch_output).replace("%", "%%")
    return [
        *("sbatch", "--parsable", f"--output={output}", f"--chdir={plan.workdir}", *options),
        *(str(paths.script), str(paths.root), *words),
    ]


def parse_submission(stdout: str) -> Submission:
    """Parse what `sbatch --parsable` printed.

    >>> parse_submission("53;tuxA")
    Submission(job_id='53', slurm_cluster='tuxA', held=None)

    Raises NoJobIdError for anything else: a site's wrapper may print other numbers.
    """
    lines = [line.strip() for line in stdout.splitlines() if line.strip()]
    matches = [match for line in lines if (match := _PARSABLE.match(line))]
    found = tuple(Submission(job_id=JobId(match[1]), slurm_cluster=match[2]) for match in matches)
    if len(found) != 1 or len(lines) != 1:
        raise NoJobIdError(stdout.strip(), found)
    return found[0]
