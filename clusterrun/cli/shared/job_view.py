"""What verbs show of a job, as text and as JSON."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from clusterrun.backends.slurm.reasons import Fact, FactKind, Outlook, PendingReason, Sooner
from clusterrun.cli.shared import output
from clusterrun.diagnosis.kinds import Certainty
from clusterrun.errors import UsageError
from clusterrun.rundir.end import Cause
from clusterrun.rundir.events import Phase
from clusterrun.rundir.outcome import Outcome, ShortVerdict
from clusterrun.rundir.record import JobRecord, list_records
from clusterrun.rundir.usage import Sample, percent, share_text
from clusterrun.shared.amounts import clock
from clusterrun.shared.hostlist import fold_hosts, fold_ranks, named, parse_hostlist
from clusterrun.shared.state import JobState
from clusterrun.shared.wording import count
from clusterrun.verbs.find import FORWARDED, is_of_other_project, locate, refuse_elsewhere

if TYPE_CHECKING:  # slow to import
    from clusterrun.backends.evidence import AttemptSummary, TrainingProgress
    from clusterrun.backends.status import JobStatus

_TRACEBACK = "Traceback (most recent call last):"


def find_announced(job: str | None) -> JobRecord:
    """Find a job; print which one, unless the name can mean only this run of this project."""
    return find_all_announced([job])[0]


def find_all_announced(jobs: Sequence[str | None]) -> list[JobRecord]:
    """Find jobs as `find_announced` does. Raises ElsewhereError if they are on another host."""
    found = [(job or "", locate_announced(job)) for job in jobs]
    refuse_elsewhere(found)
    return [record for _, record in found]


def locate_announced(job: str | None) -> JobRecord:
    """Find a job as `find_announced` does, wherever its run directory is."""
    record = locate(job)
    if job is None and not FORWARDED:
        where = os.path.relpath(record.paths.runs_dir.root)
        output.say(f"using job {record.job_id} ({record.name}, newest run in {where})")
    if job is None or job in FORWARDED:  # the machine that forwarded it has announced it
        return record
    is_name = job == record.name and job not in record.job_ids
    namesakes = list_records(record.paths.runs_dir, 2, name=job) if is_name else ()
    newest = ", newest of its name" if len(namesakes) > 1 else ""
    is_path = os.path.exists(job)  # a path already shows the project of the run
    place = f" of {record.workdir}" if not is_path and is_of_other_project(record) else ""
    if newest or place:
        output.say(f"using job {record.job_id} ({record.name}{newest}){place}")
    return record


def failure_text(failure: Outcome) -> str:
    """Name the failure that ended an attempt, on one line."""
    return " ".join(" ".join(failure_lines(failure)).split())


def how_it_ended(outcome: Outcome, why: str = "") -> str:
    """Return `why` an attempt ended (by default, its cause), and at which step."""
    how = why or outcome.cause.value.replace("_", " ")
    return how if outcome.step is None else f"{how} at step {outcome.step}"


def lost_steps(attempt: AttemptSummary) -> str:
    """Return how many steps were lost, and about how much time."""
    about = f" (about {clock(attempt.lost_s)})" if attempt.lost_s is not None else ""
    return f"{count(attempt.lost_steps or 0, 'step')}{about}"


def earlier_checkpoint(job: JobStatus) -> str:
    """Name the newest checkpoint of the earlier attempts by its step; "" for none."""
    for attempt in reversed(job.attempts):
        if attempt.outcome and attempt.outcome.checkpoint is not None:
            step = attempt.outcome.checkpoint
            return f"step {step}, the newest when attempt {attempt.number} ended"
    return ""


def failure_lines(failure: Outcome) -> Iterator[str]:
    """Name the failure that ended an attempt; its message keeps its lines, without tracebacks."""
    how = f"exit {failure.code}" if failure.code else ""
    if failure.signal:  # a rank's message names its signal
        how = "" if failure.cause is Cause.SIGNAL else f"killed by signal {failure.signal}"
    who = _who(failure) if failure.message else ""  # the reason names the rank itself
    text = ": ".join(part for part in (who, how, failure.message or failure.reason) if part)
    in_traceback = False
    for line in text.splitlines():
        # A traceback ends before the first line that is neither indented nor empty: the exception.
        in_traceback = line.endswith(_TRACEBACK) or (in_traceback and line[:1] in ("", " "))
        if line.strip() and not in_traceback:
            yield line


def choose_attempts(title: str, known: list[int], wanted: int | str | None) -> list[int]:
    """Return the wanted `known` attempts, oldest first; [] before the start. Raises UsageError."""
    if wanted is None:  # the newest
        return known[-1:]
    if isinstance(wanted, str):  # "all"
        return known
    number = wanted if wanted > 0 else max(known, default=0) + wanted  # -1: before the newest
    if number not in known:
        hint = f"choose from {fold_ranks(known)}" if len(known) > 1 else "choose 1"
        hint = hint if known else "wait until it starts"
        raise UsageError(f"{title} has no attempt {wanted}", hint=hint)
    return [number]


def verdict_line(verdict: ShortVerdict) -> str:
    """Name the cause of a failure, and where it began, on one line."""
    where = []
    if verdict.ranks:
        where.append(f"rank{'s' if len(verdict.ranks) > 1 else ''} {fold_ranks(verdict.ranks)}")
    if verdict.nodes:
        where.append(f"on {fold_hosts(verdict.nodes)}")
    head = "perhaps: " if verdict.status is Certainty.UNCONFIRMED else ""
    facts = ", ".join(filter(None, (verdict.cause, " ".join(where))))
    return f"{head}{verdict.means.rstrip('.')} ({facts})"


def brief(text: str) -> str:
    """Return the first line of a text, cut if it is long for a table."""
    return cut(text, 100)


def cut(text: str, most: int = 200) -> str:
    """Return what is shown of a text: `most` letters of its first line, cut between words."""
    line = next(iter(text.splitlines()), "")
    head = line[: most + 1].rpartition(" ")[0] or line[:most]
    return line if len(line) <= most else f"{head} …"


def _who(failure: Outcome) -> str:
    if failure.rank is None:
        return f"node {failure.node}" if failure.node else ""
    return f"rank {failure.rank}" + (f" on {failure.node}" if failure.node else "")


def where_or_why(job: JobStatus) -> str:
    """Return where a job runs, or why it waits."""
    if job.pending is None:
        is_local = job.record.cluster.scheduler.is_this_machine
        return f"{nodelist(job)} (simulated nodes)" if is_local and job.nodelist else nodelist(job)
    start = f"; starts about {local_time(job.expected_start)}" if job.expected_start else ""
    return f"{job.pending.text}{start}"


def nodelist(job: JobStatus) -> str:
    """Name the hosts of a job in Slurm's short form, each once: simulated nodes share one."""
    try:
        return fold_hosts(parse_hostlist(job.nodelist))
    except UsageError:
        return job.nodelist


