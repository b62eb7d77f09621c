"""Every path of a run, in one class: no other module builds a file name."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

NAME_BYTES = 80
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\Z")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """The layout of one run directory, `<runs>/<name>/<run id>/`.

    `made` lists the directories above it that its submission created, innermost first.
    """

    root: Path
    made: tuple[Path, ...] = field(default=(), compare=False, repr=False)

    @property
    def record(self) -> Path:
        """job.json: where the run went (JobRecord)."""
        return self.root / "job.json"

    @property
    def record_lock(self) -> Path:
        """The lock that is held while job.json is read, changed and written."""
        return self.root / ".job.lock"

    @property
    def resume_lock(self) -> Path:
        """The lock that is held while the run is resumed."""
        return self.root / ".resume.lock"

    @property
    def resolved(self) -> Path:
        """resolved.yaml: the configuration with each value's origin."""
        return self.root / "resolved.yaml"

    @property
    def plan(self) -> Path:
        """plan.json: what the nodes read."""
        return self.root / "plan.json"

    @property
    def script(self) -> Path:
        """job.sbatch: the batch script."""
        return self.root / "job.sbatch"

    @property
    def node_script(self) -> Path:
        """node.sh: what each node starts."""
        return self.root / "node.sh"

    @property
    def env_script(self) -> Path:
        """env.sh: setup lines and exported variables."""
        return self.root / "env.sh"

    @property
    def accelerate(self) -> Path:
        """accelerate.yaml: accelerate's configuration, without what only the node knows."""
        return self.root / "accelerate.yaml"

    @property
    def deepspeed(self) -> Path:
        """ds_config.json: DeepSpeed's configuration, if there is one."""
        return self.root / "ds_config.json"

    @property
    def config_files(self) -> tuple[Path, ...]:
        """The files of the bundle, from which a run is started."""
        shell = (self.script, self.node_script, self.env_script)
        return (*shell, self.resolved, self.plan, self.accelerate, self.deepspeed)

    @property
    def slurm_dir(self) -> Path:
        """The folder of submitit and of the batch script's output."""
        return self.root / "slurm"

    @property
    def batch_output(self) -> Path:
        """The output of the batch script, or of the local controller."""
        return self.slurm_dir / "batch.out"

    @property
    def controller(self) -> Path:
        """controller.json: pid and start time of the local backend's controller."""
        return self.root / "controller.json"

    @property
    def end(self) -> Path:
        """end.json: how the run ended, written last."""
        return self.root / "end.json"

    @property
    def attempts_dir(self) -> Path:
        """One directory for each attempt: `attempts/1`."""
        return self.root / "attempts"

    @property
    def events_dir(self) -> Path:
        """`<node>.jsonl`, one file per node, append-only."""
        return self.root / "events"

    @property
    def logs_dir(self) -> Path:
        """`a<attempt>/<node>.log`."""
        return self.root / "logs"

    @property
    def checkpoints_dir(self) -> Path:
        """The default of `clusterrun.runtime.checkpoint_dir()`."""
        return self.root / "checkpoints"

    def set_aside_dir(self, when: str) -> Path:
        """The directory for checkpoints that must not be preferred to an older one."""
        return self.checkpoints_dir / f"set-aside-{when}"

    def attempt(self, attempt: int) -> Path:
        """The directory of one attempt."""
        return self.attempts_dir / str(attempt)

    def owner(self, attempt: int) -> Path:
        """The process that has taken one attempt: the first to write this file."""
        return self.attempt(attempt) / "owner"

    def earlier_end(self, attempt: int) -> Path:
        """end.json after one attempt, kept when the run is resumed; empty if there was none."""
        return self.attempt(attempt) / self.end.name

    def earlier_config(self, attempt: int) -> Path:
        """The files that started one attempt, kept when the run is resumed with others."""
        return self.attempt(attempt) / "config"

    def link_secret(self, attempt: int) -> Path:
        """The secret that authenticates the agents of one attempt to each other, mode 0600."""
        return self.attempt(attempt) / "link.secret"

    def status(self, attempt: int) -> Path:
        """The exit status of one attempt, in digits; the first process to write it decides."""
        return self.attempt(attempt) / "status"

    def outcome(self, attempt: int) -> Path:
        """outcome.json: how one attempt ended and what follows."""
        return self.attempt(attempt) / "outcome.json"

    def resumed(self, attempt: int) -> Path:
        """The step that one attempt resumed from, in digits; 0 is the beginning."""
        return self.attempt(attempt) / "resumed"

    def followed(self, attempt: int) -> Path:
        """The claim to decide what follows one attempt; an heir writes its node's name."""
        return self.attempt(attempt) / "followed"

    def request(self, attempt: int) -> Path:
        """Why one attempt is interrupted, in one word."""
        return self.attempt(attempt) / "request"

    def head_pid(self, attempt: int) -> Path:
        """The pid of the head, for signals from the conductor on the same host."""
        return self.attempt(attempt) / "head.pid"

    def world(self, attempt: int) -> Path:
        """world.json: the nodes of one attempt in rank order, and how many ranks each has."""
        return self.attempt(attempt) / "world.json"

    def events(self, node: str) -> Path:
        """One node's events."""
        return self.events_dir / f"{node}.jsonl"

    def log(self, attempt: int, node: str) -> Path:
        """One node's stamped log lines of one attempt."""
        return self.logs_dir / f"a{attempt}" / f"{node}.log"

    def log_index(self, attempt: int, node: str) -> Path:
        """The sparse time index of one node's log."""
        return self.logs_dir / f"a{attempt}" / f"{node}.idx"

    def log_errors(self, attempt: int, node: str) -> Path:
        """The side file of one node's log: error lines, and those of launcher and agent."""
        return self.logs_dir / f"a{attempt}" / f"{node}.err"

    def nccl_log(self, attempt: int, node: str) -> Path:
        """NCCL's log files of one node."""
        return self.logs_dir / f"a{attempt}" / "nccl" / f"{node}.log"

    def flight_dumps(self, attempt: int, node: str) -> Path:
        """One node's dumps of the flight recorder, as torch names them, in a tar file."""
        return self.root / "fr" / f"a{attempt}" / f"{node}.tar"

    def rank_errors(self, attempt: int, node: str) -> Path:
        """One node's torchelastic error files, one line for each rank."""
        return self.root / "errors" / f"a{attempt}" / f"{node}.jsonl"

    def newest_attempt(self) -> int:
        """Return the number of the newest attempt; 0 if none was started."""
        try:
            names = [entry.name for entry in self.attempts_dir.iterdir()]
        except FileNotFoundError:
            return 0
        return max((int(name) for name in names if name.isdigit()), default=0)


@dataclass(frozen=True, kw_only=True)
class RunsDir:
    """The directory of all runs of a project."""

    root: Path

    @property
    def by_job(self) -> Path:
        """`by-job/<job id>` links to the run."""
        return self.root / "by-job"

    def run(self, name: str, run_id: str) -> RunPaths:
        """Return the layout of a run."""
        return RunPaths(root=self.root / name / run_id)

    def scaling(self, name: str) -> Path:
        """scaling.json: what `clusterrun scaling` measured with the runs of a name."""
        return self.root / directory_name(name) / "scaling.json"

    def job_link(self, job_id: str) -> Path:
        """Return the path of a job's link."""
        return self.by_job / job_id


def directory_name(name: str) -> str:
    """Return a directory name for a job name: the same if it is plain, else similar with a hash.

    >>> directory_name("llama3-sft"), directory_name("../a b")
    ('llama3-sft', 'a-b-adb82b')
    """
    if _SAFE_NAME.match(name) and len(name) <= NAME_BYTES and name != "by-job":
        return name
    likeness = _UNSAFE.sub("-", name).strip(".-")[: NAME_BYTES - 7] or "run"
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    return f"{likeness}-{digest[:6]}"
