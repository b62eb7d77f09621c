"""What to do about a failure, with the numbers of the run itself."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clusterrun.config.secrets import redacted
from clusterrun.diagnosis.kinds import Advice, Retry
from clusterrun.errors import ClusterrunError, Exit
from clusterrun.rundir.end import Cause
from clusterrun.rundir.outcome import Outcome, ShortVerdict, VerdictRule, hints_of
from clusterrun.rundir.reading import read_plan
from clusterrun.shared import checkpoint_files
from clusterrun.shared.amounts import clock, format_bytes, format_seconds
from clusterrun.shared.checkpoint_files import ANY, Checkpoint, IncompleteError
from clusterrun.shared.hostlist import fold_hosts, fold_ranks, parse_hostlist
from clusterrun.shared.state import JobState
from clusterrun.verbs.find import configuration

if TYPE_CHECKING:  # slow to import
    from clusterrun.backends.status import JobStatus
    from clusterrun.config.spec import JobSpec
    from clusterrun.launch.plan import Plan

MIB: Final = 1 << 20
_REPEATS: Final = (VerdictRule.SAME_CAUSE, VerdictRule.WOULD_REPEAT)
_SLURM: Final = ("sacct", "sacctmgr", "scontrol", "sinfo", "srun")
_REFUSED: Final = re.compile(
    r"\berror: |^Error: |FATAL Flags|^Could not override |^Key |not used by the HfArgumentParser"
)
_MODULE: Final = re.compile(r"No module named '?([\w.]{1,100})")
_TIMEOUT: Final = re.compile(r"\bTimeout\(ms\)=(\d+)")


@dataclass(frozen=True)
class Run:
    """A run that failed; `outcome` and `is_newest` are those of the diagnosed attempt."""

    job: JobStatus
    verdict: ShortVerdict
    spec: JobSpec
    plan: Plan
    outcome: Outcome | None
    is_newest: bool

    @functools.cached_property
    def checkpoint(self) -> Checkpoint | None:
        """Its newest complete checkpoint."""
        return checkpoint_files.newest(self.job.record.paths.checkpoints_dir, contents=False)[0]

    def resume_command(self, *options: str, args: Sequence[str] | None = None) -> str:
        """Return the command that resumes it with changes; "" if it would show a secret."""
        start = ("--from", "scratch") if self.checkpoint is None else ()
        after = () if args is None else ("--", *args)
        name = self.job.record.job_id or self.job.record.run_dir
        text = shlex.join(["clusterrun", "resume", name, *start, *options, *after])
        return text if redacted(text) == text else ""


def run_of(job: JobStatus, verdict: ShortVerdict, attempt: int) -> Run | None:
    """Return what is known of a run with its verdict; None if its files can't be read."""
    try:
        resolved, plan = configuration(job.record), read_plan(job.record.paths)
    except (ClusterrunError, OSError, ValueError):
        return None
    outcome = next((each.outcome for each in job.attempts if each.number == attempt), None)
    return Run(job, verdict, resolved.spec, plan, outcome, is_newest=attempt == job.attempt)


def to_do(verdict: ShortVerdict, run: Run | None, failure: Outcome | None) -> list[Advice]:
    """Return what to do: a rank's own hints, or the cause's advice with the numbers of this run."""
    if hints := hints_of(failure, verdict):
        return [Advice(text=hint) for hint in hints]
    if run is None:  # commands that name a job are of no use
        return [replace(each, run="" if "JOB" in each.run else each.run) for each in verdict.advice]
    found = [_filled_in(each, run) for each in verdict.advice]
    if remedy := _REMEDIES.get(verdict.cause):
        index, compute = remedy  # the index of the general advice that it replaces
        if computed := compute(run):
            found[index : index + 1] = computed
    return [each for each in found if _is_of_use(each, run)] or found


def retry_of(verdict: ShortVerdict, run: Run | None) -> Retry:
    """Return whether a new attempt may succeed: not if this run shows that it would fail again."""
    return Retry.NO if run is not None and _would_fail_again(run) else verdict.retry


