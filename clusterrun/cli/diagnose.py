"""`diagnose`: name why a run failed."""

from __future__ import annotations

import difflib
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from clusterrun.cli.diagnose_look import show_look
from clusterrun.cli.shared import complete, output
from clusterrun.cli.shared.job_text import choose_attempts, find_announced
from clusterrun.cli.shared.times import timestamp
from clusterrun.diagnosis.kinds import INSTALLED, Certainty, Retry
from clusterrun.diagnosis.lines import PrintedLine
from clusterrun.diagnosis.scan import Finding
from clusterrun.diagnosis.table import Domain
from clusterrun.diagnosis.weigh import Verdict
from clusterrun.errors import Exit, JobNotFoundError, UsageError
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.hostlist import fold_hosts, fold_ranks
from clusterrun.shared.state import JobState
from clusterrun.shared.wording import count
from clusterrun.verbs.bundle import write_bundle
from clusterrun.verbs.causes import known_causes
from clusterrun.verbs.diagnose import REPORTED, Diagnosis, diagnose, diagnose_logs
from clusterrun.verbs.remedies import retry_of, to_do

SCHEMA = "clusterrun.diagnose/1"
_SHOWN = 200  # letters of a line
_CAUSES_PAGE = "the page docs/reference/causes.md lists the ids"


@click.command()
@click.argument("job", required=False, shell_complete=complete.jobs)
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="diagnose this attempt")
@click.option(
    "--log",
    "logs",
    multiple=True,
    metavar="FILE",
    help="diagnose this log instead of a job; - is standard input (repeatable)",
)
@click.option(
    "--bundle",
    metavar="FILE.tgz",
    type=click.Path(path_type=Path, dir_okay=False),
    help="also pack diagnosis, configuration and errors for support, without secrets",
)
@click.option(
    "--stacks", is_flag=True, help="show where the ranks of a running job are, twice in 10 seconds"
)
@click.option(
    "--fr", "with_dumps", is_flag=True, help="show which ranks of a running job miss a collective"
)
@click.option("--explain", metavar="ID", help="explain a cause, and list its signs")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.pass_context
def command(
    ctx: click.Context,
    job: str | None,
    *,
    attempt: int | None,
    logs: tuple[str, ...],
    bundle: Path | None,
    stacks: bool,
    with_dumps: bool,
    explain: str | None,
    as_json: bool,
) -> None:
    """Name why a run failed.

    JOB is a job id, the name of a run or its directory  [default: the newest run]. The answer is
    the cause, the ranks and nodes where it began, its consequences, and what to do. It comes from
    Slurm, the agents and the logs, without a network or a model. The exit status is 3 if a failure
    was found, 0 if none was.

    \b
    clusterrun diagnose
    clusterrun diagnose 4711 --attempt 1
    clusterrun diagnose 4711 --stacks --fr
    clusterrun diagnose --log slurm-4711.out
    clusterrun diagnose --explain cuda_oom
    """
    output.expect_json(as_json)
    if explain is not None:
        _explain(explain)
        return
    if logs and (job or attempt or bundle or stacks or with_dumps):
        raise UsageError("--log reads files, not a job", hint="drop --log, or all that is of a job")
    if stacks or with_dumps:
        ctx.exit(show_look(job, stacks=stacks, with_dumps=with_dumps, as_json=as_json))
    if logs:
        begun = time.monotonic()
        found = diagnose_logs(
            logs,
            stdin=sys.stdin.buffer,
            show=lambda lines: output.move(f"read {lines:,} lines", time.monotonic() - begun),
        )
    else:
        record = _found(job)
        name = f"job {record.job_id}" if record.job_id else record.name
        choose_attempts(name, record.paths.attempts(), attempt)
        found = diagnose(record, attempt=attempt)
    if as_json:
        output.answer_json({"schema": SCHEMA, **diagnosis_object(found)})
    else:
        for text in (*_title(found), *_lines(found), *_changes(found), *_left_out(found)):
            output.answer(text)
    if bundle is not None and found.job is not None:
        _pack(bundle, found.job.record, found)
    error = found.job.error if found.job else None
    if error is not None:
        output.note(f"Slurm's own state of the job is missing: {error.message}")
    if found.verdict or found.failure:
        ctx.exit(Exit.NO)
    ctx.exit(error.exit_code if error else Exit.OK)


