"""A Slurm job as the conductor's host: srun runs its steps, scontrol and sbatch use the queue."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from clusterrun.config.choices import Stage
from clusterrun.errors import ClusterrunError, SchedulerUnreachableError
from clusterrun.launch.plan import Plan
from clusterrun.node.base.stderr import say_on_stderr
from clusterrun.node.conductor.host import Host
from clusterrun.rundir.end import read_end
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import files, shell
from clusterrun.shared.own_modules import module_argv
from clusterrun.shared.state import JobState
from clusterrun.shared.wording import count, parse_version

BY_HAND = "by-hand"
RECORD_S = 5.0  # for the submitting process to record this job
_NUMBERS = re.compile(r"^(num_machines|num_processes):\s*(\d+)", re.MULTILINE)
END_S = 5.0  # Slurm may enforce a time limit this early or late
REQUEUES_SINCE = (24, 5)
ASK_S = 10.0


@dataclass(frozen=True)
class SrunStep:
    """The srun of one attempt or more."""

    srun: subprocess.Popen[bytes]

    def poll(self) -> int | None:
        """Return srun's exit status; None while it runs."""
        code = self.srun.poll()
        return 128 - code if code is not None and code < 0 else code

    def end(self) -> None:
        """Do nothing: Slurm signals the tasks."""

    def kill(self) -> None:
        """Kill srun: it may wait minutes for a lost node."""
        if self.srun.poll() is None:
            self.srun.kill()
            self.srun.wait()


