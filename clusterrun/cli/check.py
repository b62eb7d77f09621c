"""`check`: look for pitfalls in a training script and its launch."""

from __future__ import annotations

import click

from clusterrun.backends.script import read_script
from clusterrun.cli.shared import output
from clusterrun.cli.shared.options import JobOptions, ScriptCommand, explain_option, job_options
from clusterrun.cli.shared.submission import warn_of_sbatch_variables
from clusterrun.errors import Exit, UsageError
from clusterrun.shared.wording import count
from clusterrun.verbs.check import find_pitfalls, is_unsized, place
from clusterrun.verbs.render import prepare

SCHEMA = "clusterrun.check/2"


@click.command(cls=ScriptCommand)
@job_options()
@explain_option
@output.json_option
def command(job: JobOptions, *, as_json: bool) -> Exit:
    """Look for pitfalls in a script and its launch.

    Reads the script and executes nothing of it. The exit status is 3 if something was found, 0 if
    not. Without a size, the job is checked as if it had two nodes with two ranks each. submit and
    render print the same findings as notes. A comment `# clusterrun: ignore RULE` switches a rule
    off for its line.

    \b
    clusterrun check -N 2 --gpus-per-node 4 train.py --epochs 3
    clusterrun explain fixed-port
    """
    resolved = job.load()
    if not (resolved.spec.script or resolved.spec.module):
        hint = "name it: clusterrun check train.py (or script: in clusterrun.yaml)"
        raise UsageError("no training script given", hint=hint)
    prepared = prepare(resolved)
    prepared.refuse_problem()
    found = find_pitfalls(resolved, prepared.plan, read_script(resolved), of_many_ranks=True)
    is_assumed = is_unsized(resolved, prepared.plan)
    of_one_rank = prepared.plan.notes if is_assumed else ()
    said = [text for text in prepared.notes if text not in of_one_rank]
    for text in said:
        output.note(text)
    variables = warn_of_sbatch_variables(prepared)
    script = resolved.spec.script or resolved.spec.module or ""
    if as_json:
        notes = [*said, *variables]
        data = {"script": script, "findings": [each.to_data() for each in found], "notes": notes}
        output.answer_json({"schema": SCHEMA, **data})
    else:
        for each in found:
            output.answer_finding(each, place(each, script))
        number = count(len(found), "finding") if found else "no pitfall found"
        output.say(f"{number}, assuming two nodes with two ranks each" if is_assumed else number)
    return Exit.NO if found else Exit.OK
