"""`doctor`: check this machine and Slurm before a job is queued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import click

from clusterrun.cli.shared import output
from clusterrun.cli.shared.explanations import CHECK
from clusterrun.cli.shared.explanations import explain as explain_id
from clusterrun.cli.shared.findings import show
from clusterrun.cli.shared.options import JobOptions, ScriptCommand, job_options, json_option
from clusterrun.errors import Exit
from clusterrun.health.reports import DIRECTORY
from clusterrun.shared.finding import Finding, Severity
from clusterrun.verbs.doctor import chosen, examine, is_chosen, subject_of
from clusterrun.verbs.smoke import examine_here, findings, run

SCHEMA: Final = "clusterrun.doctor/1"
_COUNTED: Final = dict(zip(Severity, ("ok", "noted", "failed", "skipped"), strict=True))


@click.command(cls=ScriptCommand)
@job_options()
@click.option("--only", metavar="PREFIX", multiple=True, help="run only these checks (repeatable)")
@click.option("--skip", metavar="PREFIX", multiple=True, help="leave these checks out (repeatable)")
@click.option(
    "--explain",
    metavar="ID",
    help="explain a check instead; 'all', or a beginning such as gpu, lists checks",
)
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
    """Check this machine and Slurm for a job, or nodes.

    With a script, takes the options of submit and submits nothing. With --nodes and no script, a
    job of at most 5 minutes checks so many nodes: each alone, then all together. Repairs nothing.
    The exit status is 3 if a check failed, 0 if not.

    \b
    clusterrun doctor
    clusterrun doctor -N 2 --gpus-per-node 4 --strategy zero2-offload train.py
    clusterrun doctor --nodes 4 --gpus-per-node 8 -p gpu
    clusterrun doctor --only slurm --only path
    """
    output.expect_json(as_json)
    if explain is not None:
        explain_id(explain, CHECK)
        return
    only, skip = (tuple(",".join(each).split(",")) if each else () for each in (only, skip))
    probes = chosen(only, skip)
    is_of_nodes = "nodes" in job.flags and not {"script", "module"} & job.flags.keys()
    report = _Report(as_json)
    if is_of_nodes:
        _check_nodes(job, report, only, skip)
    else:
        report.add(examine(subject_of(job.load), probes))
    ctx.exit(report.close())


class _Report:
    """What was found: printed when it is known, or as one JSON object.

    On a terminal, notes and failures are printed last, and skipped checks are only counted.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._found: list[Finding] = []
        self.facts: dict[str, object] = {"job_id": None, "run_dir": None, "exclude": None}

    @property
    def counts(self) -> Counter[Severity]:
        """The number of checks with each status."""
        return Counter(each.severity for each in self._found)

    def add(self, found: Iterable[Finding]) -> None:
        """Add findings."""
        for each in found:
            self._found.append(each)
            is_early = each.severity is Severity.OK or not output.is_on_terminal()
            if is_early and not self._as_json:
                show(each)

    def close(self) -> Exit:
        """Print what is left; return the exit status."""
        counts = self.counts
        if output.is_on_terminal() and not self._as_json:
            skipped = (Severity.SKIP,) * output.current_session().verbose
            for status in (*skipped, Severity.NOTE, Severity.FAIL):
                for each in self._found:
                    if each.severity is status:
                        show(each)
        if self._as_json:
            numbers = {status.value: counts[status] for status in Severity}
            rows = [each.to_data() for each in self._found]
            output.answer_json({"schema": SCHEMA, "checks": rows, "counts": numbers, **self.facts})
        output.say(", ".join(f"{counts[status]} {word}" for status, word in _COUNTED.items()))
        if failed := [each.id for each in self._found if each.severity is Severity.FAIL]:
            output.say(f"failed: {', '.join(dict.fromkeys(failed))}")
        if self.facts["exclude"]:
            output.say(f"leave out the nodes that failed: --exclude {self.facts['exclude']}")
        return Exit.NO if counts[Severity.FAIL] else Exit.OK


def _check_nodes(
    job: JobOptions, report: _Report, only: Sequence[str], skip: Sequence[str]
) -> None:
    """Check this machine, then, unless the job would fail, the nodes."""
    subject = subject_of(job.load)
    report.add(examine_here(subject, chosen(only, skip)))
    if report.counts[Severity.FAIL] or subject.resolved is None:
        output.say("no job was submitted")
        return
    smoke = run(subject.resolved, output.say)
    found, exclude = findings(smoke)
    report.add(each for each in found if is_chosen(each.id, only, skip))
    report.facts = {
        "job_id": smoke.job_id,
        "run_dir": str(smoke.run_dir),
        "exclude": exclude or None,
    }
    output.say(f"the nodes' reports are in {smoke.run_dir / DIRECTORY}")