def local_time(epoch_s: float) -> str:
    """Write a moment in local time, without the day if it is less than half a day away."""
    then = datetime.fromtimestamp(epoch_s)
    is_near = abs(then - datetime.now()) < timedelta(hours=12)
    return f"{then:%H:%M}" if is_near else f"{then:%Y-%m-%d %H:%M}"


def facts(job: JobStatus) -> list[str]:
    """Return a sentence for each fact about a wait."""
    return [fact_text(fact) for fact in job.outlook.facts] if job.outlook else []


def fact_text(fact: Fact) -> str:
    """Return one fact in words; by its kind, `detail` is a GPU type, a reason or a name."""
    where = f"partition '{fact.partition}'"
    with_gpus = f" with {fact.detail} GPUs" if fact.detail else ""
    asked = f"{count(fact.asked or 0, 'node')}{with_gpus}"
    if fact.kind is FactKind.NODES:
        uses = ", ".join(f"{number} {use.value}" for use, number in fact.uses)
        return f"needs {asked}; {where} has {fact.limit}: {uses}"
    if fact.kind is FactKind.NODES_OUT:
        reason = f": {fact.detail}" if fact.detail else ""
        is_one = not {"[", ","} & set(fact.nodes)  # a hostlist of one name
        return f"{fact.nodes} {'is' if is_one else 'are'} {fact.state}{reason}"
    if fact.kind is FactKind.RESERVATION:
        kind = f"{fact.state} reservation" if fact.state else "reservation"
        nodes = f" of {fact.nodes}" if fact.nodes else ""
        span = f"from {local_time(fact.start or 0)} to {local_time(fact.end or 0)}"
        return f"{kind} '{fact.detail}'{nodes}: {span}"
    if fact.kind is FactKind.TOO_LONG:
        limit = "no --time" if fact.asked is None else f"--time {clock(fact.asked)}"
        return f"{limit}, {where} allows {clock(fact.limit or 0)}"
    # Only TOO_MANY_NODES is left.
    return f"{asked} requested, {where} offers at most {fact.limit}"


