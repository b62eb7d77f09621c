"""`render`: print the batch script that `submit` would send, and check it."""

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
)
from clusterrun.cli.shared.submission import print_check, print_files, print_notes
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.shared import files
from clusterrun.verbs.render import Prepared, check, prepare


@click.command(cls=ScriptCommand)
@job_options()
@click.option("-O", "--output-dir", metavar="DIR", help="write all files to a new directory")
@click.option("--check", "checks", is_flag=True, help="check the script with bash and Slurm")
@json_option
def command(job: JobOptions, *, output_dir: str | None, checks: bool, as_json: bool) -> None:
    """Print the batch script that submit sends.

    submit sends the same bytes; you can also pass them to sbatch yourself. For hosts (--cluster
    ssh, allocation), it prints a command for each host that starts the training by hand.

    \b
    clusterrun render -N 2 --gpus-per-node 4 train.py | less
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
    if output_dir is None or as_json:
        print_files(prepared, as_json=as_json)


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