def _would_fail_again(run: Run) -> bool:
    """Return whether this run shows that a new attempt would end as the last one did."""
    last = run.outcome
    if run.verdict.cause == "slurm_time_limit" and run.checkpoint is None:
        return True  # a new attempt begins at the first step, under the same limit
    if last is None:
        return False
    if last.rule in _REPEATS:  # the recovery stopped the run for that
        return True
    if not run.verdict.generic or last.cause not in (Cause.EXIT, Cause.EXCEPTION):
        return False
    if last.cause is Cause.EXIT and last.code == Exit.USAGE:
        return True  # as argparse exits if it refuses the arguments
    # If all ranks fail alike, or the only one before its first step, the script is at fault.
    return last.alike >= run.plan.world_size and (last.alike > 1 or last.step is None)


def _is_of_use(advice: Advice, run: Run) -> bool:
    """Return whether advice applies to this failure, this state of the job and this scheduler."""
    words = advice.run.split() or [""]
    if "--stacks" in words and run.job.state is not JobState.RUNNING:
        return False
    if not run.plan.cluster.scheduler.reads_sbatch and words[0] in _SLURM:
        return False
    return not (advice.again and retry_of(run.verdict, run) is Retry.NO)  # it only tries again


def _filled_in(advice: Advice, run: Run) -> Advice:
    """Return general advice with the names of the job, its nodes and its ranks."""
    command, text = advice.run, advice.text
    if run.checkpoint is None and "--from" not in command:  # resume would refuse
        command = command.replace("resume JOB", "resume JOB --from scratch")
        text = "start the run again" if advice.again else text
    if run.verdict.nodes:  # with those that are excluded already
        known = filter(None, (run.spec.exclude, *run.verdict.nodes))
        nodes = fold_hosts(parse_hostlist(",".join(known)))
        command = command.replace("--exclude NODE", f"--exclude {shlex.quote(nodes)}")
    if not run.verdict.ranks:
        command = command.replace("--rank RANKS", "--all-ranks")
    return replace(advice, text=text, run=_WORD.sub(lambda word: _VALUES[word[0]](run), command))


def _smaller_batch(run: Run) -> list[Advice]:
    """Return a smaller micro-batch: as settings if `plan` chose it, or as script options."""
    from clusterrun.estimates.steps import smaller_passes
    from clusterrun.launch.inputs import batch_of, with_number

    spec = run.spec
    options = None if spec.planned else batch_of(spec.args)  # micro-batch, accumulation
    if spec.planned:
        micro, accumulation = spec.micro_batch or 1, spec.accumulation or 1
    elif options:
        micro, accumulation = (number for _, number in options)
    else:
        return []
    smaller = smaller_passes(micro, accumulation)
    if smaller is None:
        return []
    if options is None:
        sets = (f"training.micro_batch={smaller[0]}", f"training.accumulation={smaller[1]}")
        command = run.resume_command("--set", sets[0], "--set", sets[1])
    else:
        args: Sequence[str] = spec.args
        for (name, _), number in zip(options, smaller, strict=True):
            args = with_number(args, name, number)
        command = run.resume_command(args=args)
    batch = micro * accumulation * run.plan.data_parallel
    lower = f"lower the micro-batch from {micro} to {smaller[0]}"
    higher = f"raise the accumulation from {accumulation} to {smaller[1]}"
    text = f"{lower} and {higher}: the effective batch stays {batch}"
    return [Advice(text=text, run=command)]


def _longer_time_limit(run: Run) -> list[Advice]:
    """Return the time limit for the steps that are left; twice the limit if the rate is unknown."""
    from clusterrun.backends.evidence import ProgressSource

    progress, saved = run.job.progress, run.checkpoint
    is_reported = progress.source is ProgressSource.REPORTED  # printed ones may be of one epoch
    if not (run.is_newest and is_reported and progress.total and progress.rate_per_s):
        limit_s = run.job.limit_s
        twice = run.resume_command("--time", clock(2 * limit_s)) if limit_s else ""
        return [Advice(text="double the time limit", run=twice)] if twice else []
    left = progress.total - (saved.step if saved else 0)
    if left <= 0:
        return []
    left_s = left / progress.rate_per_s
    minutes = math.ceil(left_s * 11 / 10 / 60)  # a tenth more, as in `segments`
    duration = f"{clock(left_s)} at {progress.rate_per_s:.3g} steps/s"
    text = f"{left:,} steps are left, {duration}, plus a tenth for starts and saves"
    advice = [Advice(text=text, run=run.resume_command("--time", clock(60 * minutes)))]
    from clusterrun.estimates.speed import segments

    jobs = segments(left_s, run.job.limit_s) if saved and run.job.limit_s else 1
    if jobs > 1:
        text = f"or keep the limit and let {jobs} jobs run one after another"
        advice.append(Advice(text=text, run=run.resume_command("--on-interrupt", "successor")))
    return advice