def sooner(job: JobStatus) -> Iterator[str]:
    """Yield changes that may start a job sooner, with their commands; then how to drop the job."""
    changes = job.outlook.sooner if job.outlook else ()
    yield from (f"{_why(change)}: {command(change, job)}" for change in changes)
    if changes and not job.has_checkpoint:
        yield f"resubmit starts a new run; to end this job: clusterrun cancel {job.record.job_id}"


def _why(change: Sooner) -> str:
    """Return why a change may start the job sooner."""
    if change.idle is None:  # only the time limit changes
        return f"with a time limit of {clock(change.limit_s or 0)}"
    are = f"{count(change.idle, 'node')} {'is' if change.idle == 1 else 'are'} idle now"
    where = f" in partition '{change.partition}'" if change.partition else ""
    limit = f", for at most {clock(change.limit_s)}" if change.limit_s else ""
    return f"{are}{where}{limit}"


def command(change: Sooner, job: JobStatus) -> str:
    """Return the command for a change; a run with a checkpoint is resumed from there."""
    limit = clock(change.limit_s) if change.limit_s else ""
    given = {"--partition": change.partition, "--nodes": change.nodes, "--time": limit}
    options = " ".join(f"{key} {shlex.quote(str(value))}" for key, value in given.items() if value)
    name = job.record.job_id
    if job.has_checkpoint:
        return f"clusterrun cancel {name} && clusterrun resume {name} {options}"
    return f"clusterrun resubmit {name} {options}"


def warn_stuck(job: JobStatus) -> None:
    """Warn about a job that will not start unless somebody changes something."""
    notes = (*facts(job), f"to end it, run: clusterrun cancel {job.record.job_id}")
    output.warn(f"job {job.record.job_id} is pending: {where_or_why(job)}", notes=notes)


# How far a job is

SILENCE_S = 10.0  # a step is reported at most once a second
SILENT_STEPS = 3  # or the time of so many steps, if they take longer


def steps_done(progress: TrainingProgress) -> str:
    """Write `380/46880`, `380` without a total, or "" if nothing is known."""
    if progress.step is None:
        return ""
    return str(progress.step) if progress.total is None else f"{progress.step}/{progress.total}"


def rate(progress: TrainingProgress) -> str:
    """Write `1.2 steps/s`, or in the unit of a progress bar: `1.2 it/s`."""
    unit = "steps" if progress.unit == "step" else progress.unit
    return f"{progress.rate_per_s:.3g} {unit}/s" if progress.rate_per_s else ""


def eta_s(job: JobStatus) -> float | None:
    """Return the seconds left; None if unknown, or if no step has ended for a while."""
    step, total, rate_per_s = job.progress.step, job.progress.total, job.progress.rate_per_s
    if step is None or total is None or step >= total or not rate_per_s:
        return None
    if job.state is not JobState.RUNNING or silence(job.progress):
        return None
    return (total - step) / rate_per_s


