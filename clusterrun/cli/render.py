"""`render`: print the batch script that `submit` would send, and check it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterrun.cli.shared import output
from clusterrun.cli.shared.options import (
    JobOptions,
    ScriptCommand,
    job_options,
    json_option,
)
from clusterrun.cli.shared.submission import print_check, print_files, print_notes
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.launch.plan import Plan
from clusterrun.rendering.quoting import sh_word
from clusterrun.shared import files
from clusterrun.shared.wording import count
from clusterrun.verbs.render import Prepared, check, prepare

if TYPE_CHECKING:
    from clusterrun.verbs.rank_view import RankView


@click.command(cls=ScriptCommand)
@job_options()
@click.option("-O", "--output-dir", metavar="DIR", help="write all files to a new directory")
@click.option("--check", "checks", is_flag=True, help="check the script with bash and Slurm")
@click.option(
    "--command",
    "shows_command",
    is_flag=True,
    help="print the launch command of a node and the environment of rank 0, with reasons",
)
@json_option
def command(
    job: JobOptions,
    *,
    output_dir: str | None,
    checks: bool,
    shows_command: bool,
    as_json: bool,
) -> None:
    """Print the batch script that submit sends.

    submit sends the same bytes; you can also pass them to sbatch yourself. For hosts (--cluster
    ssh, allocation), it prints a command for each host that starts the training by hand.

    \b
    clusterrun render -N 2 --gpus-per-node 4 train.py | less
    clusterrun render -N 2 --gpus-per-node 4 --command train.py
    clusterrun render -N 2 --gpus-per-node 4 -O job train.py && sbatch job/job.sbatch
    """
    output.expect_json(as_json)
    prepared = prepare(job.load())
    print_notes(prepared)
    if prepared.problem:
        output.note(f"submit would refuse this here: {prepared.problem.message}")
    if checks:
        print_check(check(prepared))
    if output_dir is not None:
        _write_files(prepared, Path(output_dir))
    if shows_command:
        from clusterrun.verbs.rank_view import view  # slow to import

        shown = view(prepared.plan, prepared.bundle, python=prepared.python)
        _show_rank(prepared.plan, shown, as_json=as_json)
    elif output_dir is None or as_json:
        print_files(prepared, as_json=as_json)


def _show_rank(plan: Plan, shown: RankView, *, as_json: bool) -> None:
    if as_json:
        where = {"node": 0, "rank": 0, "workdir": plan.workdir}
        env = [{"name": v.name, "value": v.value, "why": v.why} for v in shown.env]
        data = {"command": list(shown.command), "env": env, "pass_env": list(plan.pass_env)}
        output.answer_json({"schema": "clusterrun.command/1", **where, **data})
        return
    ranks, nodes = count(plan.world_size, "rank"), count(plan.nodes, "node")
    output.answer(f"# rank 0 of {ranks}, on node 0 of {nodes}")
    output.answer(f"cd {shlex.quote(plan.workdir)}", wraps=False)
    output.answer(" ".join(map(sh_word, shown.command)) + "\n", wraps=False)
    lines = [(variable.name, variable.value, variable.why) for variable in shown.env]
    lines += [(name, "(from your shell)", "passed by name") for name in plan.pass_env]
    output.answer_table(("VARIABLE", "VALUE", "WHY"), [tuple(map(_one_line, row)) for row in lines])
    output.note(
        "values in <...> are known only when the job runs; ranks also get your shell's variables"
    )
    if shown.note:
        output.warn(shown.note)


def _one_line(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]


def _write_files(prepared: Prepared, directory: Path) -> None:
    """Write every file into a directory that is new or empty; all of them or none."""
    made = not directory.exists()
    written: list[Path] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(f"the directory '{directory}' is not empty", hint="choose a new one")
        for name, text in prepared.bundle.files.items():
            written.append(directory / name)
            is_script = written[-1].suffix in (".sh", ".sbatch")
            mode = 0o777 if is_script else files.BY_UMASK  # the umask is applied to both
            files.write_whole(written[-1], text, mode=mode)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        if made and directory.is_dir():
            directory.rmdir()
        raise ClusterrunError(
            f"cannot write into '{directory}'", cause=str(error), hint="choose another directory"
        ) from error
    output.detail("wrote", f"{len(written)} files to {directory}")
    if not prepared.plan.hosts:
        output.detail("submit", shlex.join(["sbatch", str(directory / "job.sbatch")]))
