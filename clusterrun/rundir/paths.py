"""Every path of a run, in one class: no other module builds a file name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from clusterrun.shared.state import JobId

NAME_BYTES = 80
PLACES_OF_ONE_MACHINE = ("/tmp/", "/var/tmp/", "/dev/shm/", "/run/")  # nodes see others there
_SAFE_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*\Z"
_ATTEMPT = r"[1-9][0-9]{0,5}"
_UNSAFE = r"[^A-Za-z0-9._-]+"
_Key = TypeVar("_Key", int, str)


class FileIn:
    """A path in a directory, of a class with a `root`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, place: Any, _: type) -> Path:
        return Path(place.root, self._name)


class FileOf(FileIn, Generic[_Key]):
    """A path for each attempt, node or rank, whose number or name is in the place of {}."""

    def __get__(self, place: Any, _: type) -> Callable[[_Key], Path]:  # type: ignore[override]
        return lambda key: Path(place.root, self._name.format(key))


class _OfNode(FileIn):
    """A path for each attempt and node."""

    def __get__(self, place: Any, _: type) -> Callable[[int, str], Path]:  # type: ignore[override]
        return lambda attempt, node: place.root / self._name.format(attempt=attempt, node=node)


@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """The layout of one run directory, `<runs>/<name>/<run id>/`."""

    root: Path
    # The directories above it that its submission created, innermost first.
    made: tuple[Path, ...] = field(default=(), compare=False, repr=False)

    record = FileIn("job.json")  # where the run went (JobRecord)
    record_lock = FileIn(".job.lock")  # held while job.json is read, changed and written
    resume_lock = FileIn(".resume.lock")  # held while the run is resumed
    resolved = FileIn("resolved.yaml")  # the configuration with each value's origin
    plan = FileIn("plan.json")  # what the nodes read
    script = FileIn("job.sbatch")  # the batch script
    node_script = FileIn("node.sh")  # what each node starts
    passed = FileIn("passed.jsonl")  # checksums of what `pass_env` gave to each job
    env_script = FileIn("env.sh")  # setup lines and exported variables
    accelerate = FileIn("accelerate.yaml")  # without what only the node knows
    deepspeed = FileIn("ds_config.json")  # DeepSpeed's configuration, if there is one
    stage_script = FileIn("stage.sh")  # how nodes get a copy of the environment, if they do
    slurm_dir = FileIn("slurm")  # of submitit and of the batch script's output
    batch_output = FileIn("slurm/batch.out")  # of the batch script, or of the local controller
    project = FileIn("project")  # a copy, on hosts that do not see the submitting machine's
    controller = FileIn("controller.json")  # pid and start time of the local backend's controller
    end = FileIn("end.json")  # how the run ended, written last
    attempts_dir = FileIn("attempts")  # one directory for each attempt: attempts/1
    events_dir = FileIn("events")  # <node>.jsonl, one file per node, append-only
    usage_dir = FileIn("usage")  # <node>.jsonl and <node>.old, bounded
    logs_dir = FileIn("logs")  # a<attempt>/<node>.log
    checkpoints_dir = FileIn("checkpoints")  # the default of clusterrun.runtime.checkpoint_dir()

    attempt = FileOf[int]("attempts/{}")  # the directory of one attempt
    attempt_record = FileOf[int]("attempts/{}/attempt.json")  # its owner, nodes, ranks; mode 0600
    earlier_end = FileOf[int]("attempts/{}/end.json")  # kept by a resume; empty if there was none
    earlier_config = FileOf[int]("attempts/{}/config")  # kept by a resume with another one
    status = FileOf[int]("attempts/{}/status")  # of a node whose setup failed: it has no agent
    outcome = FileOf[int]("attempts/{}/outcome.json")  # how it ended and what follows
    request = FileOf[int]("attempts/{}/request")  # why it is interrupted, in one word
    stacks = FileOf[int]("attempts/{}/stacks.json")  # where the ranks were when it hung

    log = _OfNode("logs/a{attempt}/{node}.log")  # stamped log lines
    log_errors = _OfNode("logs/a{attempt}/{node}.err")  # error lines, and launcher's and agent's
    nccl_log = _OfNode("logs/a{attempt}/nccl/{node}.log")  # NCCL's log files
    flight_dumps = _OfNode("fr/a{attempt}/{node}.tar")  # the flight recorder's, as torch names them
    live_dumps = _OfNode("fr/a{attempt}/live/{node}.tar")  # of a running attempt, asked for
    rank_errors = _OfNode("errors/a{attempt}/{node}.jsonl")  # torchelastic's, a line for each rank

    events = FileOf[str]("events/{}.jsonl")  # one node's events
    usage = FileOf[str]("usage/{}.jsonl")  # what one node uses: its newest samples
    earlier_usage = FileOf[str]("usage/{}.old")  # the samples before those
    # Shows whether a host sees this directory and not another of its name.
    nonce = FileOf[str](".home-{}")

    @property
    def runs_dir(self) -> RunsDir:
        """The directory of runs that contains this one."""
        return RunsDir(root=self.root.parent.parent)

    @property
    def config_files(self) -> tuple[Path, ...]:
        """The files of the bundle, from which a run is started."""
        shell = (self.script, self.node_script, self.env_script)
        return (*shell, self.resolved, self.plan, self.accelerate, self.deepspeed)

    def attempts(self) -> list[int]:
        """Return the numbers of all attempts that were started, in order."""
        try:
            names = [entry.name for entry in self.attempts_dir.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(name) for name in names if re.fullmatch(_ATTEMPT, name))

    def newest_attempt(self) -> int:
        """Return the number of the newest attempt; 0 if none was started."""
        return max(self.attempts(), default=0)


@dataclass(frozen=True, kw_only=True)
class RunsDir:
    """The directory of all runs of a project."""

    root: Path

    by_job = FileIn("by-job")  # by-job/<job id> links to the run

    def removed(self, uid: int) -> Path:
        """`.removed-<uid>/<name>/<run id>`: runs that are being removed; no command lists them."""
        return self.root / f".removed-{uid}"

    def run(self, name: str, run_id: str) -> RunPaths:
        """Return the layout of a run."""
        return RunPaths(root=self.root / name / run_id)

    def scaling(self, name: str) -> Path:
        """scaling.json: what `clusterrun scaling` measured with the runs of a name."""
        return self.root / directory_name(name) / "scaling.json"

    def job_link(self, job_id: JobId) -> Path:
        """Return the path of a job's link. Raises ValueError for a text that is no id."""
        if not JobId(job_id):
            raise ValueError("no job id")
        return self.by_job / job_id


def directory_name(name: str) -> str:
    """Return a directory name for a job name: the same if it is plain, else similar with a hash.

    >>> directory_name("llama3-sft"), directory_name("../a b")
    ('llama3-sft', 'a-b-2c2c79')
    """
    if re.match(_SAFE_NAME, name) and len(name) <= NAME_BYTES and name != "by-job":
        return name
    likeness = re.sub(_UNSAFE, "-", name).strip(".-")[: NAME_BYTES - 7] or "run"  # 7: -2c2c79
    import hashlib  # slow to import; most names are safe

    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    return f"{likeness}-{digest[:6]}"