def silence(progress: TrainingProgress) -> str:
    """Return `last reported 00:02:31 ago` if no step has ended for unusually long, else ""."""
    from clusterrun.backends.evidence import ProgressSource

    silent_s = time.time() - (progress.reported_at or 0.0)
    step_s = 1.0 / progress.rate_per_s if progress.rate_per_s else SILENCE_S
    is_usual = silent_s <= max(SILENCE_S, SILENT_STEPS * step_s)
    if is_usual or progress.step in (None, progress.total):  # at the total, no step follows
        return ""
    verb = "moved" if progress.source is ProgressSource.OUTPUT else "reported"
    return f"last {verb} {clock(silent_s)} ago"


def output_age_s(progress: TrainingProgress) -> float | None:
    """Return the seconds since the ranks last printed something."""
    if progress.output_at is None:
        return None
    return max(0.0, time.time() - progress.output_at)  # another machine's clock


def usage_lines(job: JobStatus) -> Iterator[tuple[str, str]]:
    """Yield the row of the fullest host and GPU memory: now, or for an ended job, at its peak."""
    hosts, gpus, is_over = [], [], job.state.is_terminal
    for node, each in job.usage.items():
        used = each.host_peak_bytes if is_over else each.host_bytes
        hosts.append((used, each.host_limit_bytes, node))
        for gpu in each.gpus:
            used = gpu.memory_peak_bytes if is_over else gpu.memory_bytes
            gpus.append((used, gpu.memory_total_bytes, f"GPU {gpu.index} of {node}"))
    found = [text for text in (_worst("host", hosts), _worst("GPU", gpus)) if text]
    if found:
        yield "memory", f"{'peaks: ' if is_over else ''}{', '.join(found)}"


def _worst(what: str, rows: list[tuple[int | None, int | None, str]]) -> str:
    """Describe the fullest memory of some (used, limit, place); "" if no share is known."""
    known = [row for row in rows if percent(row[0], row[1]) is not None]
    if not known:
        return ""
    used, limit, where = max(known, key=lambda row: percent(row[0], row[1]) or 0)
    place = f" ({where})" if len(rows) > 1 else ""
    return f"{what} {share_text(used, limit)}{place}"


SHOWN_S = 0.05  # a shorter phase is not named
_UNTIL = {
    Phase.LAUNCHER: "until the ranks started",
    Phase.RENDEZVOUS: "until all ranks joined",
    Phase.FIRST_STEP: "to the first step",
}


def startup_lines(job: JobStatus) -> Iterator[tuple[str, str]]:
    """Yield a row such as `42 s to the first step: …` on the newest start, unless the job waits."""
    newest = job.attempts[-1] if job.attempts and job.pending is None else None
    startup = newest.startup if newest else None
    if newest is None or startup is None or not startup.phases:
        return
    label, since = "start", ""
    if startup.is_restart:
        event = "failure" if startup.phases[0][0] is Phase.STOP else "end"  # STOP: it failed
        label, since = "restart", f" from the {event} of attempt {newest.number - 1}"
    until = _UNTIL.get(startup.phases[-1][0], "")
    shown = ((phase.value, took_s) for phase, took_s in startup.phases if took_s >= SHOWN_S)
    phases = ", ".join(f"{name} {seconds(took_s)}" for name, took_s in shown).replace("_", " ")
    yield label, f"{seconds(startup.total_s)}{since} {until}: {phases}"


def seconds(span_s: float) -> str:
    """Format a span of time: `0.4 s`, `42 s`, `00:02:31`."""
    if span_s >= 99.5:  # it would round to "100 s"; clock() rounds down
        return clock(span_s + 0.5)
    return f"{span_s:.0f} s" if span_s >= 9.95 else f"{span_s:.1f} s"


TICK_S = 1.0
_NEXT = {  # what a start does after a phase
    None: "setting up",
    Phase.SETUP: "importing torch",
    Phase.PREFLIGHT: "importing torch",
    Phase.FORGE: "waiting for the other nodes",
    Phase.AGENTS: "starting the ranks",
    Phase.LAUNCHER: "importing modules, joining the ranks",
}