def _found(job: str | None) -> JobRecord:
    """Find a job; the name of a file is not one."""
    try:
        return find_announced(job)
    except JobNotFoundError as error:
        if job is None or not Path(job).is_file():
            raise
        hint = f"to diagnose a file: clusterrun diagnose --log {shlex.quote(job)}"
        raise JobNotFoundError(error.message, hint=hint) from error


def _pack(target: Path, record: JobRecord, found: Diagnosis) -> None:
    number, unknown = write_bundle(target, record, found.attempt, diagnosis_object(found))
    output.say(f"packed {count(number, 'file')} into {target}; read it before you send it")
    if unknown:
        output.note(
            f"logs and messages are left out: this shell may lack the job's {', '.join(unknown)}; "
            "set it as it was at the submission, and pack again"
        )


def _title(found: Diagnosis) -> Iterator[str]:
    if found.job is not None:
        record = found.job.record
        attempt = f", attempt {found.attempt}" if found.attempt else ""
        yield f"job {record.job_id or '-'} {record.name} {found.job.state.value}{attempt}"
        yield ""


def _explain(name: str) -> None:
    known = known_causes()
    cause = known.get(name)
    if cause is None:
        near = difflib.get_close_matches(name, known, n=1)
        raise UsageError(f"no cause '{name}'", hint=f"use '{near[0]}'" if near else _CAUSES_PAGE)
    signs = [f"{sign.written}  [{sign.seen or 'any version'}]" for sign in cause.signs]
    rows = [*(("do", text) for text in cause.do), *(("sign", text) for text in signs)]
    output.answer_page(f"{cause.id}  {cause.means}", rows)


def _lines(found: Diagnosis) -> Iterator[str]:
    verdict = found.verdict
    if verdict is None:
        yield from _without_verdict(found)
        return
    cause = verdict.cause
    label = "PERHAPS" if verdict.status is Certainty.UNCONFIRMED else "CAUSE"
    domain = "" if cause.domain is Domain.UNKNOWN else f", {cause.domain.value}"
    yield f"{label:<8}{cause.means} ({cause.id}; {verdict.status.value}{domain})"
    if where := _where(verdict):
        yield f"        {where}"
    for line in (each.line for each in verdict.evidence[:3]):
        text = line.text.strip().partition("\n")[0]
        yield f"        {_place(line, is_of_job=found.job is not None)}{_cut(text)}"
    if frame := _own_frame(verdict.evidence):
        yield f"        {_cut(frame)}"
    for label, after in zip(_first("THEN"), verdict.consequences, strict=False):
        where = f" on {count(len(after.ranks), 'rank')}" if after.ranks else ""
        yield f"{label:<8}{after.cause.id}: {count(after.count, 'line')}{where}"
    for label, text in zip(_first("DO"), to_do(found), strict=False):
        yield f"{label:<8}{text}"
    yield f"RETRY   {RETRIES[retry_of(found)].lower()}"


def _without_verdict(found: Diagnosis) -> Iterator[str]:
    job = found.job
    if job is not None and job.suspicions:
        yield from (f"SUSPECT {each.text}" for each in job.suspicions)
    elif job is not None and job.state.is_success:
        yield "nothing failed: the job completed"
    elif job is not None and job.state is JobState.RUNNING:
        name = job.record.job_id or job.record.run_dir
        yield f"no cause found in {count(found.lines, 'line')}, and the job is running"
        yield f"DO      see where its ranks are: clusterrun diagnose {name} --stacks --fr"
    elif job is not None and job.state is JobState.PENDING:
        yield f"the job has not started; to see why: clusterrun status {job.record.job_id}"
    elif failure := found.failure:
        yield f"FAILED  exit {failure.code}: {_cut(failure.reason)}"
        yield f"        no sign of a known cause in {count(found.lines, 'line')}"
        name = job.record.job_id or job.record.run_dir if job else ""
        yield f"DO      read all its lines: clusterrun logs {name} -a"
    else:
        yield f"no cause found in {count(found.lines, 'line')}"


