"""Submit through submitit: its executors check the site and run our command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from clusterrun.backends.base import Submission
from clusterrun.errors import SubmissionError
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths


def submit(
    name: Literal["SlurmExecutor", "LocalExecutor"],
    plan: Plan,
    paths: RunPaths,
    send: Callable[[], Submission],
) -> Submission:
    """Call `send` from an executor of submitit, in place of submitit's own command.

    That command writes a script in the locale's encoding, runs sbatch in the shell's environment
    without a time limit, and prints its output.
    Raises SubmissionError if srun is missing.
    """
    import submitit

    base: Any = getattr(submitit, name)

    class ScriptExecutor(base):  # type: ignore[misc]  # submitit is not followed
        submission: Submission  # with the cluster, which submitit's job lacks

        def _submit_command(self, command: str) -> Any:
            self.submission = send()
            tasks = list(range(plan.nodes))
            return self.job_class(folder=self.folder, job_id=self.submission.job_id, tasks=tasks)

    try:
        executor = ScriptExecutor(folder=paths.slurm_dir)
    except RuntimeError as error:
        raise SubmissionError(
            "this is not a Slurm cluster", cause=str(error), hint="run here with --cluster local"
        ) from error
    executor._submit_command("")
    return executor.submission
