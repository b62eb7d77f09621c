"""The command by which a run's script goes to Slurm, and what sbatch answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from clusterrun.backends.base import Submission
from clusterrun.backends.slurm import refusal
from clusterrun.errors import SubmissionError, UsageError
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import shell

SBATCH_TIMEOUT_S = 60.0
CHAINED = "chained"  # second argument of the script: a job that waits for the one before it

_PARSABLE = re.compile(r"([0-9]+)(?:;(\S+))?\Z")


class NoJobIdError(SubmissionError):
    """A submission that did not print its job id alone; `candidates` are what may be one."""

    def __init__(self, printed: str, candidates: tuple[Submission, ...]) -> None:
        what = "more than a job id" if candidates else "no job id"
        super().__init__(f"sbatch printed {what}", cause=printed or None)
        self.candidates = candidates


def command(
    plan: Plan,
    paths: RunPaths,
    script: str,
    *,
    options: Sequence[str] = (),
    words: Sequence[str] = (),
) -> list[str]:
    """Say how to submit the script of a run: what differs per run is on the command line.

    `options` are further options of sbatch, `words` further arguments of the script.
    Raises UsageError for a directory that sbatch can't name.
    """
    if "\\" in str(paths.root):
        raise UsageError(
            f"the run directory {paths.root} has a backslash in its name",
            hint="sbatch --output can't name it; choose another place with --run-dir",
        )
    output = str(paths.batch_output).replace("%", "%%")
    return [
        *("sbatch", "--parsable", f"--output={output}", f"--chdir={plan.workdir}", *options),
        *(script, str(paths.root), *words),
    ]


def run(argv: Sequence[str], plan: Plan, environ: Mapping[str, str]) -> Submission:
    """Run sbatch, once: it may have submitted what it did not answer for.

    Raises SubmissionError with its own words, SchedulerUnreachableError where it is silent.
    """
    done = shell.run(argv, env=environ, timeout_s=SBATCH_TIMEOUT_S, tries=1)
    if done.rc != 0:
        raise refusal.explained(done, plan)
    return parse_submission(done.stdout)


def parse_submission(stdout: str) -> Submission:
    """Read what `sbatch --parsable` printed.

    >>> parse_submission("53;tuxA")
    Submission(job_id='53', slurm_cluster='tuxA', held=None)

    Raises NoJobIdError for anything else: a site's wrapper may print numbers of its own.
    """
    lines = [line.strip() for line in stdout.splitlines() if line.strip()]
    matches = [match for line in lines if (match := _PARSABLE.match(line))]
    found = tuple(Submission(job_id=match[1], slurm_cluster=match[2]) for match in matches)
    if len(found) != 1 or len(lines) != 1:
        raise NoJobIdError(stdout.strip(), found)
    return found[0]
