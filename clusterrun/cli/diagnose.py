"""`diagnose`: find the cause of a failure."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from clusterrun.cli.shared import complete, output
from clusterrun.cli.shared.closing import failure_rows
from clusterrun.cli.shared.help import explain_option
from clusterrun.cli.shared.job_view import choose_attempts, cut, find_announced, timestamp
from clusterrun.config.secrets import is_secret, redacted
from clusterrun.diagnosis.weigh import Verdict
from clusterrun.errors import ClusterrunError, Exit, JobNotFoundError, UsageError
from clusterrun.rundir import reading
from clusterrun.rundir.attempt import SCHEMA, read_attempt
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord
from clusterrun.shared import files, shell
from clusterrun.shared.hostlist import fold_hosts, fold_ranks
from clusterrun.shared.state import JobState
from clusterrun.shared.wording import count
from clusterrun.verbs.diagnose import (
    LOG_ENDS,
    REPORTERS,
    STDIN,
    Diagnosis,
    causes,
    diagnose,
    diagnose_logs,
    place_of,
    short,
)
from clusterrun.verbs.hangs import LASTING_S, Hang, groups, locate_ranks, sentences
from clusterrun.verbs.remedies import retry_of, run_of, to_do

_SLURM_ID: Final = re.compile(r"[0-9]+(?:_[0-9]+)?")  # of a job, or of a task of a job array
_NAMED: Final = 2  # logs of a job: its output and its errors


@click.command()
@click.argument("words", nargs=-1, metavar="[JOB | FILE...]", shell_complete=complete.jobs)
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="diagnose this attempt")
@click.option(
    "--bundle",
    metavar="FILE.tgz",
    type=click.Path(path_type=Path, dir_okay=False),
    help="also pack diagnosis, configuration and errors for support, without known secrets",
)
@click.option(
    "--stacks",
    "--fr",
    "stacks",
    is_flag=True,
    help="show what the ranks of a running job are doing, and which ranks a collective waits for",
)
@explain_option
@output.json_option
def command(
    words: tuple[str, ...],
    *,
    attempt: int | None,
    bundle: Path | None,
    stacks: bool,
    as_json: bool,
) -> int:
    """Find the cause of a failure.

    JOB is a job id, the name of a run or its directory  [default: the newest run]. diagnose prints
    the cause, the ranks and nodes where it began, its consequences, and what to do. It reads the
    records of Slurm and the agents, and the logs. It needs no network and no language model. The
    exit status is 3 if diagnose found a failure, 0 if it found none.

    For a job that clusterrun did not start, pass its logs: files, a directory, or - for standard
    input. Slurm names the logs of a job id that it still knows.

    \b
    clusterrun diagnose
    clusterrun diagnose 4711 --attempt 1
    clusterrun diagnose 4711 --stacks
    clusterrun diagnose slurm-4711.out
    clusterrun explain cuda_oom
    """
    record, logs, state = _find(words)
    if record is None and (attempt or bundle or stacks):
        text = "--attempt, --bundle and --stacks need a run of clusterrun"
        raise UsageError(text, hint="pass its job id or directory, not a log")
    if record is None:
        stdin = sys.stdin.buffer if sys.stdin else io.BytesIO()  # None: closed
        found = diagnose_logs(logs, stdin=stdin, state=state)
    elif stacks:
        return _show_stacks(record, as_json=as_json)
    else:
        name = f"job {record.job_id}" if record.job_id else record.name
        choose_attempts(name, record.paths.attempts(), attempt)  # refuses an unknown one
        found = diagnose(record, attempt=attempt)
    if as_json:
        output.answer_json({"schema": "clusterrun.diagnose/1", **diagnosis_object(found)})
    else:
        output.answer_rows(_rows(found))
    if bundle is not None and found.job is not None:
        _pack(bundle, found.job.record, found)
    for line in causes()[1]:
        output.note(line)
    error = found.job.error if found.job else None
    if error is not None:
        output.note(f"the job's state in Slurm is unknown: {error.message}")
    if found.verdict or found.failure:
        return Exit.NO
    return error.exit_code if error else Exit.OK


def _find(words: Sequence[str]) -> tuple[JobRecord | None, Sequence[str], JobState | None]:
    """Return the run that is meant, or the logs to read, and a state that Slurm knows.

    A run comes before a file or a directory of its name, and both come before Slurm.
    """
    if len(words) > 1 or any(x == STDIN or x.lower().endswith(LOG_ENDS) for x in words):
        return None, words, None
    word = words[0] if words else ""
    try:
        return find_announced(word if words else None), (), None
    except JobNotFoundError as unknown:
        if word and os.path.exists(word):  # it may be a pipe: <(command)
            return None, words, None
        return None, *_ask_slurm(word, unknown)


def _ask_slurm(word: str, unknown: JobNotFoundError) -> tuple[Sequence[str], JobState | None]:
    """Return the logs that Slurm names for a job, and the state that all its tasks have."""
    states, logs = frozenset[JobState](), tuple[str, ...]()
    if _SLURM_ID.fullmatch(word) and shell.find("scontrol"):
        from clusterrun.backends.slurm.query import outputs_of  # most logs are named

        states, logs = outputs_of(word)
    if not logs:
        hint = "or pass the job's log, such as slurm-4711.out; - is standard input"
        raise JobNotFoundError(unknown.message, hint=(*unknown.hints, hint)) from unknown
    known = f"job {word} is {', '.join(sorted(states))} in Slurm"
    found = [log for log in logs if os.path.exists(log)]  # False: or it may not be seen
    if not found:
        raise UsageError(f"{known}, and has no log here", hint=f"Slurm names its log: {logs[0]}")
    named = " and ".join(found) if len(found) <= _NAMED else count(len(found), "log")
    output.say(f"{known}; reading {named}")
    return found, next(iter(states)) if len(states) == 1 else None


def _rows(found: Diagnosis) -> Iterator[output.Row]:
    """Yield job, state and signs, then the rows that `status` prints, here with all advice."""
    if found.job:
        yield "job", f"{found.job.record.job_id or '-'}  {found.job.record.name}"
        attempt = f", attempt {found.attempt}" if found.attempt else ""
        yield "state", f"{output.painted_state(found.job.state.value)}{attempt}"
    rows_below = list[output.Row]()
    if found.verdict or found.failure:
        verdict, after = short(found), _consequences(found)
        rows_below += failure_rows(found.job, found.failure, verdict, found.attempt, followed=after)
    if found.verdict is None:
        yield from _without_verdict(found)
    else:
        text_below = "\n".join(text for _, text in rows_below)
        yield from output.labelled("signs", _signs(found, text_below))
    yield from rows_below


def _signs(found: Diagnosis, text_below: str) -> list[str]:
    """Return the first two signs that the text printed below does not repeat."""
    lines = [each.line for each in found.verdict.evidence] if found.verdict else []
    signs = [(cut(line.text.strip()), place_of(line, found)) for line in lines]
    return [f"{place}: {text}" for text, place in signs if text not in text_below][:2]


def _consequences(found: Diagnosis) -> Iterator[str]:
    """Yield the consequences: of each kind, the number of its lines and the first of them."""
    for each in found.verdict.consequences if found.verdict else ():
        where = f" on {count(len(each.ranks), 'rank')}" if each.ranks else ""
        yield f"{count(each.count, 'line')}{where} such as: {cut(each.first.text.strip())}"


def _without_verdict(found: Diagnosis) -> Iterator[output.Row]:
    """Yield why there is no verdict, and where to look instead."""
    job = found.job
    name = shlex.quote(job.record.job_id or job.record.run_dir) if job else ""
    if job is not None and job.suspicions:
        yield from output.labelled("suspect", (each.text for each in job.suspicions))
    elif job is not None and job.state.is_success:
        yield "", "nothing failed: the job completed"
    elif job is not None and job.state is JobState.PENDING:
        yield "", f"the job has not started; to see why: clusterrun status {name}"
    else:
        yield "signs", f"no cause found in {count(found.lines, 'line')}"
        if job is not None and job.state is JobState.RUNNING:
            yield "next", f"see where the ranks are: clusterrun diagnose {name} --stacks"


def diagnosis_object(found: Diagnosis) -> dict[str, Any]:
    """Describe a diagnosis for JSON."""
    verdict = found.verdict
    evidence = [each.line for each in verdict.evidence] if verdict else []
    doubts = found.job.suspicions if found.job else ()
    return {
        "job_id": (found.job.record.job_id or None) if found.job else None,
        "attempt": found.attempt or None,
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
        "evidence": [
            {
                "source": line.source.lower() if line.source in REPORTERS else "log",
                "file": line.file,
                "line": line.number,
                "rank": line.rank,
                "node": line.node or None,
                "text": line.text.strip(),
            }
            for line in evidence
        ],
    }


def _verdict_object(verdict: Verdict, found: Diagnosis) -> dict[str, Any]:
    cause, first = verdict.cause, verdict.first
    shortened = short(found)
    assert shortened is not None  # it shortens `verdict`
    run = run_of(found.job, shortened, found.attempt) if found.job else None
    advice = to_do(shortened, run, found.failure)
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
        "retry": retry_of(shortened, run).value,
        "exclude_nodes": list(verdict.nodes) if cause.blames_node else [],
        "means": cause.means,
        "do": [str(each) for each in advice],
    }


def _show_stacks(record: JobRecord, *, as_json: bool) -> Exit:
    """Print where the ranks are; return Exit.NO if ranks miss a collective."""
    from clusterrun.verbs.status import status

    found = status(record)
    hang = locate_ranks(found)
    head = {"job_id": found.record.job_id, "attempt": found.attempt}
    if as_json:
        output.answer_json({"schema": "clusterrun.look/1", **head, **_hang_object(hang)})
    else:
        output.answer(f"job {head['job_id']} {found.record.name}, attempt {found.attempt}")
        for text in _hang_lines(hang):
            output.answer(text)
    return Exit.NO if hang.is_lasting else Exit.OK


def _hang_lines(hang: Hang) -> Iterator[str]:
    """Yield where the ranks are, and, from flight recorders (FR), which a collective waits for."""
    for group in groups(hang):
        nodes = {hang.nodes.get(rank, "?") for rank in group.ranks}
        ranks = f"{count(len(group.ranks), 'rank')}: {fold_ranks(group.ranks)}"
        waits = ", waiting" if group.is_waiting else ""
        yield f"STACKS  {ranks} on {fold_hosts(sorted(nodes))}{waits}"
        yield f"        {group.where}"
    stuck = hang.stuck if hang.is_lasting else None
    texts = [text for _, text in sentences(hang, stuck)] if stuck else []
    if hang.dumped and not texts:
        texts = [f"no rank has waited in a collective for {LASTING_S:.0f} s"]
    yield from (f"FR      {text}" for text in texts)
    if stuck and stuck.since:
        yield f"        for {hang.looked_at - stuck.since:.0f} s"
    if missing := len(hang.nodes) - hang.dumped:  # `nodes` has an entry for each rank
        label = "" if texts else "FR"
        ranks = count(missing, "rank")
        yield f"{label:<8}{ranks} left no dump: the flight recorder is off, or hangs"
    if hang.silent:
        yield f"SILENT  {fold_hosts(hang.silent)} did not answer"


def _hang_object(hang: Hang) -> dict[str, Any]:
    waiting: dict[str, Any] | None = None
    if hang.stuck is not None and hang.is_lasting:
        stuck = hang.stuck
        waiting = {
            "kind": stuck.kind.value,
            "group": stuck.group,
            "collective": stuck.call.op,
            "number": stuck.number,
            "where": stuck.call.where,
            "waiting": fold_ranks(stuck.waiting),
            "ranks": fold_ranks(stuck.odd),  # those to blame
            "nodes": sorted({hang.nodes.get(rank, "?") for rank in stuck.odd}),
            "since": stuck.since or None,
        }
    places = [{**group._asdict(), "ranks": fold_ranks(group.ranks)} for group in groups(hang)]
    return {"groups": places, "stuck": waiting, "dumped": hang.dumped, "silent": [*hang.silent]}


# The archive of --bundle, which can be given to others: without secrets

MOST_BYTES: Final = 256 * 1024  # of a file: its last part
MOST_NODES: Final = 64  # whose logs are packed, those of the verdict first
_LEAST_LETTERS: Final = 6  # of a value that is replaced; a shorter one may be a common word
_NO_TEXTS: Final = ("class", "role", "domain", "status", "ranks", "nodes", "retry")  # of a verdict


def _pack(target: Path, record: JobRecord, found: Diagnosis) -> None:
    """Write a `.tgz` of a run's diagnosis, records, configuration and errors.

    Values of variables that were passed by name are removed; no output is packed if this shell may
    lack one of these values. Raises ClusterrunError if `target` exists or cannot be written.
    """
    import io
    import tarfile

    from clusterrun.verbs.submit import passed_names, unknown_names

    unknown = unknown_names(record.paths)
    values = {name: os.environ.get(name, "") for name in passed_names(record.paths)}
    texts, packed = _files(record.paths, found, with_output=not unknown), set[str]()
    try:
        with target.open("xb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            os.fchmod(file.fileno(), 0o600)
            for name, text in texts:
                data = _without_values(values, text).encode("utf-8", "replace")
                entry = tarfile.TarInfo(f"{record.name}-{record.run_id}/{name}")
                entry.size, entry.mode = len(data), 0o600
                archive.addfile(entry, io.BytesIO(data))
                packed.add(name)
    except OSError as error:
        text, cause = f"cannot write {target}", error.strerror or ""
        raise ClusterrunError(text, cause=cause, hint="name another file") from error
    output.say(f"packed {count(len(packed), 'file')} into {target}; read it before you send it")
    if unknown:
        lack = f"this shell may lack the job's {', '.join(unknown)}"
        advice = "set these variables as for submit, so their values can be removed, and pack again"
        output.note(f"no logs or messages are packed: {lack}; {advice}")


def _without_values(values: Mapping[str, str], text: str) -> str:
    """Replace values by their variables' names, the longest first: it may contain another."""
    for name, value in sorted(values.items(), key=lambda item: -len(item[1])):
        if len(value) < _LEAST_LETTERS and not is_secret(name, value):
            continue
        in_json = json.dumps(value)[1:-1]  # without its quotes: JSON escapes some letters
        for form in (value, in_json):
            text = text.replace(form, f"[{name}]")
    return redacted(text)


