"""`render`: print what `submit` would send, and check it without sending it."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterrun.cli import output
from clusterrun.cli.options import JobOptions, ScriptCommand, job_options
from clusterrun.errors import ClusterrunError, UsageError

if TYPE_CHECKING:
    from clusterrun.backends.environment import SbatchVariable
    from clusterrun.verbs.api import Prepared


@click.command(cls=ScriptCommand)
@job_options()
@click.option("-O", "--output-dir", metavar="DIR", help="write all files into a new directory")
@click.option("--check", "checks", is_flag=True, help="also let bash and Slurm check the script")
@click.option("--show-env", "--explain", is_flag=True, help="print each variable and why it is set")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object with all files")
@click.option("--keep-sbatch-env", is_flag=True, help="let SBATCH_* variables of the shell count")
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

    The text is the same, byte for byte, and can be handed to sbatch by hand.

    \b
    clusterrun render -N 2 --gpus-per-node 4 train.py | less
    clusterrun render -N 2 --gpus-per-node 4 -O job train.py; sbatch job/job.sbatch
    """
    from clusterrun.verbs import api

    output.expect_json(as_json)
    prepared = prepare(job)
    tell(prepared, keep_sbatch_env=keep_sbatch_env)
    if checks:
        verdict = api.check(prepared, keep_sbatch_env=keep_sbatch_env)
        output.say(verdict or "bash finds no mistake; there is no Slurm to ask")
    if output_dir is not None:
        _write_files(prepared, Path(output_dir))
    if show_env:
        _show_environment(prepared, as_json=as_json)
    elif output_dir is None or as_json:
        show(prepared, as_json=as_json)


def prepare(job: JobOptions) -> Prepared:
    """Resolve and prepare what the command line asks for, in the directory as the shell names it.

    Raises UsageError for what cannot run.
    """
    from clusterrun.verbs import api

    resolved = api.load_spec(
        job.flags, config_file=job.config_file, profile=job.profile, overrides=job.overrides
    )
    prepared = api.prepare(resolved)
    return dataclasses.replace(prepared, notes=(*job.notes, *prepared.notes))


def tell(prepared: Prepared, *, keep_sbatch_env: bool) -> tuple[SbatchVariable, ...]:
    """Print the notes of a job, and warn of SBATCH_* variables that would override it."""
    from clusterrun.backends.environment import sbatch_variables
    from clusterrun.config.spec import Cluster

    for text in prepared.notes:
        output.note(text)
    if prepared.plan.cluster is not Cluster.SLURM:
        return ()
    variables = sbatch_variables(prepared.plan, os.environ)
    for variable in variables:
        _warn_of(variable, keep=keep_sbatch_env)
    return variables


def _warn_of(variable: SbatchVariable, *, keep: bool) -> None:
    verb = "overrides" if keep else "would override"
    what = f"{variable.option or 'an option of sbatch'}"
    if variable.planned is not None:
        what = f"{variable.option} '{variable.planned}'"
    note = "clusterrun removes it for this submission; pass --keep-sbatch-env to keep it"
    output.warn(
        f"{variable.name}={variable.value} is set in your shell and {verb} {what}",
        notes=() if keep else (note,),
    )


def warnings_of(
    prepared: Prepared, variables: Sequence[SbatchVariable], *, keep: bool
) -> list[dict[str, str]]:
    """Describe the notes and the SBATCH_* variables for JSON."""
    code = "sbatch_env_kept" if keep else "sbatch_env_removed"
    return [
        *({"code": "note", "message": text} for text in prepared.notes),
        *({"code": code, "message": f"{found.name}={found.value}"} for found in variables),
    ]


def show(prepared: Prepared, *, as_json: bool) -> None:
    """Print the batch script alone, or all files as one object."""
    if not as_json:
        output.answer_exactly(prepared.bundle.script)
        return
    output.answer_json(
        {
            "schema": "clusterrun.render/1",
            "name": prepared.plan.name,
            "files": dict(prepared.bundle.files),
            "notes": list(prepared.notes),
        }
    )


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
            _write_file(written[-1], text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        if made and directory.is_dir():
            directory.rmdir()
        raise ClusterrunError(f"cannot write into '{directory}'", cause=str(error)) from error
    output.detail("wrote", f"{len(written)} files into {directory}")
    output.detail("submit", shlex.join(["sbatch", str(directory / "job.sbatch")]))


def _write_file(path: Path, text: str) -> None:
    mode = 0o777 if path.suffix in (".sh", ".sbatch") else 0o666  # the umask takes its part
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(text.encode("utf-8", "surrogateescape"))