class WaitLine:
    """Shows what a job does, and the seconds since that began; off a terminal it does nothing."""

    def __init__(self) -> None:
        self._doing = ""
        self._since = self._due_at = time.monotonic()

    def pause(self, job: JobStatus, pause_s: float) -> None:
        """Pause, and meanwhile show what a job does."""
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0:
            self.show(job)
            time.sleep(min(left_s, TICK_S))

    def show(self, job: JobStatus) -> None:
        """Show what a job does, at most once a second."""
        now = time.monotonic()
        if now < self._due_at or not output.can_show_progress():
            return
        text, self._due_at = activity(job), now + TICK_S
        if (doing := text.partition(":")[0]) != self._doing:  # what follows the colon changes
            self._doing, self._since = doing, now
        output.show_progress(text, now - self._since)


def activity(job: JobStatus) -> str:
    """Return what a job does. Its files show the start sooner than the scheduler does."""
    from clusterrun.backends.evidence import read_evidence

    record, progress, paths = job.record, job.progress, job.record.paths
    state, evidence = job.state, read_evidence(paths)
    has_begun = bool(evidence.attempt) and not paths.outcome(evidence.attempt).exists()
    is_starting = has_begun and state in (JobState.PENDING, JobState.CONFIGURING)
    if state is not JobState.RUNNING and not is_starting:
        why = where_or_why(job) if job.pending else ""
        return ": ".join(filter(None, (state.value.lower(), why)))
    reached = evidence.reached if has_begun else None  # the newest phase that has ended
    has_output = progress.step is not None or progress.output_at is not None
    if reached in _NEXT and not has_output:
        ready = min(len([*paths.events_dir.glob("*.jsonl")]), record.nodes)  # agents that started
        return f"starting: {ready} of {count(record.nodes, 'node')}, {_NEXT[reached]}"
    done = ", ".join(filter(None, (steps_done(progress), rate(progress))))
    return f"running: step {done}" if done else "running"


_OF_RECORD = ("name", "run_id", "nodes", "world_size", "earlier_job_ids", "chained_job_ids")
_OF_JOB = ("attempt", "elapsed_s", "limit_s", "checkpoint", "notes", "damaged")


def job_object(job: JobStatus) -> dict[str, Any]:
    """Describe a job for JSON; null is unknown."""
    record = job.record
    pending = job.pending or PendingReason(code=job.reason, text=job.reason, can_start=None)
    reason = {name: getattr(pending, name) for name in ("code", "text", "can_start")}
    return {
        "job_id": record.job_id or None,
        **{name: getattr(record, name) for name in _OF_RECORD},
        **{name: getattr(job, name) for name in _OF_JOB},
        **{name: timestamp(getattr(job, name)) for name in ("expected_start", "start", "end")},
        "run_dir": (record.home or record).run_dir,  # on the host that has it
        "backend": record.cluster.value,
        "cluster": record.slurm_cluster,
        **end_object(job),
        "reason": {**reason, **outlook_object(job)} if pending.code else None,
        "suspicions": [{"kind": each.kind.value, "text": each.text} for each in job.suspicions],
        "nodelist": nodelist(job) or None,
        "gpus": record.nodes * record.gpus_per_node,
        "proven_world_size": job.world_size,
        "preflight": [{**each.to_data(), "nodes": named(each.nodes)} for each in job.preflight],
        "engine": job.engine or None,
        "submitted": timestamp(record.submitted_at),
        "progress": _progress(job),
        "usage": [_usage(node, sample) for node, sample in job.usage.items()],
        "attempts": [attempt_object(attempt) for attempt in job.attempts],
    }


