"""Run jobs on Slurm: submit, query and cancel."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterrun.backends.base import PerhapsSubmittedError, SchedulerJob, Submission, Where
from clusterrun.backends.environment import scrubbed
from clusterrun.backends.slurm import query as slurm_query
from clusterrun.backends.slurm.query import find_by_command
from clusterrun.errors import (
    ClusterrunError,
    JobNotFoundError,
    SchedulerUnreachableError,
    SubmissionError,
    UsageError,
)
from clusterrun.launch.plan import Plan
from clusterrun.rundir import record as records
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord
from clusterrun.shared import shell
from clusterrun.shared.hostlist import fold_hosts, parse_hostlist
from clusterrun.shared.state import JobId

SBATCH_TIMEOUT_S = 60.0
CHAINED = "chained"  # second argument of the script: a job that waits for the one before it
LOOK_AGAIN_S = 3.0


class NoJobIdError(SubmissionError):
    """sbatch was started, and may have submitted the job, but printed no plain job id."""


@dataclass(frozen=True, kw_only=True)
class SlurmBackend:
    """One Slurm cluster: that of slurm.conf, or another by its name."""

    slurm_cluster: str | None = None

    def submit(self, plan: Plan, paths: RunPaths) -> Submission:
        """Pass the run's script to sbatch, once.

        Raises SubmissionError with sbatch's message or without srun, SchedulerUnreachableError
        (PerhapsSubmittedError if the job may be in the queue).
        """
        if shell.find("srun") is None:
            text = "this is not a Slurm cluster: srun was not found"
            raise SubmissionError(text, hint="run here with --cluster local")
        return self._sbatch(plan, paths)

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
        """Pass a run's script to sbatch again; the start conditions apply only if it `waits`."""
        planned = {line.name for line in plan.directives}  # sbatch's options in the script
        options = [f"--exclude={exclude}"] if exclude else []
        if after:
            options.append(f"--dependency=afterany:{after}")
        elif "dependency" in planned and not waits:
            options.append("--dependency=")  # undo the script's option, as below
        if "begin" in planned and not waits:
            options.append("--begin=now")
        arguments = [CHAINED] if chained else []  # of the script, for a later job of a chain
        # Unlike `submit`, do not look for srun, which a node may lack.
        new = self._sbatch(plan, record.paths, options, arguments, known=record.job_ids)
        if "hold" in planned and not waits:  # no option of sbatch undoes --hold
            cluster = SlurmBackend(slurm_cluster=new.slurm_cluster or self.slurm_cluster)
            try:
                with contextlib.suppress(ClusterrunError):  # `status` says how to release it
                    cluster.scontrol("release", new.job_id)
            except KeyboardInterrupt:
                cluster._withdraw(record.paths, record.job_ids)
                raise
        return new

    def _sbatch(
        self,
        plan: Plan,
        paths: RunPaths,
        options: Sequence[str] = (),
        arguments: Sequence[str] = (),
        known: Collection[str] = (),
    ) -> Submission:
        """Run sbatch, once; cancel the job if the submission is interrupted.

        `options` are sbatch's, in addition to those in the script; `arguments` are the script's,
        after the run directory. `known` are the jobs that the run had before.
        Raises PerhapsSubmittedError if it is unknown whether the job is in the queue, and
        UsageError for a directory that sbatch can't name.
        """
        from clusterrun.backends.slurm import executor  # imports submitit, for this alone

        if "\\" in str(paths.root):
            text = f"the run directory {paths.root} has a backslash in its name"
            hint = "choose another directory with --run-dir: sbatch can't write to this one"
            raise UsageError(text, hint=hint)
        output = str(paths.batch_output).replace("%", "%%")
        argv = [
            *("sbatch", "--parsable", f"--output={output}", f"--chdir={plan.workdir}", *options),
            *(str(paths.script), str(paths.root), *arguments),
        ]
        environ = scrubbed(os.environ, keep=plan.pass_env)
        cluster = SlurmBackend(slurm_cluster=self.slurm_cluster or plan.directive("clusters"))
        try:
            try:
                return executor.submit(argv, plan, paths, environ)
            except NoJobIdError as error:
                return cluster._find_submitted(paths, known, error)
        except KeyboardInterrupt:
            cluster._withdraw(paths, known)
            raise

    def query(
        self, job_ids: Sequence[str], *, since: float | None = None, max_age_s: float | None = None
    ) -> dict[str, SchedulerJob]:
        """Query squeue, then sacct, then scontrol for what is still missing.

        By default reuse an answer that any process of this user got in the last 10 s.
        Raises SchedulerUnreachableError.
        """
        ids = sorted(set(job_ids))
        if not ids:
            return {}
        return slurm_query.cached(
            (self.slurm_cluster or "", *ids),
            slurm_query.TTL_S if max_age_s is None else max_age_s,
            lambda: slurm_query.ask(ids, slurm_cluster=self.slurm_cluster, since=since),
        )

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs with one scancel. Raises JobNotFoundError for jobs unknown to Slurm."""
        done = slurm_query.call(self.slurm_cluster, "scancel", *job_ids)
        slurm_query.forget()
        # scancel does not report unknown jobs; what is returned for one has no `source`.
        known = {job_id for job_id, job in self.query(job_ids, max_age_s=0).items() if job.source}
        if done.rc != 0 and "Invalid job id" not in done.stderr:
            raise ClusterrunError("scancel failed", cause=done.stderr.strip())
        if unknown := [job_id for job_id in job_ids if job_id not in known]:
            raise JobNotFoundError(f"Slurm does not know job {', '.join(unknown)}")

    def scontrol(self, *words: str) -> None:
        """Run scontrol. Raises ClusterrunError if Slurm refuses."""
        done = slurm_query.call(self.slurm_cluster, "scontrol", *words)
        if done.rc != 0:
            raise ClusterrunError(f"scontrol {' '.join(words)} failed", cause=done.stderr.strip())

    def _find_submitted(
        self, paths: RunPaths, known: Collection[str], error: NoJobIdError
    ) -> Submission:
        """Find a job whose id sbatch did not print; slurmctld may accept it after sbatch ended."""
        for pause_s in (0.0, LOOK_AGAIN_S):
            time.sleep(pause_s)
            try:
                job_id = find_by_command(str(paths.root), self.slurm_cluster, known=known)
            except SchedulerUnreachableError:
                break
            if job_id is not None:
                return Submission(job_id=job_id, slurm_cluster=self.slurm_cluster)
        raise _maybe_queued(error.message, paths, error.cause) from error

    def _withdraw(self, paths: RunPaths, known: Collection[str]) -> None:
        """Cancel the job of an interrupted submission, or raise PerhapsSubmittedError."""
        try:
            job_id = find_by_command(str(paths.root), self.slurm_cluster, known=known)
            if job_id is not None:
                with contextlib.suppress(JobNotFoundError):
                    self.cancel([job_id])
        except ClusterrunError as error:
            raise _maybe_queued("the submission was interrupted", paths, error.cause) from error


def backend(where: Where) -> SlurmBackend:
    """Return the backend of this package."""
    return SlurmBackend(slurm_cluster=where.slurm_cluster)


def parse_submission(stdout: str) -> Submission:
    """Parse what `sbatch --parsable` printed.

    >>> parse_submission("53;tuxA")
    Submission(job_id='53', slurm_cluster='tuxA', home=None)

    Raises NoJobIdError for anything else: a site's wrapper may print other numbers.
    """
    match = re.match(r"([0-9]+)(?:;(\S+))?\Z", stdout.strip())
    if match is None:
        raise NoJobIdError("sbatch's output is not a plain job id", cause=stdout.strip() or None)
    return Submission(job_id=JobId(match[1]), slurm_cluster=match[2])


def _maybe_queued(what: str, paths: RunPaths, cause: str | None) -> PerhapsSubmittedError:
    text = f"{what}; the job may or may not be in the queue"
    look = "look for it with 'squeue --me' before you submit again"
    kept = f"its run directory was kept: {paths.root}"
    return PerhapsSubmittedError(text, cause=cause, hint=(look, kept))


# The next job of a run, from inside its job: Slurm would hold a requeued job for two minutes


def submit_successor(
    run_dir: Path, plan: Plan, nodes: Sequence[str], environ: Mapping[str, str]
) -> str:
    """Submit the job that continues a run after this one, and return its id.

    `nodes` are excluded in addition to the plan's. In a chain the successor is the next job, which
    is already queued. Raises ClusterrunError; then the record is unchanged and there is no new job.
    """
    record = records.register_run(run_dir, environ)
    backend = SlurmBackend(slurm_cluster=record.slurm_cluster)
    # An option on the command line replaces the script's.
    planned = plan.directive("exclude")
    exclude = fold_hosts([*(parse_hostlist(planned) if planned else ()), *nodes])
    if record.chain_length:
        if not record.chained_job_ids:
            raise ClusterrunError(f"this was the last of the chain's {record.chain_length} jobs")
        job_id = record.chained_job_ids[0]
        if exclude:
            backend.scontrol("update", f"JobId={job_id}", f"ExcNodeList={exclude}")
        records.update(record.paths, lambda now: records.continued_by(now, job_id))
        return job_id
    # Slurm keeps the job of a lost node for minutes. The successor excludes that node and need
    # not wait: this job's agents have exited by now.
    after = "" if nodes else environ["SLURM_JOB_ID"]
    new = backend.submit_again(plan, record, after=after, exclude=exclude)
    _record_successor(record, new, backend)
    return new.job_id


def _record_successor(record: JobRecord, new: Submission, backend: SlurmBackend) -> None:
    """Record the new job; cancel it if that fails, since no command could find it."""
    try:
        records.update(record.paths, lambda now: records.continued_by(now, new.job_id))
        records.link_job(record.paths, new.job_id)
    except (OSError, ClusterrunError) as error:
        with contextlib.suppress(ClusterrunError):
            backend.cancel([new.job_id])
        with contextlib.suppress(OSError, ClusterrunError):
            records.update(record.paths, lambda _: record)  # as it was
        raise ClusterrunError(f"cannot write {record.paths.record}", cause=str(error)) from error
