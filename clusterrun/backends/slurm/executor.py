"""Run sbatch through submitit's executor; to import submitit takes about 70 ms."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from submitit.core import utils
from submitit.slurm.slurm import SlurmExecutor

from clusterrun.backends.base import Submission
from clusterrun.backends.slurm import backend
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import shell

# What sbatch prints if it never reached slurmctld; after any other timeout the job may be queued.
NEVER_REACHED = ("Unable to contact slurm controller", *shell.PERMANENT_FAULTS)


def submit(
    argv: Sequence[str], plan: Plan, paths: RunPaths, environ: Mapping[str, str]
) -> Submission:
    """Run sbatch, once: even without an answer it may have submitted the job.

    Raises SubmissionError with its message, SchedulerUnreachableError if it never got an answer,
    NoJobIdError.
    """
    sbatch = Sbatch(argv, plan, environ)
    with TemporaryDirectory(dir=paths.root, ignore_cleanup_errors=True) as folder:
        try:
            RunExecutor(folder, sbatch)._submit_command("")  # calls `sbatch.run()`
        except OSError:  # once sbatch has printed, only submitit's copy of the script can fail
            if not sbatch.printed:
                raise
    return backend.parse_submission(sbatch.printed)


class Sbatch(list[str]):
    """The command that submits a run; `printed` is its output."""

    printed = ""

    def __init__(self, argv: Sequence[str], plan: Plan, environ: Mapping[str, str]) -> None:
        super().__init__(argv)
        self._plan, self._environ = plan, environ

    def run(self) -> str:
        """Run sbatch and return its output. Raises what `submit` raises."""
        begin = time.monotonic()
        done = shell.run_once(self, backend.SBATCH_TIMEOUT_S, self._environ)
        if cause := shell.why_no_answer(done):
            if any(words in cause for words in NEVER_REACHED):
                raise shell.unreachable_error(self[0], done, time.monotonic() - begin)
            raise backend.NoJobIdError("sbatch got no answer", cause=cause)
        if done.rc:
            from clusterrun.backends.slurm import site  # slow to import

            raise site.refused(done, self._plan)
        self.printed = done.stdout.strip()
        return self.printed


# submitit starts sbatch in the shell's environment, session and stdin, waits for it without a
# deadline, fails on output that is not UTF-8, prints sbatch's message, and after Ctrl-C leaves
# sbatch running. So an Sbatch runs itself; any other command is run as before.
_call = utils.CommandFunction.__call__


def _run(command: Any, *args: Any, **kwargs: Any) -> Any:
    own = command.command
    return own.run() if isinstance(own, Sbatch) else _call(command, *args, **kwargs)


utils.CommandFunction.__call__ = _run


class RunExecutor(SlurmExecutor):  # type: ignore[misc]  # submitit is not followed
    """submitit's executor, for the script of a run: no function is pickled."""

    def __init__(self, folder: str, sbatch: Sbatch) -> None:
        super().__init__(folder)
        self._sbatch = sbatch

    @classmethod
    def affinity(cls) -> int:
        """Return that it can be used: a node may have sbatch without srun."""
        return 2

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return ""  # of a copy of the script, which nothing reads

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # It names the run's own script: by its path, a job is found whose id was not printed.
        return self._sbatch

    @staticmethod
    def _get_job_id_from_submission_command(string: str) -> str:
        return backend.parse_submission(string).job_id  # a job that it does not name is never made