def _changes(found: Diagnosis) -> Iterator[str]:
    for label, change in zip(_first("CHANGED"), found.changes, strict=False):
        yield f"{label:<8}{_cut(change.text)}"


def _left_out(found: Diagnosis) -> Iterator[str]:
    if found.subtracted:
        kinds = count(found.subtracted, "kind")
        yield f"        left out {kinds} of error lines that were also printed when it went well"


RETRIES = {
    Retry.NO: "The same configuration will fail again",
    Retry.YES: "Another try will probably succeed",
    Retry.EXCLUDE: "Another try on other nodes will probably succeed",
    Retry.MAYBE: "Another try may succeed",
}


def _cut(text: str) -> str:
    """Return what is shown of a line, cut between words."""
    if len(text) <= _SHOWN:
        return text
    head = text[:_SHOWN]
    return f"{head.rpartition(' ')[0] or head} …"


def _first(label: str) -> Iterator[str]:
    yield label
    while True:
        yield ""


def _where(verdict: Verdict) -> str:
    parts = []
    if verdict.ranks:
        parts.append(f"{count(len(verdict.ranks), 'rank')}: {fold_ranks(verdict.ranks)}")
    if verdict.nodes:
        parts.append(f"on {fold_hosts(verdict.nodes)}")
    return " ".join(parts)


def _own_frame(evidence: Sequence[Finding]) -> str:
    """Return the last frame in the user's code, or the last frame, or ""."""
    frames = [frame for each in evidence for frame in reversed(each.frames)]
    own = (frame for frame in frames if not INSTALLED.search(frame))
    return next(own, "") or next(iter(frames), "")


def _place(line: PrintedLine, *, is_of_job: bool) -> str:
    """Name who reported or printed a line: a source, a place in a file, or a rank and its node."""
    if line.source in REPORTED:
        return f"{line.source}: "
    if line.file:
        return f"{line.file}:{line.number}: "
    if not is_of_job:
        return f"line {line.number}: "
    rank = f"rank {line.rank}" if line.rank is not None else "launcher"
    return f"{rank} on {line.node}: "


def diagnosis_object(found: Diagnosis) -> dict[str, Any]:
    """Describe a diagnosis for JSON."""
    verdict = found.verdict
    doubts = found.job.suspicions if found.job else ()
    return {
        "job_id": found.job.record.job_id or None if found.job else None,
        "attempt": found.attempt or None,
        "subtracted": found.subtracted,
        "suspicions": [{"kind": each.kind.value, "text": each.text} for each in doubts],
        "verdict": _verdict_object(verdict, found) if verdict else None,
        "consequences": [
            {
                "class": each.cause.id,
                "count": each.count,
                "ranks": fold_ranks(each.ranks),
                "first_ts": timestamp(each.first.at),
            }
            for each in (verdict.consequences if verdict else ())
        ],
        "changes": [{"nodes": list(each.nodes), **each.check._asdict()} for each in found.changes],
        "evidence": [_evidence(each) for each in (verdict.evidence if verdict else ())],
    }


def _verdict_object(verdict: Verdict, found: Diagnosis) -> dict[str, Any]:
    cause, first = verdict.cause, verdict.first
    return {
        "class": cause.id,
        "role": first.role.value,
        "domain": cause.domain.value,
        "status": verdict.status.value,
        "ranks": fold_ranks(verdict.ranks),
        "nodes": list(verdict.nodes),
        "first_ts": timestamp(first.line.at),
        "message": first.line.text.strip(),
        "frames": list(first.frames),
        "retry": retry_of(found).value,
        "exclude_nodes": list(verdict.nodes) if cause.blames_node else [],
        "means": cause.means,
        "do": to_do(found),
    }


def _evidence(finding: Finding) -> dict[str, Any]:
    line = finding.line
    is_reported = line.source in REPORTED
    return {
        "source": line.source.lower() if is_reported else "log",
        "file": line.file,
        "line": line.number,
        "rank": line.rank,
        "node": line.node or None,
        "text": line.text.strip(),
    }