class SlurmHost(Host):
    """The job that this batch script runs in; Slurm enforces its time limit and warns before it.

    `srun` is the script's, by default the plan's. `kind` is backend.CHAINED for a later job of a
    chain, BY_HAND if clusterrun did not submit the job, else empty; `started` is when the script
    started, by the monotonic clock.
    """

    records_end = True

    def __init__(
        self,
        paths: RunPaths,
        plan: Plan,
        *,
        kind: str = "",
        started: float = 0.0,
        environ: Mapping[str, str] = os.environ,
        srun: Sequence[str] = (),
    ) -> None:
        self.srun = tuple(srun) or ("srun", *plan.srun_args)
        self.paths, self.plan = paths, plan
        self.kind, self.started, self.environ = kind, started, environ
        self.job_id = environ.get("SLURM_JOB_ID", "")
        self.register_after_s = 0.0 if kind else RECORD_S  # a submitter records its first job

    @property
    def _is_restarted(self) -> bool:
        return self.environ.get("SLURM_RESTART_COUNT", "0") != "0"

    def nothing_left(self) -> str:
        """Return why this job has nothing to do; empty if it has work.

        Slurm may restart a job with which it had lost contact, even if another job continues the
        run by then. A later job of a chain continues the run only after a time limit.
        """
        if self._is_restarted:
            record = files.read_json(self.paths.record) or {}
            is_superseded = self.job_id in record.get("earlier_job_ids", ())
            return f"another job continues the run in {self.paths.root}" if is_superseded else ""
        is_chained = self.kind not in ("", BY_HAND)
        end = read_end(self.paths) if is_chained else None
        if end is None or end.state is JobState.TIMEOUT:
            return ""
        return f"the run in {self.paths.root} has ended; nothing is left to do"

    def refusal(self) -> str:
        """Return why the job cannot run, such as a number changed by hand; "" if it can."""
        if self.environ.get("SLURM_HET_SIZE"):
            return "heterogeneous jobs are not supported"
        given, planned = self.environ.get("SLURM_JOB_NUM_NODES"), self.plan.directive("nodes")
        if given and planned and given != planned:
            has = f"the job has {count(int(given), 'node')}"
            return f"{has} but was rendered for {planned}; render it again with --nodes {given}"
        for each in self.srun:
            if each.startswith(("--nodes=", "--ntasks=")) and each not in self.plan.srun_args:
                changed = f"srun has {each}, but the job was rendered with another value"
                return f"{changed}; render it again"
        # The launcher's options override the numbers in accelerate.yaml: a change has no effect.
        plan, of_user = self.plan, dict(_NUMBERS.findall(self.plan.accelerate_text))
        rendered = of_user if plan.accelerate_text else plan.accelerate  # the user's YAML, or ours
        with contextlib.suppress(OSError):
            for name, number in _NUMBERS.findall(self.paths.accelerate.read_text()):
                if str(rendered.get(name, number)) != number:
                    return f"accelerate.yaml now has {name} {number}; render the job again"
        return ""

    def start(
        self, attempt: int, *, port: int, is_relaunch: bool, excluded: tuple[str, ...]
    ) -> SrunStep:
        """Start an attempt's srun: one task on each node. Raises OSError."""
        argv = self.command(attempt, port, is_relaunch=is_relaunch, excluded=excluded)
        if self.plan.stage is not Stage.OFF and not is_relaunch:
            words = (str(self.paths.root), *argv)
            argv = module_argv(sys.executable, "clusterrun.backends.slurm.stage", *words)
        return SrunStep(subprocess.Popen(argv, env=self.environ, stdin=subprocess.DEVNULL))

    def command(
        self, attempt: int, port: int, *, is_relaunch: bool, excluded: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Return srun's command.

        A step that lost a node keeps its resources on the others until Slurm gives up the node.
        The next step therefore shares them, and doesn't wait for lost nodes.
        """
        # This node's name in Slurm, which may have another address than its own name.
        batch_host = self.environ.get("SLURMD_NODENAME") or socket.gethostname()
        sharing = (f"--exclude={','.join(excluded)}", "--overlap", "--mem=0") if excluded else ()
        soon = ("--immediate=60",) if is_relaunch else ()  # fail if it can't start in 60 s
        node = (str(self.paths.node_script), str(self.paths.root), str(attempt))
        return (*self.srun, *self._cpus(), *sharing, *soon, "bash", *node, batch_host, str(port))

    def _cpus(self) -> tuple[str, ...]:
        """Return the option that gives each task its node's CPUs: by default, srun gives it one."""
        if any(option.startswith("--cpus-per-task") for option in self.srun):
            return ()
        given = self.environ.get("SLURM_CPUS_PER_TASK", "")
        counts = list(cpus_of_nodes(self.environ.get("SLURM_JOB_CPUS_PER_NODE", "")))
        cpus = given or (str(min(counts)) if counts else "")  # nodes may differ
        return (f"--cpus-per-task={cpus}",) if cpus else ()

    def register(self) -> None:
        """Record the job if its submission has not. Raises ClusterrunError and OSError."""
        record = files.read_json(self.paths.record) or {}
        if record.get("job_id") != self.job_id:
            from clusterrun.rundir.record import register_run

            register_run(self.paths.root, self.environ)

    def is_over(self) -> bool:
        """Return whether the job's time limit has passed."""
        end = self.environ.get("SLURM_JOB_END_TIME", "")
        if end.isdigit():
            return time.time() >= int(end) - END_S
        limit_s = self.plan.time_minutes * 60
        return limit_s > 0 and time.monotonic() - self.started >= limit_s - END_S

    def answers(self) -> bool:
        """Return whether a slurmctld is up; True if scontrol gets no answer."""
        try:
            answer = shell.run(["scontrol", "ping"], tries=1).stdout
        except SchedulerUnreachableError:
            return True  # the next command will show
        return " is DOWN" not in answer or " is UP" in answer

    def unreachable(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return the nodes on which slurmd accepts no connection."""
        from clusterrun.node.recovery.lost import unreachable

        return unreachable(nodes)

    def was_requeued(self) -> bool:
        """Return whether this job has been requeued since it started; False if unknown."""
        before = int(self.environ.get("SLURM_RESTART_COUNT") or 0)
        return int(_shown("job", self.job_id).get("Restarts", before)) > before

    def requeue(self) -> str:
        """Requeue this job; return Slurm's refusal. Raises SchedulerUnreachableError."""
        if self._will_be_requeued():
            return ""  # another requeue would start the job again after its last end
        done = shell.run(["scontrol", "requeue", self.job_id], tries=1)
        return (done.stderr.strip() or f"exit status {done.rc}") if done.rc else ""

    def _will_be_requeued(self) -> bool:
        """Return whether Slurm certainly requeues this job when it ends; False if unknown.

        Slurm 24.05 and newer requeues a job that ends within a preemption's GraceTime, with any
        exit status. If it was requeued by hand instead, its next start is requeued when that ends
        (commit a689104d15): our requeue would start the job again after its last end.
        """
        job = _shown("job", self.job_id)
        may_be_requeued = _in_grace_time(job) and job.get("Requeue") == "1"
        if not may_be_requeued:
            return False
        config = _shown("config")
        is_by_partition = config.get("PreemptType") == "preempt/partition_prio"
        version = parse_version(config.get("SLURM_VERSION", ""))
        if not is_by_partition or version is None or version < REQUEUES_SINCE:
            return False
        partition = _shown("partition", self.environ.get("SLURM_JOB_PARTITION", ""))
        return "REQUEUE" in partition.get("PreemptMode", "")

    def stay_down(self) -> None:
        """Keep Slurm from requeueing this job, if it did before or the job is being preempted."""
        if not self._is_restarted and not _in_grace_time(_shown("job", self.job_id)):
            return
        try:
            done = shell.run(["scontrol", "update", f"JobId={self.job_id}", "Requeue=0"])
            refusal = done.stderr.strip() if done.rc else ""
        except ClusterrunError as error:
            refusal = str(error)
        if refusal:
            say_on_stderr(f"Slurm may start this job again: {refusal}")

    def submit_successor(self, excluded: tuple[str, ...]) -> str:
        """Submit the job that continues the run. Raises ClusterrunError and OSError."""
        from clusterrun.backends.slurm.backend import submit_successor

        return submit_successor(self.paths.root, self.plan, excluded, self.environ)


def _shown(*what: str) -> dict[str, str]:
    """Return what scontrol shows; {} if slurmctld does not answer."""
    from clusterrun.backends.slurm.query import pairs  # not before the first step

    argv = ["scontrol", "--oneliner", "show", *what]
    try:
        return pairs(shell.run(argv, timeout_s=ASK_S, tries=1).stdout)
    except ClusterrunError:
        return {}


def _in_grace_time(job: Mapping[str, str]) -> bool:
    return job.get("PreemptTime", "")[:1].isdigit()


def cpus_of_nodes(text: str) -> Iterator[int]:
    """Yield the counts in SLURM_JOB_CPUS_PER_NODE, one for each node.

    >>> list(cpus_of_nodes("16(x2),8"))
    [16, 16, 8]
    """
    for cpus, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        yield from [int(cpus)] * int(times or 1)
