"""`doctor`: check this machine and Slurm before a job is queued."""

from __future__ import annotations

import difflib
from collections import Counter
from typing import Final

import click

from clusterrun.cli.shared import output
from clusterrun.cli.shared.options import JobOptions, ScriptCommand, job_options, json_option
from clusterrun.errors import Exit, UsageError
from clusterrun.health.check import Check, Status
from clusterrun.verbs.doctor import PROBES, chosen, examine, subject_of

SCHEMA: Final = "clusterrun.doctor/1"
_WORDS: Final = {
    Status.OK: ("ok", "green"),
    Status.NOTE: ("note", "cyan"),
    Status.FAIL: ("FAIL", "red"),
    Status.SKIP: ("skip", "bright_black"),
}
_COUNTED: Final = {
    Status.OK: "ok",
    Status.NOTE: "noted",
    Status.FAIL: "failed",
    Status.SKIP: "skipped",
}


@click.command(cls=ScriptCommand)
@job_options()
@click.option("--only", metavar="PREFIX", multiple=True, help="run only these checks (repeatable)")
@click.option("--skip", metavar="PREFIX", multiple=True, help="leave these checks out (repeatable)")
@click.option("--explain", metavar="ID", help="explain a check instead; 'all' lists them")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    job: JobOptions,
    *,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    explain: str | None,
    as_json: bool,
) -> None:
    """Check this machine and Slurm for a job.

    Takes the options of submit; the script may be omitted. Submits, changes and repairs nothing.
    The exit status is 3 if a check failed, 0 if not.

    \b
    clusterrun doctor
    clusterrun doctor -N 2 --gpus-per-node 4 --strategy zero2-offload train.py
    clusterrun doctor --only slurm --only path
    """
    output.expect_json(as_json)
    if explain is not None:
        _explain(explain)
        return
    probes = chosen(only, skip)
    found = examine(subject_of(job.load), probes)
    counts = Counter(each.status for each in found)
    if as_json:
        numbers = {status.value: counts[status] for status in Status}
        rows = [_object(each) for each in found]
        output.answer_json({"schema": SCHEMA, "checks": rows, "counts": numbers})
    else:
        for each in found:
            _show(each)
    output.say(", ".join(f"{counts[status]} {word}" for status, word in _COUNTED.items()))
    ctx.exit(Exit.NO if counts[Status.FAIL] else Exit.OK)


def _show(found: Check) -> None:
    word, colour = _WORDS[found.status]
    text = " ".join(found.text.split())
    output.answer(f"{click.style(f'{word:<4}', fg=colour)}  {found.id:<18}  {text}")
    if found.hint:
        output.answer(f"      hint: {found.hint}")


def _object(found: Check) -> dict[str, str | None]:
    status, hint = found.status.value, found.hint or None
    return {"id": found.id, "status": status, "text": found.text, "hint": hint}


def _explain(name: str) -> None:
    known = {probe.id: probe.looks_at for probe in PROBES}
    if name == "all":
        output.answer_table(("CHECK", "LOOKS AT"), list(known.items()))
        return
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"use '{near[0]}'" if near else "list them with: clusterrun doctor --explain all"
        raise UsageError(f"no check '{name}'", hint=hint)
    output.answer(f"{name}  looks at {known[name]}")
