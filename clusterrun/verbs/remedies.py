"""What to do about a failure, with the numbers of the run itself."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterrun.backends.evidence import ProgressSource
from clusterrun.backends.status import JobStatus
from clusterrun.config import Resolved
from clusterrun.config.secrets import redacted
from clusterrun.config.spec import JobSpec
from clusterrun.diagnosis.kinds import Retry
from clusterrun.errors import ClusterrunError, Exit
from clusterrun.estimates.inputs import GIB
from clusterrun.estimates.speed import segments
from clusterrun.estimates.steps import effective_batch, fitting_batch, smaller_passes
from clusterrun.launch.plan import Plan
from clusterrun.launch.script_args import batch_of, number_in, with_number
from clusterrun.rundir.outcome import Cause, Outcome, VerdictRule
from clusterrun.rundir.plan import read_plan
from clusterrun.rundir.verdict import ShortVerdict
from clusterrun.shared import checkpoint_files
from clusterrun.shared.checkpoint_files import ANY, Checkpoint, IncompleteError
from clusterrun.shared.durations import clock, format_seconds
from clusterrun.shared.hostlist import fold_hosts, fold_ranks, parse_hostlist
from clusterrun.shared.sizes import format_bytes
from clusterrun.shared.state import JobState
from clusterrun.verbs.changes import configuration

MIB: Final = 1 << 20
_REPEATS: Final = (VerdictRule.SAME_CAUSE, VerdictRule.WOULD_REPEAT)
_WORKERS: Final = (
    *("--dataloader_num_workers", "--num-workers", "--num_workers", "--workers"),
    "--loader-workers",
)
_BATCH: Final = re.compile(r"(\d{1,12}) != (\d{1,12}) \* (\d{1,12}) \* (\d{1,12})")  # of DeepSpeed
_DIVISIBLE: Final = re.compile(
    r"\b(\d{1,12})\)? (?:is|must be|should be) (?:not )?divisible by \D{0,200}(\d{1,12})"
)
_RESUME: Final = re.compile(r"clusterrun resume JOB\b(?! --from)")
_WITH_JOB: Final = re.compile(r"(?:, then)?: clusterrun resume JOB\b.*")
_CONTINUE: Final = re.compile(r"\b(?:continue(?: it)?|resume)(?=[^:]{0,200}: clusterrun resume)")
_AS_IT_IS: Final = re.compile(
    r"(?:then )?(?:continue it|start it again): clusterrun resume \S+(?: --from scratch)?"
)
_SLURM: Final = re.compile(r"\b(?:sacct|sacctmgr|scontrol|sinfo|squeue|srun)\b")
_REFUSED: Final = re.compile(
    r"\berror: |^Error: |FATAL Flags|^Could not override |^Key |not used by the HfArgumentParser"
)
_MODULE: Final = re.compile(r"No module named '?([\w.]{1,100})")
_TIMEOUT: Final = re.compile(r"\bTimeout\(ms\)=(\d+)")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run that failed; `is_newest` is its attempt's."""

    job: JobStatus
    verdict: ShortVerdict
    resolved: Resolved
    plan: Plan
    is_newest: bool
    outcome: Outcome | None = None

    @property
    def spec(self) -> JobSpec:
        """Its settings."""
        return self.resolved.spec

    @functools.cached_property
    def checkpoint(self) -> Checkpoint | None:
        """Its newest complete checkpoint."""
        return checkpoint_files.newest(self.job.record.paths.checkpoints_dir, contents=False)[0]

    def resume(
        self, *options: str, args: Sequence[str] | None = None, from_scratch: bool = False
    ) -> str:
        """Return the command that resumes it with changes; "" if it would show a secret."""
        start = ("--from", "scratch") if from_scratch or self.checkpoint is None else ()
        words = ["clusterrun", "resume", _name(self.job), *start, *options]
        text = shlex.join([*words, *(("--", *args) if args is not None else ())])
        return text if redacted(text) == text else ""

    def numbers(self, pattern: re.Pattern[str]) -> list[int]:
        """Return the numbers in the first sign that has them."""
        found = map(pattern.search, (self.verdict.text, *self.verdict.more))
        return next(([int(text) for text in hit.groups()] for hit in found if hit), [])


