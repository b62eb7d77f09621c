"""Run sbatch through submitit's executor; to import submitit takes about 70 ms."""

from __future__ import annotations

import io
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from submitit.core import utils
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from clusterrun.backends.base import Submission
from clusterrun.backends.slurm import backend
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import shell

# What sbatch prints if it never reached slurmctld; after any other timeout the job may be queued.
NEVER_REACHED = ("Unable to contact slurm controller", *shell.LASTING)


def submit(
    argv: Sequence[str], plan: Plan, paths: RunPaths, environ: Mapping[str, str]
) -> Submission:
    """Run sbatch, once: even without an answer it may have submitted the job.

    Raises SubmissionError with its message, SchedulerUnreachableError if it never got an answer,
    NoJobIdError.
    """
    begin = time.monotonic()
    try:
        with TemporaryDirectory(dir=paths.root, ignore_cleanup_errors=True) as folder:
            executor = RunExecutor(folder, argv, paths.script, environ)
            job = executor._submit_command("")
    except utils.FailedJobError as error:
        from clusterrun.backends.slurm import site  # slow to import

        if cause := shell.silence(executor.done):
            if not any(words in cause for words in NEVER_REACHED):
                raise backend.NoJobIdError("sbatch got no answer", cause=cause) from error
            elapsed_s = time.monotonic() - begin
            raise shell.unreachable(argv[0], executor.done, elapsed_s) from error
        raise site.refused(executor.done, plan) from error
    return Submission(job_id=job.job_id, slurm_cluster=job.slurm_cluster)


class _Files(utils.JobPaths):  # type: ignore[misc]  # submitit is not followed
    def move_temporary_file(self, *_: Any, **__: Any) -> None:
        """Keep no copy of the script: a full disk must not fail a job that is in the queue."""


class SubmittedJob(SlurmJob):  # type: ignore[misc]  # submitit is not followed
    """submitit's job, with the Slurm cluster that sbatch printed after its id."""

    def __init__(self, folder: Path, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        found = backend.parse_submission(job_id)
        super().__init__(folder, found.job_id, tasks)
        self._paths = _Files(folder, found.job_id)
        self.slurm_cluster = found.slurm_cluster


class RunExecutor(SlurmExecutor):  # type: ignore[misc]  # submitit is not followed
    """submitit's executor, for the script of a run: no function is pickled."""

    job_class = SubmittedJob

    def __init__(
        self, folder: str, argv: Sequence[str], script: Path, environ: Mapping[str, str]
    ) -> None:
        super().__init__(folder)
        self._argv, self._script, self.environ = argv, script, environ
        self.done = shell.Completed(rc=shell.TIMED_OUT, stdout="", stderr="")

    @classmethod
    def affinity(cls) -> int:
        """Return that it can be used: a node may have sbatch without srun."""
        return 2

    def _submit_command(self, command: str) -> SubmittedJob:
        token = _SUBMITTING.set(self)
        try:
            return super()._submit_command(command)  # type: ignore[no-any-return]
        finally:
            _SUBMITTING.reset(token)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        # In ASCII, since submitit writes its copy in the encoding of the locale.
        return self._script.read_text("ascii", errors="backslashreplace")

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # It names the run's own script: by its path, a job is found whose id was not printed.
        return list(self._argv)

    @staticmethod
    def _get_job_id_from_submission_command(string: str) -> str:
        found = backend.parse_submission(string)  # a job that it does not name is never made
        return ";".join(filter(None, (found.job_id, found.slurm_cluster)))


# submitit starts sbatch in the shell's environment, session and stdin, waits for it without a
# deadline, fails on output that is not UTF-8, prints sbatch's message, and after Ctrl-C leaves
# sbatch running. So these two steps are ours while a RunExecutor submits, and only then.
_SUBMITTING: ContextVar[RunExecutor | None] = ContextVar("_SUBMITTING", default=None)
_copy_process_streams = utils.copy_process_streams


class _Popen(subprocess.Popen[bytes]):
    def __init__(self, argv: Any, **kwargs: Any) -> None:
        executor = _SUBMITTING.get()
        if executor is None:
            super().__init__(argv, **kwargs)
            return
        own = {"env": dict(executor.environ), "stdin": subprocess.DEVNULL}
        try:
            super().__init__(argv, **{**kwargs, **own, "start_new_session": True})
        except OSError as error:
            raise shell.cannot_start(argv[0], error) from error


def _collect(process: subprocess.Popen[bytes], stdout: io.StringIO, *others: Any) -> None:
    executor = _SUBMITTING.get()
    if executor is None:
        _copy_process_streams(process, stdout, *others)
    else:
        executor.done = shell.collect(process, backend.SBATCH_TIMEOUT_S)
        process.returncode = executor.done.rc  # do not wait for a process that the kernel blocks
        stdout.write(executor.done.stdout)


utils.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _Popen})
utils.copy_process_streams = _collect
