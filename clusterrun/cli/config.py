"""`config`: show the settings and their origins, and check the files; `init`: write one."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import click

from clusterrun.backends.environment import working_directory
from clusterrun.backends.machine_facts import choose_cluster, read_script
from clusterrun.backends.slurm.site import associations, kinds, node_groups
from clusterrun.cli.shared import output
from clusterrun.cli.shared.options import JobCommand, JobOptions, job_options
from clusterrun.config.choices import Cluster
from clusterrun.config.document import parse_document
from clusterrun.config.files import PROJECT_FILE, FoundFiles, find_files
from clusterrun.config.load import resolve
from clusterrun.config.settings import yaml_text
from clusterrun.errors import ClusterrunError, Exit, UsageError
from clusterrun.rundir.record import current_user
from clusterrun.shared import files
from clusterrun.shared.amounts import clock


@click.group("config", no_args_is_help=False, invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Show and check the configuration.

    \b
    clusterrun config show --origin          print each value and its source
    clusterrun config validate               check the files that apply here
    """
    if ctx.invoked_subcommand is None:
        output.say(ctx.get_help())
        ctx.exit(Exit.USAGE)


@command.command("show", cls=JobCommand)
@job_options(script=False)
@click.option("--origin", is_flag=True, help="print the source of each value")
@output.json_option
def show(job: JobOptions, origin: bool, as_json: bool) -> None:
    """Print all settings that have a value."""
    resolved = job.load()
    rows = [row for row in resolved.rows() if row.text is not None]
    for text in resolved.notes:
        output.warn(text)
    if as_json:
        values = [{"key": row.key, "value": row.value, "origin": row.origin} for row in rows]
        head = {"schema": "clusterrun.config-show/1", "profile": resolved.profile}
        where = {"project_dir": str(resolved.project_dir), "files": resolved.files}
        output.answer_json({**head, **where, "values": values, "warnings": resolved.notes})
        return
    columns = 3 if origin else 2
    table = [(row.key, row.text or "", row.origin)[:columns] for row in rows]
    output.answer_table(("KEY", "VALUE", "ORIGIN")[:columns], table)


@command.command("validate")
@click.argument("file", required=False, type=click.Path())
@click.option("--strict", is_flag=True, help="treat warnings as errors")
@output.json_option
def validate(file: str | None, strict: bool, as_json: bool) -> int:
    """Check one file, or all files that apply here.

    The exit status is 2 if a key, a value or a profile is invalid.
    """
    cwd = working_directory(os.environ)
    found = find_files(environ=os.environ, cwd=cwd, config_file=file, search=file is None)
    errors, warnings = _problems(found, cwd)
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


def _problems(found: FoundFiles, cwd: Path) -> tuple[list[UsageError], list[str]]:
    """Return the mistakes in the files, or else in their combination, and warnings.

    If the files describe a whole job, what submit would refuse is a mistake, too. Without a profile
    or a script, options of the command line may complete them.
    """
    from clusterrun.verbs.render import prepare  # `show` needs none of it

    documents = [parse_document(each) for each in found.files]
    errors = [error for document in documents for error in document.errors]
    warnings = [text for document in documents for text in document.warnings]
    profiles = dict.fromkeys(name for each in documents for name in each.profiles)
    combinations = (None, "", *profiles) if not errors else ()  # None: the default, "": no profile
    for profile in combinations:
        try:
            resolved = resolve(found, {}, environ=os.environ, cwd=cwd, profile=profile)
            warnings += resolved.notes
            read_script(resolved)
            spec = resolved.spec
            has_script, has_profile = spec.script or spec.module, resolved.profile or not profiles
            if has_script and has_profile:
                if spec.cluster is Cluster.AUTO:  # this machine may lack Slurm
                    spec = dataclasses.replace(spec, cluster=Cluster.SLURM)
                prepare(resolved._replace(spec=spec)).refuse_problem()
        except UsageError as error:
            if str(error) not in map(str, errors):
                errors.append(error)
    return errors, list(dict.fromkeys(warnings))


DAY_S: Final = 24 * 3600
LISTED: Final = 2000  # names: a data directory may contain millions
NAMED: Final = 5  # others, in a comment