def run_of(job: JobStatus, verdict: ShortVerdict, attempt: int) -> Run | None:
    """Return what is known of a run with its verdict; None if its files can't be read."""
    try:
        resolved, plan = configuration(job.record), read_plan(job.record.paths)
    except (ClusterrunError, OSError, ValueError):
        return None
    outcome = next((each.outcome for each in job.attempts if each.number == attempt), None)
    return Run(
        job=job,
        verdict=verdict,
        resolved=resolved,
        plan=plan,
        is_newest=attempt == job.attempt,
        outcome=outcome,
    )


def to_do(verdict: ShortVerdict, run: Run | None) -> list[str]:
    """Return what to do: what this run's numbers allow to compute, then what always applies."""
    lines = [_filled_in(text, verdict, run) for text in verdict.do]
    if run is None:
        return [_WITH_JOB.sub("", text) for text in lines]
    if remedy := _REMEDIES.get(verdict.cause):
        at, compute = remedy
        lines[at : at + 1] = compute(run) or lines[at : at + 1]
    return [text for text in lines if _is_of_use(text, run)] or lines


def retry_of(verdict: ShortVerdict, run: Run | None) -> Retry:
    """Return whether another try helps, as far as this run shows."""
    return _retry(run) if run else verdict.retry


def _retry(run: Run) -> Retry:
    is_stopped = run.outcome is not None and run.outcome.rule in _REPEATS
    is_cut = run.verdict.cause == "slurm_time_limit" and run.checkpoint is None
    return Retry.NO if is_stopped or is_cut or _is_certain(run) else run.verdict.retry


def _is_certain(run: Run) -> bool:
    """Return whether the script refused its arguments, or failed at one line on all ranks."""
    last = run.outcome
    if last is None or not run.verdict.generic:
        return False
    is_usage = last.cause is Cause.EXIT and last.code == Exit.USAGE
    is_shared = last.alike >= run.plan.world_size and (last.alike > 1 or last.step is None)
    return last.cause in (Cause.EXIT, Cause.EXCEPTION) and (is_usage or is_shared)


def _is_of_use(text: str, run: Run) -> bool:
    """Return whether advice applies: to a job that runs, to Slurm, to a failure that is over."""
    if "--stacks" in text and run.job.state is not JobState.RUNNING:
        return False
    if not run.plan.cluster.scheduler.reads_sbatch and _SLURM.search(text):
        return False
    return not (_AS_IT_IS.fullmatch(text) and _retry(run) is Retry.NO)


def _filled_in(text: str, verdict: ShortVerdict, run: Run | None) -> str:
    """Return general advice with the names of the job, its nodes and its ranks."""
    if run is not None:
        text = text.replace("--exclude NODE", _exclude(run))
        if run.checkpoint is None:  # resume would refuse
            text = _RESUME.sub(r"\g<0> --from scratch", _CONTINUE.sub("start it again", text))
    if not verdict.ranks:
        text = text.replace("--rank RANKS", "--all-ranks")
    names = {"NODE": fold_hosts(verdict.nodes), "RANKS": fold_ranks(verdict.ranks)}
    if run is not None:
        names["JOB"] = shlex.quote(_name(run.job))
    return re.sub(r"\b(?:JOB|NODE|RANKS)\b", lambda word: names.get(word[0]) or word[0], text)


def _name(job: JobStatus) -> str:
    return job.record.job_id or job.record.run_dir


def _exclude(run: Run) -> str:
    """Return the option that excludes the nodes, and those that are excluded already."""
    known = parse_hostlist(run.spec.exclude) if run.spec.exclude else []
    nodes = dict.fromkeys((*known, *run.verdict.nodes))
    return f"--exclude {shlex.quote(fold_hosts(nodes))}" if run.verdict.nodes else "--exclude NODE"


def _smaller_batch(run: Run) -> list[str]:
    spec, options = run.spec, batch_of(run.spec.args)
    if spec.planned:
        micro, accumulation = spec.micro_batch or 1, spec.accumulation or 1
    elif options:
        micro, accumulation = (number for _, number in options)
    else:
        return []
    smaller = smaller_passes(micro, accumulation)
    if smaller is None:
        return _other_strategy(run, micro, accumulation)
    keys = ("micro_batch", "accumulation")
    if spec.planned or options is None:
        sets = [f"training.{key}={n}" for key, n in zip(keys, smaller, strict=True)]
        command = run.resume("--set", sets[0], "--set", sets[1])
    else:
        args: Sequence[str] = spec.args
        for (name, _), number in zip(options, smaller, strict=True):
            args = with_number(args, name, number)
        command = run.resume(args=args)
    batch = effective_batch(micro, accumulation, run.plan.data_parallel)
    text = (
        f"lower the micro-batch from {micro} to {smaller[0]} and raise the accumulation from "
        f"{accumulation} to {smaller[1]}: the effective batch stays {batch}"
    )
    return [f"{text}: {command}" if command else text]


