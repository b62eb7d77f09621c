"""`doctor`: check this machine and Slurm before a job is queued.

`explain`: print the page of what diagnose, doctor, the preflight or check names.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Final

import click

from clusterrun.cli.shared import output
from clusterrun.cli.shared.help import explain_option
from clusterrun.cli.shared.options import JobOptions, ScriptCommand, job_options
from clusterrun.diagnosis.table import KnownCause
from clusterrun.errors import Exit, UsageError
from clusterrun.health import node
from clusterrun.health.trial import DIRECTORY
from clusterrun.linting.rule import rules
from clusterrun.shared.finding import Finding, Severity
from clusterrun.shared.wording import nearest
from clusterrun.verbs import doctor
from clusterrun.verbs.diagnose import causes

_WIDTH: Final = 90  # of a page's text
_COUNTED: Final = dict(zip(Severity, ("ok", "noted", "failed", "skipped"), strict=True))


@click.command(cls=ScriptCommand)
@job_options()
@click.option("--only", metavar="PREFIX", multiple=True, help="run only PREFIX checks (repeatable)")
@click.option("--skip", metavar="PREFIX", multiple=True, help="skip PREFIX checks (repeatable)")
@explain_option
@output.json_option
def command(
    job: JobOptions, *, only: tuple[str, ...], skip: tuple[str, ...], as_json: bool
) -> Exit:
    """Check if this machine, Slurm and the nodes can run a job.

    doctor takes the options of submit. With --nodes and no script, a job of at most 5 minutes
    checks N nodes, each alone and then all together; otherwise doctor submits nothing. The exit
    status is 3 if a check failed, 0 if not. --only gpu runs the checks whose ids begin with gpu.

    \b
    clusterrun doctor
    clusterrun doctor -N 2 --gpus-per-node 4 --strategy zero2-offload train.py
    clusterrun doctor --nodes 4 --gpus-per-node 8 -p gpu
    clusterrun doctor --only slurm --only path
    """
    only = tuple(prefix for value in only for prefix in value.split(","))
    skip = tuple(prefix for value in skip for prefix in value.split(","))
    subject = doctor.subject_of(job.load())
    checks = doctor.chosen_checks(subject, only, skip)
    facts: dict[str, object] = {"job_id": None, "run_dir": None, "exclude": None}
    is_trial = "nodes" in job.flags and not {"script", "module"} & job.flags.keys()
    found = _print_early(doctor.examine(subject, checks, before_nodes=is_trial), as_json)
    if is_trial and any(x.severity is Severity.FAIL for x in found):
        output.say("no job was submitted")
    elif is_trial:
        smoke = doctor.check_nodes(subject.prepared.resolved, output.say)
        of_nodes, exclude = doctor.findings(smoke)
        facts = {"job_id": smoke.job_id, "run_dir": str(smoke.run_dir), "exclude": exclude or None}
        found += _print_early([x for x in of_nodes if doctor.is_chosen(x.id, only, skip)], as_json)
        output.say(f"the nodes' reports are in {smoke.run_dir / DIRECTORY}")
    return _print_rest(found, facts, as_json)


def _print_early(found: list[Finding], as_json: bool) -> list[Finding]:
    """Print findings and return all; on a terminal, print only what is ok and leave the rest."""
    for each in found:
        if not as_json and (each.severity is Severity.OK or not output.is_on_terminal()):
            output.answer_finding(each)
    return found


def _print_rest(found: list[Finding], facts: dict[str, object], as_json: bool) -> Exit:
    """Print what `_print_early` left, or JSON with `facts` of the trial; return the exit status."""
    counts = Counter(each.severity for each in found)
    if as_json:
        numbers = {status.value: counts[status] for status in Severity}
        rows = [each.to_data() for each in found]
        data = {"schema": "clusterrun.doctor/1", "checks": rows, "counts": numbers, **facts}
        output.answer_json(data)
    elif output.is_on_terminal():
        skipped = [Severity.SKIP] if output.session.verbose else []
        for status in (*skipped, Severity.NOTE, Severity.FAIL):
            for each in found:
                if each.severity is status:
                    output.answer_finding(each)
    output.say(", ".join(f"{counts[status]} {word}" for status, word in _COUNTED.items()))
    if failed := [each.id for each in found if each.severity is Severity.FAIL]:
        output.say(f"failed: {', '.join(dict.fromkeys(failed))}")
    if facts["exclude"]:
        output.say(f"leave out the nodes that failed: --exclude {facts['exclude']}")
    return Exit.NO if counts[Severity.FAIL] else Exit.OK


@click.command()
@click.argument("name", metavar="ID")
def explain_command(name: str) -> None:
    """Explain a cause, a check or a rule.

    ID is an id that diagnose, doctor, the preflight or check printed. To list ids, pass 'all' or
    the prefix that they share, such as gpu.

    \b
    clusterrun explain cuda_oom
    clusterrun explain node.shm
    clusterrun explain gpu
    """
    known = pages()
    if name in known:
        summary, rows = known[name]
        output.answer(f"{name}  {summary}")
        output.answer_rows(rows)
        return
    listed = [(x, known[x][0]) for x in known if name == "all" or x.startswith(name)]
    if not listed:
        near = nearest(name, known)
        hint = f"use '{near}'" if near else "list the ids with: clusterrun explain all"
        raise UsageError(f"the id '{name}' is not known", hint=hint)
    output.answer_table(("ID", "ABOUT"), listed)


Page = tuple[str, list[output.Row]]
"""What an id stands for, and rows of a label and a text."""


def pages() -> dict[str, Page]:
    """Return the pages of all ids."""
    table, broken = causes()
    for line in (*broken, *node.plugin_checks()):
        output.note(line)
    known = {cause.id: _page_of_cause(cause) for cause in table.values()}
    checks = {name: _page_of_check(name, page) for name, page in node.pages().items()}
    return {**known, **checks, **{x.id: (x.reason, [("fix", x.fix)]) for x in rules().values()}}


def _page_of_cause(cause: KnownCause) -> Page:
    signs = [f"{sign.text.written}  [{sign.seen or 'any version'}]" for sign in cause.signs]
    rows = [("do", str(advice)) for advice in cause.do] + [("sign", text) for text in signs]
    return cause.means, rows


def _page_of_check(name: str, page: node.CheckPage) -> Page:
    rows: list[output.Row] = []
    for label, text in (("FAIL if", page.fails), ("note if", page.notes), ("then", page.why)):
        rows += output.labelled(label, textwrap.wrap(text, _WIDTH, break_on_hyphens=False))
    rows += [("fix", text) for text in page.fix]  # never wrapped: they are copied
    rows += [("runs on", text) for text in doctor.places(name)]
    return f"looks at {page.looks_at}", rows