_TRAIN: Final = r"train|finetune|fine_tune|sft|^main|^run_"
_NO_SCRIPT: Final = r"test_|.*_test\.py\Z|(?:conftest|setup|__init__)\.py\Z"
_WIDTH: Final = 34  # where the comments begin
_SETTING: Final = re.compile(r"( *)#?(\w+):(?: .*)?")
_SECTION: Final = re.compile(r"(\w+):$")

# A settings line is commented out with a bare '#', a sentence with '# '.
STARTER: Final = """\
# Every clusterrun command in this directory and below reads this file.
# Remove a '#' to set a value. The command line and CLUSTERRUN_* variables override this file.
# To see the source of each value, run: clusterrun config show --origin

#script: train.py                 # the script that 'clusterrun submit' trains
#args: [--epochs, "3"]            # its arguments
#name: my-model                   # of the job and of its runs
#cluster: auto                    # slurm, local (this machine) or auto: Slurm if sbatch is found
#run_dir: runs                    # logs and records; on Slurm in a file system that the nodes share

slurm:
  #partition: gpu
  #account: my-account
  #time: 1-00:00:00               # days-hours:minutes:seconds
  #nodes: 2
  #gpus_per_node: 4               # one rank per GPU
  #gpu_type: a100                 # requests gpu:a100:4
  #cpus_per_task: 32              # per node
  #mem: 200G                      # per node

launch:
  #nproc_per_node: 2              # ranks per node, if not one per GPU
  #device: auto                   # cuda, cpu or auto
  #strategy: ddp                  # none, ddp, fsdp, zero1, zero2, zero3, zero2-offload, ...
  #mixed_precision: auto          # no, fp16, bf16 or auto: the best that the GPUs support
  #setup: ["modules: cuda/12.4", "conda: llm"]    # also "venv: DIR", "uv: DIR" or a line of bash
  #python: python3                # on the nodes; default: that of setup, else clusterrun's

env:
  #TOKENIZERS_PARALLELISM: "false"

# Pass tokens and keys by name: their values come from your shell and are never stored.
#pass_env: [WANDB_API_KEY, HF_TOKEN]

# Choose one with 'clusterrun submit --profile a100', or with a line 'profile: a100' above.
profiles:
  #a100: {slurm: {partition: gpu, constraint: a100}, network: {preset: infiniband}}
  #debug: {slurm: {partition: debug, time: "00:30:00", nodes: 1}}
"""


@click.command("init")
@click.argument("directory", metavar="[DIR]", default=".", type=click.Path())
@click.option(
    "--script",
    metavar="FILE",
    type=click.Path(),
    help="set the training script  [default: the one found in DIR]",
)
@click.option("--force", is_flag=True, help="replace an existing clusterrun.yaml")
def init_command(directory: str, script: str | None, force: bool) -> None:
    """Write a starter clusterrun.yaml.

    Look for the training script in DIR, and ask Slurm once for partitions, GPU types, time limits
    and your accounts. Without Slurm, write settings for this machine. You can use the file as it
    is; its comments list other values.
    """
    path = Path(directory) / PROJECT_FILE
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} exists", hint="pass --force to replace it")
    scripts = [script] if script is not None else find_scripts(path.parent)
    known = _known_settings()
    if scripts:
        also = f"also found: {_names(scripts[1:])}" if scripts[1:] else ""
        known = {"script": Known(yaml_text(scripts[0]), also), **known}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, filled(known), mode=files.BY_UMASK)
    except OSError as error:
        cause = error.strerror or str(error)
        hint = "choose a directory that you can write to"
        raise ClusterrunError(f"cannot write {path}", cause=cause, hint=hint) from error
    if script is not None and not (path.parent / script).exists():
        output.warn(f"script '{script}' does not exist in {path.parent.resolve()}")
    output.answer(str(path), wraps=False)
    rows = {key.rpartition(".")[2]: each.value for key, each in known.items() if each.value}
    submit = "clusterrun submit" if "script" in rows else "clusterrun submit SCRIPT"
    rows |= {"check": "clusterrun config validate", "train": submit}
    width = max(map(len, rows))
    for name, text in rows.items():
        output.detail(name.ljust(width), text or "")