def _other_strategy(run: Run, micro: int, accumulation: int) -> list[str]:
    """Propose plan's fastest setup that fits at this micro-batch."""
    spec = dataclasses.replace(
        run.spec, micro_batch=micro, accumulation=accumulation, effective_batch=None
    )
    from clusterrun.advice.question import question_of  # slow to import
    from clusterrun.estimates.recommend import recommend

    try:
        question = question_of(run.resolved._replace(spec=spec), may_count=False)
        choices = recommend(question, question.setup.effective_batch)
    except ClusterrunError:
        return []
    for choice in choices:
        setup = choice.setup
        if setup.micro_batch == micro and setup.strategy is not run.plan.strategy:
            command = run.resume("--strategy", setup.strategy.value, from_scratch=True)
            ckpt = " with gradient checkpointing" if setup.grad_ckpt else ""
            text = f"the micro-batch is {micro}: shard more{ckpt}, {choice.gpu_bytes / GIB:.1f} GiB"
            return [f"{text} of a GPU are estimated: {command}"]
    return []


def _longer(run: Run) -> list[str]:
    progress, saved = run.job.progress, run.checkpoint
    is_reported = progress.source is ProgressSource.REPORTED  # printed ones may be of one epoch
    if not (run.is_newest and is_reported and progress.total and progress.rate_per_s):
        limit_s = run.job.limit_s
        twice = run.resume("--time", clock(2 * limit_s)) if limit_s else ""
        return [f"double the time limit: {twice}"] if twice else []
    left = progress.total - (saved.step if saved else 0)
    if left <= 0:
        return []
    seconds = left / progress.rate_per_s
    limit = clock(math.ceil(seconds * 11 / 600) * 60)
    text = f"{left:,} steps are left, {clock(seconds)} at {progress.rate_per_s:.3g} steps/s"
    lines = [f"{text}; with a tenth for starts and saves: {run.resume('--time', limit)}"]
    jobs = segments(seconds, run.job.limit_s) if saved and run.job.limit_s else 1
    if jobs > 1:
        command = run.resume("--on-interrupt", "successor")
        lines.append(f"or keep the limit and let {jobs} jobs continue one another: {command}")
    return lines


