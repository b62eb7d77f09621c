"""`render`: print what `submit` would send, and check it without sending it."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from clusterrun.cli.shared import output
from clusterrun.cli.shared.options import (
    JobOptions,
    ScriptCommand,
    job_options,
    json_option,
    keep_sbatch_env_option,
)
from clusterrun.cli.shared.submission import print_check, print_files, print_notes
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.shared import files
from clusterrun.verbs.render import Prepared, check, prepare


@click.command(cls=ScriptCommand)
@job_options()
@click.option("-O", "--output-dir", metavar="DIR", help="write all files to a new directory")
@click.option("--check", "checks", is_flag=True, help="check the script with bash and Slurm")
@click.option("--show-env", "--explain", is_flag=True, help="print each variable and its reason")
@json_option
@keep_sbatch_env_option
def command(
    job: JobOptions,
    *,
    output_dir: str | None,
    checks: bool,
    show_env: bool,
    as_json: bool,
    keep_sbatch_env: bool,
) -> None:
    """Print the batch script that submit sends.

    submit sends the same bytes; you can also submit them yourself.

    \b
    clusterrun render -N 2 --gpus-per-node 4 train.py | less
    clusterrun render -N 2 --gpus-per-node 4 -O job train.py && sbatch job/job.sbatch
    """
    output.expect_json(as_json)
    prepared = prepare(job.load())
    print_notes(prepared, keep_sbatch_env=keep_sbatch_env)
    if prepared.problem:
        output.note(f"submit refuses this here: {prepared.problem.message}")
    if checks:
        print_check(check(prepared, keep_sbatch_env=keep_sbatch_env))
    if output_dir is not None:
        _write_files(prepared, Path(output_dir))
    if show_env:
        _show_environment(prepared, as_json=as_json)
    elif output_dir is None or as_json:
        print_files(prepared, as_json=as_json)


def _show_environment(prepared: Prepared, *, as_json: bool) -> None:
    plan = prepared.plan
    if as_json:
        rows = [{"name": v.name, "value": v.value, "why": v.why} for v in plan.env]
        passed = list(plan.pass_env)
        output.answer_json({"schema": "clusterrun.env/1", "env": rows, "pass_env": passed})
        return
    lines = [(variable.name, variable.value, variable.why) for variable in plan.env]
    lines += [(name, "(from your shell)", "handed on by name") for name in plan.pass_env]
    output.answer_table(("VARIABLE", "VALUE", "WHY"), [tuple(map(_one_line, row)) for row in lines])


def _one_line(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]


def _write_files(prepared: Prepared, directory: Path) -> None:
    """Write every file into a directory that is new or empty; all of them or none."""
    made = not directory.exists()
    written: list[Path] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(f"the directory '{directory}' is not empty", hint="name a new one")
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
        raise ClusterrunError(f"cannot write into '{directory}'", cause=str(error)) from error
    output.detail("wrote", f"{len(written)} files into {directory}")
    output.detail("submit", shlex.join(["sbatch", str(directory / "job.sbatch")]))