def _progress(job: JobStatus) -> dict[str, Any]:
    progress, left_s, output_s = job.progress, eta_s(job), output_age_s(job.progress)
    return {
        **{name: getattr(progress, name) for name in ("step", "total", "rate_per_s")},
        "eta_s": None if left_s is None else round(left_s, 1),
        "source": None if progress.step is None else progress.source.value,
        "bar": progress.bar or None,
        "reported": timestamp(progress.reported_at),
        "last_output_s": None if output_s is None else round(output_s, 1),
        "metrics": dict(progress.metrics),
    }


def end_object(job: JobStatus) -> dict[str, Any]:
    """Describe how a job ended."""
    failure = job.failure
    verdict = failure.verdict if failure else None
    return {
        "state": job.state.value,
        "exit": {"code": job.exit_code, "signal": job.exit_signal},
        "verdict": failure
        and {
            "rank": failure.rank,
            "node": failure.node or None,
            "code": failure.code,
            "signal": failure.signal or None,
            "message": failure.message or failure.reason,
            "class": verdict.cause if verdict else None,
            "means": verdict.means if verdict else None,
            "status": verdict.status.value if verdict else None,
        },
    }


def attempt_object(attempt: AttemptSummary) -> dict[str, Any]:
    """Describe an attempt for JSON; null is unknown."""
    outcome, startup = attempt.outcome, attempt.startup
    timed = outcome if outcome and outcome.started_at else None  # 0: no agent reported the start
    names = ("job_id", "code", "cause", "reason", "step", "checkpoint", "next", "why", "rule")
    return {
        "attempt": attempt.number,
        **{name: getattr(outcome, name, None) for name in names},
        "nodes": attempt.nodes,
        "start": timestamp(timed.started_at) if timed else None,
        "end": timestamp(timed.ended_at) if timed else None,
        "elapsed_s": round(timed.ended_at - timed.started_at, 3) if timed else None,
        "lost_steps": attempt.lost_steps,
        "lost_s": None if attempt.lost_s is None else round(attempt.lost_s, 3),
        "exclude": outcome.exclude if outcome else (),
        "startup": startup
        and {
            "is_restart": startup.is_restart,
            "total_s": round(startup.total_s, 3),
            "phases": [{"phase": x.value, "seconds": round(s, 3)} for x, s in startup.phases],
        },
    }


def _usage(node: str, sample: Sample) -> dict[str, Any]:
    """Describe the newest sample of a node for JSON, with its age instead of its attempt."""
    values = {**vars(sample), "ranks": {str(rank): used for rank, used in sample.ranks}}
    values["gpus"] = [vars(gpu) for gpu in sample.gpus]
    values["alerts"] = [
        {"kind": each.kind.value, "gpu": each.gpu, "since": timestamp(each.at)}
        for each in sample.alerts
    ]
    del values["attempt"], values["at"]
    age_s = round(max(0.0, time.time() - sample.at), 1)
    return {"node": node, "sampled": timestamp(sample.at), "age_s": age_s, **values}


def outlook_object(job: JobStatus) -> dict[str, Any]:
    """Describe for JSON facts about a wait and changes that may end it; [] if not looked up."""
    outlook = job.outlook or Outlook()
    facts = [
        {
            **_described(fact),
            "text": fact_text(fact),
            "uses": {use.name.lower(): number for use, number in fact.uses},
            "start": timestamp(fact.start),
            "end": timestamp(fact.end),
        }
        for fact in outlook.facts
    ]
    sooner = [{"kind": x.kind, **_described(x), "command": command(x, job)} for x in outlook.sooner]
    return {"facts": facts, "sooner": sooner}


def _described(what: Fact | Sooner) -> dict[str, Any]:
    """Return the fields; an empty text is unknown, as is None."""
    return {name: None if value == "" else value for name, value in vars(what).items()}


def timestamp(epoch_s: float | None) -> str | None:
    """Write a time as RFC 3339 in UTC.

    >>> timestamp(0.25), timestamp(None)
    ('1970-01-01T00:00:00.250Z', None)
    """
    if epoch_s is None:
        return None
    then = datetime.fromtimestamp(epoch_s, timezone.utc)
    return then.isoformat(timespec="milliseconds").replace("+00:00", "Z")
