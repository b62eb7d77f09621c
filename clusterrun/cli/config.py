"""`config`: show the settings and their origins, and check the files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from clusterrun.backends.environment import working_directory
from clusterrun.backends.machine_facts import read_script
from clusterrun.cli.shared import complete, output
from clusterrun.cli.shared.options import JobCommand, JobOptions, job_options
from clusterrun.config.document import Document, parse_document
from clusterrun.config.files import FoundFiles, find_files
from clusterrun.config.load import resolve
from clusterrun.config.settings import Resolved, Row
from clusterrun.config.spec import BY_KEY
from clusterrun.errors import Exit, UsageError
from clusterrun.shared.wording import nearest


@click.group("config", no_args_is_help=False, invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Show and check the configuration.

    \b
    clusterrun config show --origin          print each value and its source
    clusterrun config show slurm.time        print one value
    clusterrun config validate               check the files that apply here
    """
    if ctx.invoked_subcommand is None:
        output.say(ctx.get_help())
        ctx.exit(Exit.USAGE)


@command.command("show", cls=JobCommand)
@job_options(script=False)
@click.option("--origin", is_flag=True, help="print the source of each value")
@output.json_option
@click.argument("keys", metavar="[KEY]...", nargs=-1, shell_complete=complete.keys)
def show(job: JobOptions, origin: bool, as_json: bool, keys: tuple[str, ...]) -> None:
    """Print all values, or some keys or sections."""
    resolved = job.load()
    rows = list(_chosen_rows(resolved, keys))
    for text in resolved.notes:
        output.warn(text)
    if as_json:
        values = [{"key": row.key, "value": row.value, "origin": row.origin} for row in rows]
        head = {"schema": "clusterrun.config-show/1", "profile": resolved.profile}
        where = {"project_dir": str(resolved.project_dir), "files": resolved.files}
        output.answer_json({**head, **where, "values": values, "warnings": resolved.notes})
        return
    table = [("KEY", "VALUE", "ORIGIN")]
    table += [(row.key, "-" if row.text is None else row.text, row.origin) for row in rows]
    first, *rest = [cells if origin else cells[:2] for cells in table]
    output.answer_table(first, rest)


def _chosen_rows(resolved: Resolved, keys: Sequence[str]) -> Iterator[Row]:
    """Choose the requested rows; by default all that have a value.

    Raises UsageError for an unknown key.
    """
    rows = list(resolved.rows())
    if not keys:
        yield from (row for row in rows if row.text is not None)
    for key in keys:
        found = [row for row in rows if row.key == key or row.key.startswith(key + ".")]
        if not found and key not in BY_KEY:  # a mapping without names has no rows
            homes = [full for full in BY_KEY if full.endswith("." + key)]
            near = homes[0] if homes else nearest(key, BY_KEY)
            hint = f"use '{near}'" if near else "list the settings with: clusterrun config show"
            raise UsageError(f"no setting '{key}'", hint=hint)
        yield from found


@command.command("validate")
@click.argument("file", required=False, type=click.Path())
@click.option("--strict", is_flag=True, help="treat warnings as errors")
@output.json_option
def validate(file: str | None, strict: bool, as_json: bool) -> int:
    """Check a file, or all that apply here.

    Exit with 2 if a key, a value or a profile is wrong.
    """
    cwd = working_directory(os.environ)
    found = find_files(environ=os.environ, cwd=cwd, config_file=file, search=file is None)
    errors, warnings = _problems(found, [parse_document(each) for each in found.files], cwd)
    for error in errors:
        output.print_error(error, is_answer=False)
    for text in warnings:
        output.warn(text)
    is_valid = not errors and not (strict and warnings)
    names = [each.shown for each in found.files]
    if as_json:
        data = {"schema": "clusterrun.config-validate/1", "valid": is_valid, "files": names}
        mistakes = [
            {"message": each.message, "where": each.where, "hint": "; ".join(each.hints) or None}
            for each in errors
        ]
        output.answer_json({**data, "errors": mistakes, "warnings": warnings})
    elif is_valid:
        output.answer("\n".join(f"{name}: valid" for name in names) or "no configuration file here")
    return Exit.OK if is_valid else Exit.USAGE


def _problems(
    found: FoundFiles, documents: Sequence[Document], cwd: Path
) -> tuple[list[UsageError], list[str]]:
    """Collect the mistakes in the files; if there are none, those in their combination.

    What submit would refuse is one, if the files describe a whole job: without a profile or a
    script, options of the command line may complete them.
    """
    from clusterrun.verbs.render import check_without_slurm  # `show` needs none of it

    errors = [error for document in documents for error in document.errors]
    warnings = [text for document in documents for text in document.warnings]
    profiles = {name: None for document in documents for name in document.profiles}
    for profile in (None, "", *profiles) if not errors else ():
        try:
            resolved = resolve(found, {}, environ=os.environ, cwd=cwd, profile=profile)
            warnings += resolved.notes
            read_script(resolved)
            has_script = resolved.spec.script or resolved.spec.module
            if has_script and (resolved.profile or not profiles):
                check_without_slurm(resolved)
        except UsageError as error:
            if str(error) not in map(str, errors):
                errors.append(error)
    return errors, list(dict.fromkeys(warnings))
