"""`config`: show the settings and their origins, and check the files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from clusterrun.backends.environment import working_directory
from clusterrun.backends.script import read_script
from clusterrun.cli.shared import complete, output
from clusterrun.cli.shared.options import JobCommand, JobOptions, job_options, json_option
from clusterrun.config import Resolved
from clusterrun.config.document import Document, parse_document
from clusterrun.config.files import PROJECT_FILE, FoundFiles, find_files
from clusterrun.config.keys import BY_KEY
from clusterrun.config.load import resolve
from clusterrun.config.settings import Row
from clusterrun.errors import ClusterrunError, Exit, UsageError
from clusterrun.shared.wording import nearest


class ConfigGroup(click.Group):
    """The commands of `config`; if a key is typed instead, the hint suggests `config show`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. Raises UsageError for an unknown one."""
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            raise UsageError(f"no command 'config {name}'", hint=self._hint(*args))
        return super().resolve_command(ctx, args)

    def _hint(self, name: str, key: str = "KEY", *_: str) -> str:
        if near := nearest(name, self.commands):
            return f"use 'config {near}'"
        if any(f".{name}." in f".{full}." for full in BY_KEY):
            return f"print it with: clusterrun config show {name}"
        return f"print a setting with: clusterrun config show {key}; change it in {PROJECT_FILE}"


@click.group("config", cls=ConfigGroup, no_args_is_help=False, invoke_without_command=True)
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
@json_option
@click.argument("keys", metavar="[KEY]...", nargs=-1, shell_complete=complete.keys)
def show(job: JobOptions, origin: bool, as_json: bool, keys: tuple[str, ...]) -> None:
    """Print all values, or some keys or sections."""
    output.expect_json(as_json)
    resolved = job.load()
    rows = list(_chosen_rows(resolved, keys))
    for text in resolved.notes:
        output.warn(text)
    if as_json:
        output.answer_json(_show_json(resolved, rows))
        return
    head = ("KEY", "VALUE", "ORIGIN") if origin else ("KEY", "VALUE")
    table = [(row.key, "-" if row.text is None else row.text, row.origin) for row in rows]
    output.answer_table(head, [cells[: len(head)] for cells in table])


def _chosen_rows(resolved: Resolved, keys: Sequence[str]) -> Iterator[Row]:
    """Choose the requested rows; by default all that have a value.

    Raises UsageError for an unknown key.
    """
    rows = list(resolved.rows())
    if not keys:
        yield from (row for row in rows if row.text is not None)
        return
    for key in keys:
        found = [row for row in rows if row.key == key or row.key.startswith(key + ".")]
        if not found:
            _refuse_unknown(key)
        yield from found


def _refuse_unknown(key: str) -> None:
    if key in BY_KEY:  # a mapping without names has no rows
        return
    homes = [full for full in BY_KEY if full.endswith("." + key)]
    near = homes[0] if homes else nearest(key, BY_KEY)
    hint = f"use '{near}'" if near else "list the settings with: clusterrun config show"
    raise UsageError(f"no setting '{key}'", hint=hint)


def _show_json(resolved: Resolved, rows: Sequence[Row]) -> dict[str, object]:
    return {
        "schema": "clusterrun.config-show/1",
        "profile": resolved.profile,
        "project_dir": str(resolved.project_dir),
        "files": list(resolved.files),
        "values": [{"key": row.key, "value": row.value, "origin": row.origin} for row in rows],
        "warnings": list(resolved.notes),
    }


@command.command("validate")
@click.argument("file", required=False, type=click.Path())
@click.option("--strict", is_flag=True, help="treat warnings as errors")
@json_option
def validate(file: str | None, strict: bool, as_json: bool) -> int:
    """Check a file, or all that apply here.

    Exit with 2 if a key, a value or a profile is wrong.
    """
    output.expect_json(as_json)
    cwd = working_directory(os.environ)
    found = find_files(environ=os.environ, cwd=cwd, config_file=file, search=file is None)
    errors, warnings = _problems(found, [parse_document(each) for each in found.files], cwd)
    for error in errors:
        output.print_error_text(error)
    for text in warnings:
        output.warn(text)
    is_valid = not errors and not (strict and warnings)
    names = [each.shown for each in found.files]
    if as_json:
        data = {"schema": "clusterrun.config-validate/1", "valid": is_valid, "files": names}
        output.answer_json({**data, "errors": [*map(_mistake, errors)], "warnings": warnings})
    elif is_valid:
        output.answer("\n".join(f"{name}: valid" for name in names) or "no configuration file here")
    return Exit.OK if is_valid else Exit.USAGE


def _problems(
    found: FoundFiles, documents: Sequence[Document], cwd: Path
) -> tuple[list[UsageError], list[str]]:
    """Collect the mistakes in the files; if there are none, those in their combination."""
    errors = [error for document in documents for error in document.errors]
    warnings = [text for document in documents for text in document.warnings]
    profiles = {name: None for document in documents for name in document.profiles}
    for profile in (None, "", *profiles) if not errors else ():
        try:
            resolved = resolve(found, {}, environ=os.environ, cwd=cwd, profile=profile)
            warnings += resolved.notes
            _check_job(resolved, is_whole=bool(resolved.profile or not profiles))
        except UsageError as error:
            if str(error) not in map(str, errors):
                errors.append(error)
    return errors, list(dict.fromkeys(warnings))


def _check_job(resolved: Resolved, *, is_whole: bool) -> None:
    """Refuse what submit would refuse, if the files describe a whole job.

    Without a profile or a script, options of the command line may complete them.
    """
    from clusterrun.verbs.render import check_without_slurm  # `show` needs none of it

    read_script(resolved)
    if is_whole and (resolved.spec.script or resolved.spec.module):
        check_without_slurm(resolved)


def _mistake(error: ClusterrunError) -> dict[str, str | None]:
    return {
        "message": error.message,
        "where": error.where,
        "hint": "; ".join(error.hints) or None,
    }