def find_scripts(directory: Path) -> list[str]:
    """Return files whose names suggest training, shortest first; if none do, the only script."""
    try:
        listed = sorted(each.name for each in itertools.islice(directory.iterdir(), LISTED))
    except OSError:
        return []
    modules = (name for name in listed if name.endswith(".py") and name.isprintable())
    scripts = [name for name in modules if not re.match(_NO_SCRIPT, name)]
    likely = [name for name in scripts if re.search(_TRAIN, name)]
    return sorted(likely, key=len) or (scripts if len(scripts) == 1 else [])


def _names(names: Iterable[str]) -> str:
    """Return a list of at most NAMED names for a comment."""
    shown = list(names)
    return ", ".join([*shown[:NAMED], "..."] if len(shown) > NAMED else shown)


def _known_settings() -> dict[str, Known]:
    """Return the settings that this machine or Slurm makes known, by key."""
    if choose_cluster(Cluster.AUTO).scheduler.is_this_machine:
        return {"cluster": Known("local", "this machine has no Slurm")}  # submit counts the GPUs
    known = {"cluster": Known("slurm", "this machine has sbatch"), "slurm.nodes": Known("1")}
    rows = kinds(node_groups(None))  # one for each kind of nodes in a partition
    if not rows:
        todo = "set the partition and the GPUs in clusterrun.yaml"
        output.warn("sinfo did not answer", notes=(todo,))
        return known
    allowed = associations(current_user())  # accounts, each with its only partition or ""
    my_partitions = {partition for _, partition in allowed} or {""}  # "": all of them
    usable = [row for row in rows if not my_partitions.isdisjoint(("", row.partition))]
    # Prefer a partition with GPUs, then the default one, then the one with the most nodes.
    chosen = max(usable or rows, key=lambda row: (bool(row.gpus), row.is_default, row.count))
    name, limit_s = chosen.partition, min(chosen.limit_s or DAY_S, DAY_S)
    others = dict.fromkeys(row.partition for row in rows if row.partition != name)
    accounts = dict.fromkeys(account for account, where in allowed if where in ("", name))
    also = f"also: {_names(others)}" if others else ""
    known["slurm.partition"] = Known(yaml_text(name), also)
    known["slurm.time"] = Known(f'"{clock(limit_s)}"')
    if len(accounts) == 1:
        known["slurm.account"] = Known(yaml_text(*accounts))
    elif accounts:
        known["slurm.account"] = Known(None, f"one of: {_names(accounts)}; the default is charged")
    if not chosen.gpus:
        return {**known, "launch.device": Known("cpu", f"'{name}' has no GPUs")}
    kind, number = chosen.gpus[0]  # of a whole node
    known["slurm.gpus_per_node"] = Known(str(number), "one rank per GPU; all GPUs of a node")
    if kind:
        known["slurm.gpu_type"] = Known(yaml_text(kind), f"requests gpu:{kind}:{number}")
    return {**known, "slurm.cpus_per_task": Known(str(chosen.cpus or 1), "all CPUs of a node")}


class Known(NamedTuple):
    """A value for the starter file, and the comment beside it."""

    value: str | None  # as YAML; None: write only the comment
    comment: str = ""  # "": keep that of the starter


def filled(known: Mapping[str, Known]) -> str:
    """Return STARTER with the known settings in place of those that it comments out.

    >>> filled({"slurm.nodes": Known("3", "of 8")}).splitlines()[14]
    '  nodes: 3                        # of 8'
    """
    lines, section = [], ""
    for line in STARTER.splitlines():
        if heading := _SECTION.match(line):
            section = heading[1]
        elif found := _SETTING.match(line):
            indent, name = found.groups()
            if new := known.get(f"{section}.{name}" if indent else name):
                setting, _, comment = line.partition(" # ")
                if new.value is not None:
                    setting = f"{indent}{name}: {new.value}"
                line = f"{setting.rstrip():<{_WIDTH}}# {new.comment or comment}".removesuffix("# ")
        lines.append(line.rstrip())
    return "\n".join(lines) + "\n"