def _more_memory(run: Run) -> list[Advice]:
    """Return twice the memory: of --mem, or else of the cgroup's limit."""
    spec = run.spec
    if size := re.fullmatch(r"0*([1-9]\d*)([KMGTkmgt]?)", spec.mem or ""):
        what = f"double the memory, now --mem {spec.mem}"
        return [Advice(text=what, run=run.resume_command("--mem", f"{2 * int(size[1])}{size[2]}"))]
    if run.verdict.allowed and run.plan.cluster.scheduler.reads_sbatch:
        twice = format_bytes(math.ceil(2 * run.verdict.allowed / MIB) * MIB).removesuffix("iB")
        what = f"double the memory, now {run.verdict.allowed / 2**30:.3g} GiB per node"
        return [Advice(text=what, run=run.resume_command("--mem", twice))]
    return []


def _longer_timeout(run: Run) -> str:
    """Return twice the timeout that the job sets or printed; "TIMEOUT" if there is neither."""
    printed = _TIMEOUT.search("\n".join((run.verdict.text, *run.verdict.more)))
    timeout_s = run.plan.timeout_s or (int(printed[1]) // 1000 if printed else 0)
    return format_seconds(2 * timeout_s) if timeout_s else "TIMEOUT"


def _importable_module(run: Run) -> list[Advice]:
    """Return where Python should look for a module of the project, or where to install it."""
    found = _MODULE.search(run.verdict.text)
    if found is None:
        return []
    workdir, package = Path(run.job.record.workdir), found[1].partition(".")[0]
    for place in (workdir, workdir / "src"):
        if (place / package).is_dir() or (place / f"{package}.py").is_file():
            text = f"'{package}' is in {place}; let the job's Python look there"
            return [Advice(text=text, run=run.resume_command("--env", f"PYTHONPATH={place}"))]
    text = f"install the package that provides '{found[1]}' into the job's environment"
    install = f"{shlex.quote(run.plan.python)} -m pip install PACKAGE"
    restart = Advice(text="then restart the run", run=run.resume_command())
    return [Advice(text=text, run=install), restart]


def _accepted_arguments(run: Run) -> list[Advice]:
    """Return how to correct arguments that the script refused."""
    if not _REFUSED.search(run.verdict.text):
        return []
    command = run.resume_command(args=("ARGS",))
    return [Advice(text="pass arguments that the script accepts", run=command)]


def _earlier_start(run: Run) -> str:
    """Return the complete checkpoint before the newest, for `--from`; "scratch" for none."""
    listed = checkpoint_files.listed(run.job.record.paths.checkpoints_dir, ANY)
    for step, path in sorted(listed, reverse=True)[1:]:
        with contextlib.suppress(IncompleteError):
            checkpoint_files.read(path)
            return f"step-{step}"
    return "scratch"


_REMEDIES: Final[Mapping[str, tuple[int, Callable[[Run], list[Advice]]]]] = {
    # Also the index of the general advice that the computed advice replaces.
    "cuda_oom": (0, _smaller_batch),
    "slurm_time_limit": (1, _longer_time_limit),
    "host_oom": (0, _more_memory),
    "user_code_exception": (0, _accepted_arguments),
    "module_missing": (0, _importable_module),
}
_VALUES: Final[Mapping[str, Callable[[Run], str]]] = {  # of the words in commands
    "JOB": lambda run: shlex.quote(run.job.record.job_id or run.job.record.run_dir),
    "NODE": lambda run: shlex.quote(fold_hosts(run.verdict.nodes) or "NODE"),
    "RANKS": lambda run: fold_ranks(run.verdict.ranks),
    "EARLIER": _earlier_start,
    "PORT": lambda run: str(port + 1) if (port := run.spec.main_process_port) else "PORT",
    "TIMEOUT": _longer_timeout,
}
_WORD: Final = re.compile(rf"\b(?:{'|'.join(_VALUES)})\b")