def _files(paths: RunPaths, found: Diagnosis, *, with_output: bool) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each file; without `with_output`, none that a rank printed."""
    answer, attempt = diagnosis_object(found), found.attempt
    verdict = answer["verdict"] or {}
    shown = answer if with_output else {"verdict": {name: verdict.get(name) for name in _NO_TEXTS}}
    yield "diagnosis.json", json.dumps(shown, indent=2) + "\n"
    # The other scripts are left out: job.sbatch contains copies of these files.
    configuration = (paths.resolved, paths.plan, paths.accelerate, paths.deepspeed)
    of_run = (paths.env_script, paths.record)
    outputs = [paths.end, paths.batch_output, paths.outcome(attempt)]
    blamed = verdict.get("nodes", ())
    for kind in (
        paths.log_errors(attempt, "any").parent.glob("*.err"),  # one for each node, "any" is none
        paths.events_dir.glob("*.jsonl"),
        paths.rank_errors(attempt, "any").parent.glob("*.jsonl"),
    ):
        blamed_first = sorted(kind, key=lambda path: (path.stem not in blamed, path.name))
        outputs += blamed_first[:MOST_NODES]
    record = replace(read_attempt(paths, attempt), secret="")
    name = paths.attempt_record(attempt).relative_to(paths.root).as_posix()
    yield name, reading.as_text(record, SCHEMA)
    for path in (*configuration, *of_run, *(outputs if with_output else ())):
        data = files.end_of(path, MOST_BYTES)
        if len(data) == MOST_BYTES:  # the first line may have been cut
            data = data[data.find(b"\n") + 1 :]
        if data:
            yield path.relative_to(paths.root).as_posix(), data.decode("utf-8", "replace")
