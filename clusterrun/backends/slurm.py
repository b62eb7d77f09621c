"""Run jobs on Slurm: submit through submitit with our own script, cancel, ask."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterrun import shell
from clusterrun.backends import cache, sbatch, slurm_query
from clusterrun.backends.base import PerhapsSubmittedError, SchedulerJob, Submission
from clusterrun.backends.environment import scrubbed
from clusterrun.backends.layout import remove_run
from clusterrun.errors import (
    ClusterrunError,
    JobNotFoundError,
    SchedulerUnreachableError,
    SubmissionError,
)
from clusterrun.paths import RunPaths
from clusterrun.planning.plan import Plan
from clusterrun.state import JobState

if TYPE_CHECKING:
    from submitit import SlurmExecutor, SlurmJob

    from clusterrun.record import JobRecord
    from clusterrun.rendering.bundle import Bundle

LOOK_AGAIN_S = 3.0
# A job that starts in the second in which its last run was killed fails: the nodes' daemons take
# its credential for that run's ("Job credential revoked").
SOON = "now+2"
# What sbatch says when it never reached slurmctld; any other silence may have queued the job.
NEVER_REACHED = ("Unable to contact slurm controller", *shell.LASTING)


@dataclass(frozen=True, kw_only=True)
class SlurmBackend:
    """One Slurm cluster: the one that slurm.conf names, or another by its name."""

    slurm_cluster: str | None = None
    keep_sbatch_env: bool = False

    def submit(self, plan: Plan, paths: RunPaths, bundle: Bundle) -> Submission:
        """Hand the run's script to sbatch, once.

        A refused run's directory is removed. Raises SubmissionError with sbatch's own words,
        SchedulerUnreachableError when it is not known whether the job is queued.
        """
        try:
            executor = _executor_class()(plan, paths, bundle, self._environ(plan))
            job = executor._submit_command("")
        except SchedulerUnreachableError as error:
            if _never_reached(error):
                remove_run(paths)
                raise
            return self._perhaps_submitted(paths, "sbatch got no answer", error)
        except sbatch.NoJobIdError as error:  # sbatch took the job, whatever it printed
            return self._perhaps_submitted(paths, error.message, error)
        except RuntimeError as error:  # submitit found no srun
            remove_run(paths)
            raise SubmissionError(
                "this is no Slurm cluster", cause=str(error), hint="use --cluster local"
            ) from error
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self._withdraw(paths)
            remove_run(paths)
            raise
        return Submission(job_id=str(job.job_id), slurm_cluster=executor.slurm_cluster)

    def submit_again(
        self,
        plan: Plan,
        record: JobRecord,
        *,
        after: str = "",
        exclude: str = "",
        chained: bool = False,
        waits: bool = False,
    ) -> Submission:
        """Hand the script of a run that has its directory to sbatch once more."""
        told = {line.name for line in plan.directives}
        options = [f"--exclude={exclude}"] if exclude else []
        if after:
            options.append(f"--dependency=afterany:{after}")
        if not waits:
            options += ["--dependency="] if "dependency" in told and not after else []
            options += ["--begin=now"] if "begin" in told else []
        words = [sbatch.CHAINED] if chained else []
        script = str(record.paths.script)
        argv = sbatch.command(plan, record.paths, script, options=options, words=words)
        submission = self._submit_once(argv, plan, record)
        if "hold" in told and not waits:  # sbatch has no option that takes it back
            self._scontrol("release", submission.job_id)
        return submission

    def _submit_once(self, argv: Sequence[str], plan: Plan, record: JobRecord) -> Submission:
        try:
            return sbatch.run(argv, plan, self._environ(plan))
        except SchedulerUnreachableError as error:
            if _never_reached(error):
                raise
            return self._perhaps_submitted(
                record.paths, "sbatch got no answer", error, record.job_ids
            )
        except sbatch.NoJobIdError as error:
            return self._perhaps_submitted(record.paths, error.message, error, record.job_ids)
        except KeyboardInterrupt:
            self._withdraw(record.paths, record.job_ids)
            raise

    def query(
        self, job_ids: Sequence[str], *, since: float | None = None, max_age_s: float | None = None
    ) -> dict[str, SchedulerJob]:
        """Ask squeue, then sacct, then scontrol for what is still missing.

        An answer that any process of this user got in the last 10 s serves; one about a job that
        ended a while ago serves for long.
        Raises SchedulerUnreachableError.
        """
        cluster = self.slurm_cluster or ""
        age_s = cache.TTL_S if max_age_s is None else max_age_s
        known = cache.recall_ended(cluster, job_ids, since or 0.0) if age_s > 0 else {}
        ids = sorted(set(job_ids) - known.keys())
        if not ids:
            return known
        answer = cache.through(
            (cluster, *ids),
            age_s,
            lambda: slurm_query.ask(ids, slurm_cluster=self.slurm_cluster, since=since),
        )
        cache.remember_ended(cluster, answer)
        return known | answer

    def cancel(self, job_ids: Sequence[str]) -> None:
        """End jobs with one scancel.

        Raises JobNotFoundError for jobs that Slurm doesn't know: scancel is silent about them.
        """
        argv = ["scancel", *slurm_query.cluster_option(self.slurm_cluster), *job_ids]
        done = shell.run(argv, env=slurm_query.environment())
        known = self.query(job_ids, max_age_s=0)
        if done.rc != 0 and "Invalid job id" not in done.stderr:
            raise ClusterrunError("scancel failed", cause=done.stderr.strip())
        unknown = [job_id for job_id in job_ids if not slurm_query.is_known(known.get(job_id))]
        if unknown:
            raise JobNotFoundError(f"Slurm knows no job {', '.join(unknown)}")

    def interrupt(self, job_id: str) -> None:
        """Signal the agents, which are the tasks of the job's steps."""
        cluster = slurm_query.cluster_option(self.slurm_cluster)
        argv = ["scancel", *cluster, "--signal=USR2", job_id]
        done = shell.run(argv, env=slurm_query.environment())
        if done.rc != 0:
            raise ClusterrunError(f"cannot signal job {job_id}", cause=done.stderr.strip())

    def release(self, job_id: str) -> bool:
        """Have a job that was requeued, not one that the user wants later, start at once."""
        job = slurm_query.ask_scontrol([job_id], self.slurm_cluster).get(job_id)
        if job is None or job.state is not JobState.PENDING or not job.restarts:
            return False
        self.update(job_id, f"StartTime={SOON}")
        return True

    def update(self, job_id: str, setting: str) -> None:
        """Change a job that waits, as `scontrol update` words it. Raises ClusterrunError."""
        self._scontrol("update", f"JobId={job_id}", setting)

    def _scontrol(self, *words: str) -> None:
        argv = ["scontrol", *slurm_query.cluster_option(self.slurm_cluster), *words]
        done = shell.run(argv, env=slurm_query.environment())
        if done.rc != 0:
            cause = done.stderr.strip()
            raise ClusterrunError(f"scontrol {' '.join(words)} failed", cause=cause)

    def _environ(self, plan: Plan) -> dict[str, str]:
        return scrubbed(os.environ, keep=plan.pass_env, keep_sbatch=self.keep_sbatch_env)

    def _perhaps_submitted(
        self, paths: RunPaths, what: str, error: ClusterrunError, known: Collection[str] = ()
    ) -> Submission:
        """Find out what became of a submission that told no job id; never submit twice.

        slurmctld may take a job whose sbatch has given up.
        """
        for pause_s in (0.0, LOOK_AGAIN_S):
            time.sleep(pause_s)
            try:
                job_id = slurm_query.find_by_command(
                    str(paths.root), self.slurm_cluster, known=known
                )
            except SchedulerUnreachableError:
                break
            if job_id is not None:
                return Submission(job_id=job_id, slurm_cluster=self.slurm_cluster)
        raise PerhapsSubmittedError(
            f"{what}; the job may be in the queue or not",
            cause=error.cause,
            hint=(
                "look for it with 'squeue --me' before you submit again",
                f"its run directory was kept: {paths.root}",
            ),
        ) from error

    def _withdraw(self, paths: RunPaths, known: Collection[str] = ()) -> None:
        """End the job of a submission that the user interrupted, if it was queued even so."""
        with contextlib.suppress(ClusterrunError):
            job_id = slurm_query.find_by_command(str(paths.root), self.slurm_cluster, known=known)
            if job_id is not None:
                self.cancel([job_id])