def _more_memory(run: Run) -> list[str]:
    spec, ranks = run.spec, run.plan.procs_per_node
    asked = {
        "--mem": spec.mem,
        "--mem-per-gpu": spec.mem_per_gpu,
        "--mem-per-cpu": spec.mem_per_cpu,
    }
    lines = []
    for option, text in asked.items():
        hit = re.fullmatch(r"0*([1-9]\d*)([KMGTkmgt]?)", text or "")
        if hit:
            command = run.resume(option, f"{2 * int(hit[1])}{hit[2]}")
            lines.append(f"ask for more than {option} {text}, twice as much: {command}")
    if run.verdict.allowed and not lines and run.plan.cluster.scheduler.reads_sbatch:
        twice = format_bytes(math.ceil(2 * run.verdict.allowed / MIB) * MIB).removesuffix("iB")
        command = run.resume("--mem", twice)
        allowed = f"{run.verdict.allowed / GIB:.3g} GiB"
        lines.append(f"ask for more than {allowed} a node, twice as much: {command}")
    workers = number_in(spec.args, _WORKERS)
    if workers and workers[1] > 1:
        name, number = workers
        command = run.resume(args=with_number(spec.args, name, number // 2))
        text = f"or start fewer loader workers than {number} for each of a node's {ranks} ranks"
        lines.append(f"{text}: {command}" if command else text)
    return lines


def _longer_timeout(run: Run) -> list[str]:
    printed = run.numbers(_TIMEOUT)
    now = run.plan.timeout_s or (printed[0] // 1000 if printed else 0)
    if not now:
        return []
    command = run.resume("--timeout", format_seconds(2 * now))
    return [f"if a rank saves or evaluates for longer than {format_seconds(now)}: {command}"]


def _other_port(run: Run) -> list[str]:
    port = run.spec.main_process_port
    if port is None:
        return []
    other = port + 1 if port < 65535 else port - 1
    return [f"choose another port than {port}: {run.resume('--main-process-port', str(other))}"]


def _bytes_to_free(run: Run) -> list[str]:
    from clusterrun.advice.measured import checkpoint_bytes  # slow to import

    paths = run.job.record.paths
    place = run.checkpoint.path.parent if run.checkpoint else paths.checkpoints_dir
    size, kept = checkpoint_bytes(paths), len(checkpoint_files.listed(place))
    if size is None:
        return []
    place = place if place.is_dir() else paths.root
    free = shutil.disk_usage(place).free
    needs = f"the next checkpoint needs {size / GIB:.3g} GiB beside the {kept} that are kept"
    return [f"{needs}; {free / GIB:.3g} GiB are free in {place}: df -h and df -i"]


def _fitting_batch(run: Run) -> list[str]:
    numbers = run.numbers(_BATCH)
    if len(numbers) != 4 or not (numbers[1] and numbers[3]):
        return []
    total, micro, accumulation, ranks = numbers
    batch, passes = fitting_batch(total, micro, accumulation, ranks)
    return [
        f"set train_batch_size {batch}, train_micro_batch_size_per_gpu {micro} and "
        f"gradient_accumulation_steps {passes}: {batch} = {micro} x {passes} x {ranks} ranks"
    ]


def _fitting_world(run: Run) -> list[str]:
    numbers, ranks = run.numbers(_DIVISIBLE), run.plan.world_size
    if len(numbers) != 2 or numbers[0] != ranks or not numbers[1]:
        return []
    procs, size = run.plan.procs_per_node, numbers[1]
    nodes = math.lcm(procs, size) // procs
    nodes *= math.ceil(run.plan.nodes / nodes)
    text = f"{ranks} ranks are not divisible by {size}, {nodes * procs} are"
    return [f"{text}: {run.resume('--nodes', str(nodes))}"]


def _installed(run: Run) -> list[str]:
    """Return where Python should look for a module of the project, or where to install it."""
    found = _MODULE.search(run.verdict.text)
    if found is None:
        return []
    home, top = Path(run.job.record.workdir), found[1].partition(".")[0]
    for place in (home, home / "src"):
        if (place / top).is_dir() or (place / f"{top}.py").is_file():
            command = run.resume("--env", f"PYTHONPATH={place}")
            return [f"'{top}' is in {place}; let the job's Python look there: {command}"]
    install = f"{shlex.quote(run.plan.python)} -m pip install PACKAGE"
    text = f"install what has '{found[1]}' into the job's environment: {install}"
    return [text, f"then: {run.resume()}"]


def _mended(run: Run) -> list[str]:
    """Return how to correct the arguments, or an exit without a message."""
    text = run.verdict.text
    if _REFUSED.search(text):
        command = run.resume(from_scratch=True, args=("ARGS",))
        return [f"pass arguments that the script accepts: {command}"]
    if run.verdict.is_reported and run.outcome and run.outcome.cause is Cause.EXIT:
        logs = f"clusterrun logs {shlex.quote(_name(run.job))} --rank {run.outcome.rank}"
        return [
            f"read what it printed last: {logs}",
            f"look for sys.exit and os._exit in the script, then: {run.resume()}",
        ]
    return []


def _earlier(run: Run) -> list[str]:
    """Return the command that resumes from the checkpoint before the newest."""
    listed = checkpoint_files.listed(run.job.record.paths.checkpoints_dir, ANY)
    for step, path in sorted(listed, reverse=True)[1:]:
        with contextlib.suppress(IncompleteError):
            checkpoint_files.read(path)
            name = shlex.quote(_name(run.job))
            return [f"resume from an earlier one: clusterrun resume {name} --from step-{step}"]
    return [f"start it again from the beginning: {run.resume(from_scratch=True)}"]


_Remedy = tuple[int, Callable[[Run], list[str]]]
_REMEDIES: Final[Mapping[str, _Remedy]] = {  # with the place of the general line that it replaces
    "cuda_oom": (0, _smaller_batch),
    "slurm_time_limit": (1, _longer),
    "host_oom": (0, _more_memory),
    "nccl_timeout": (1, _longer_timeout),
    "port_in_use": (0, _other_port),
    "user_code_exception": (0, _mended),
    "module_missing": (0, _installed),
    "checkpoint_corrupt": (0, _earlier),
    "disk_full": (0, _bytes_to_free),
    "deepspeed_batch_mismatch": (1, _fitting_batch),
    "world_size_mismatch": (0, _fitting_world),
}