def _never_reached(error: SchedulerUnreachableError) -> bool:
    was_started = not isinstance(error.__cause__, OSError)
    return not was_started or any(words in (error.cause or "") for words in NEVER_REACHED)


def _executor_class() -> type[SlurmExecutor]:
    """Make submitit's executor send our script, byte for byte, in an environment of our choice.

    `_submit_command` is our own as well: submitit's writes the script in the locale's encoding,
    runs sbatch in the shell's environment, without a time limit, and prints what it says.
    """
    from submitit import SlurmExecutor

    class ScriptExecutor(SlurmExecutor):  # type: ignore[misc]  # submitit is not followed
        slurm_cluster: str | None = None

        def __init__(
            self, plan: Plan, paths: RunPaths, bundle: Bundle, environ: Mapping[str, str]
        ) -> None:
            super().__init__(folder=paths.slurm_dir, python=shlex.quote(plan.python))
            self.update_parameters(nodes=plan.nodes, ntasks_per_node=1)
            self._plan, self._run_paths = plan, paths
            self._bundle, self._environ = bundle, environ

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            del command, uid
            return str(self._bundle.files[self._run_paths.script.name])

        def _make_submission_command(self, submission_file_path: object) -> list[str]:
            return sbatch.command(self._plan, self._run_paths, str(submission_file_path))

        def _submit_command(self, command: str) -> SlurmJob[Any]:
            del command
            argv = self._make_submission_command(self._run_paths.script)
            submission = sbatch.run(argv, self._plan, self._environ)
            self.slurm_cluster = submission.slurm_cluster
            return self.job_class(
                folder=self.folder, job_id=submission.job_id, tasks=list(range(self._num_tasks()))
            )

        @staticmethod
        def _get_job_id_from_submission_command(string: bytes | str) -> str:
            text = string if isinstance(string, str) else string.decode()
            return sbatch.parse_submission(text).job_id

    return ScriptExecutor
