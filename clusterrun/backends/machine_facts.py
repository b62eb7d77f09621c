"""Gather the facts about this machine that planning needs; read the script, and never run it."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from clusterrun.backends import interpreters
from clusterrun.config.choices import Cluster, Starter
from clusterrun.config.environments import python_of
from clusterrun.config.hosts import (
    FLUX,
    FLUX_HOSTS,
    NODE_FILES,
    HostList,
    allocation_hosts,
    allocation_source,
    choose_starter,
    parse_hostfile,
    without_excluded,
)
from clusterrun.config.settings import Resolved
from clusterrun.config.spec import JobSpec
from clusterrun.errors import UsageError
from clusterrun.launch.facts import Facts, Interpreter
from clusterrun.launch.inputs import (
    is_of_one_machine,
    named_json,
    paths_to_look_for,
    runs_in_container,
)
from clusterrun.launch.user_files import is_for_deepspeed
from clusterrun.shared import shell
from clusterrun.shared.wording import nearest

HOSTS_S: Final = 20.0
_ARCHIVE: Final = b"PK\x03\x04"  # Python runs a zip archive with a __main__.py


def gather_facts(
    spec: JobSpec, *, cwd: Path, environ: Mapping[str, str], may_run: bool = False
) -> Facts:
    """Gather the facts of this machine, and read the user's own configuration files.

    With `may_run` the job's interpreter may be run to list its packages.
    Raises UsageError for a file that can't be read.
    """
    cluster = choose_cluster(spec.cluster)
    scheduler = cluster.scheduler
    python = interpreter_of(spec, cwd, home="" if scheduler.has_hosts else environ.get("HOME", ""))
    path = interpreters.path_of(python, spec, environ)
    hosts = _all_hosts(spec, cluster, cwd, environ) if scheduler.has_hosts else HostList()
    hosts = without_excluded(hosts, spec.exclude) if hosts.hosts and spec.exclude else hosts
    interpreter = interpreters.inspect(path, may_run=may_run, environ=environ)
    return Facts(
        cluster=cluster,
        python=python,
        workdir=str(cwd),
        runs_dir=os.path.normpath(cwd / spec.run_dir),
        interpreter=interpreter,
        oldest=interpreters.oldest(),
        local_gpus=visible_gpus(find_gpus(), environ) if scheduler.is_this_machine else (),
        local_cpus=usable_cpus(),
        platform=sys.platform,
        missing=frozenset(p for p in paths_to_look_for(spec) if not os.path.exists(cwd / p)),
        accelerate_config_text=_text_in(spec.accelerate_config, cwd, "accelerate configuration"),
        accelerate_keys=interpreters.accelerate_keys(interpreter)
        if spec.accelerate_config and not runs_in_container(spec)
        else frozenset(),
        deepspeed_config_text=_text_in(spec.deepspeed_config, cwd, "DeepSpeed configuration"),
        script_deepspeed_text=_script_json(spec, cwd, cluster),
        hosts=hosts,
        starter=choose_starter(spec.starter, cluster, environ, shell.find)
        if scheduler.has_hosts
        else Starter.SSH,
    )


def _all_hosts(spec: JobSpec, cluster: Cluster, cwd: Path, environ: Mapping[str, str]) -> HostList:
    """Return the user's hosts, or those of the allocation if none are listed. Raises UsageError."""
    if spec.hosts and spec.hostfile:
        raise UsageError("hosts and hostfile cannot be combined", hint="keep one of them")
    if spec.hosts:
        return HostList(hosts=spec.hosts, slots=(0,) * len(spec.hosts), source="--hosts")
    if spec.hostfile:
        return parse_hostfile(_text_in(spec.hostfile, cwd, "hostfile"), shown=spec.hostfile)
    if cluster.scheduler.outlives_shell:  # over ssh: only an allocation lists its own hosts
        hint = "pass --hosts gpu1,gpu2 or --hostfile FILE, or write hosts: in clusterrun.yaml"
        raise UsageError("--cluster ssh needs hosts", hint=hint)
    source = allocation_source(environ)
    return allocation_hosts(source, _nodes_of_allocation(source, environ[source], cwd))


def _nodes_of_allocation(source: str, value: str, cwd: Path) -> str:
    """Return the text that lists the nodes: the variable's value, its file, or Flux's output."""
    if source in NODE_FILES:
        return _text_in(value, cwd, f"file in ${source}")
    if source != FLUX:
        return value
    done = shell.run(FLUX_HOSTS, timeout_s=HOSTS_S, tries=1)
    if done.rc != 0:
        text = f"{shlex.join(FLUX_HOSTS)} failed"
        raise UsageError(text, cause=done.stderr.strip(), hint="name the nodes with --hosts")
    return done.stdout


def choose_cluster(asked: Cluster) -> Cluster:
    """Return where a job would run: `auto` is Slurm if sbatch is found, else this machine."""
    if asked is not Cluster.AUTO:
        return asked
    return Cluster.LOCAL if shell.find("sbatch") is None else Cluster.SLURM


def usable_cpus() -> int:
    """Return how many CPUs this process may use; the machine may have more."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def interpreter_of(spec: JobSpec, cwd: Path, *, home: str) -> str:
    """Return the job's interpreter; without `home`, each host expands `~/`."""
    python = spec.python or python_of(spec.setup)
    if not python:
        return sys.executable
    if python.startswith("~/"):
        return home.rstrip("/") + python[1:] if home else python
    # The node looks up a bare name, after the setup lines.
    return os.path.normpath(cwd / python) if "/" in python else python


def _text_in(name: str | None, cwd: Path, what: str) -> str:
    """Return the text of a file that the user named; "" for none. Raises UsageError."""
    try:
        text = "" if name is None else named_file(name, cwd, what).decode("utf-8-sig")
        return text.replace("\r\n", "\n").replace("\r", "\n")  # sbatch refuses \r
    except UnicodeDecodeError as error:
        text = f"the {what} '{name}' is not UTF-8 text"
        raise UsageError(text, cause=str(error), hint="save it as UTF-8") from error


def named_file(name: str, cwd: Path, what: str, where: str | None = None) -> bytes:
    """Return a file's content; an error says `where` the user named it. Raises UsageError."""
    try:
        return (cwd / name).read_bytes()
    except FileNotFoundError as error:
        text, hint = f"the {what} '{name}' does not exist", nearest_file(cwd / name)
        raise UsageError(text, hint=hint, where=where) from error
    except OSError as error:
        text, hint = f"cannot read the {what} '{name}'", f"name a {what} that you can read"
        raise UsageError(text, cause=error.strerror, hint=hint, where=where) from error


def _script_json(spec: JobSpec, cwd: Path, cluster: Cluster) -> str:
    """Return the DeepSpeed JSON that the script's arguments name, or "". Raises UsageError."""
    name = named_json(spec.args)
    if not name:
        return ""
    try:
        text = (cwd / name).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        if runs_in_container(spec) or is_of_one_machine(name, cluster):
            return ""  # only the nodes may have it
        text = f"the script's arguments name a DeepSpeed JSON that does not exist: '{name}'"
        raise UsageError(text, hint=nearest_file(cwd / name)) from error
    except (OSError, ValueError):
        return ""  # it may not be for DeepSpeed: the script decides what to read
    return text if is_for_deepspeed(text) else ""


def nearest_file(path: Path) -> str:
    """Return a hint for a missing file: the file beside it with the nearest name."""
    try:
        names = [entry.name for entry in os.scandir(path.parent) if entry.is_file()]
    except OSError:
        return f"check the path: there is no directory {path.parent}"
    near = nearest(path.name, names)
    return f"did you mean '{near}'?" if near else f"check the name: it is not in {path.parent}"


# GPUs


def find_gpus() -> dict[str, str]:
    """Return the UUIDs of this machine's GPUs by name; {} without a driver that answers."""
    from clusterrun.health.nvml import Driver, open_driver  # only for a job on this machine

    driver = open_driver()
    if not isinstance(driver, Driver):
        return {}
    try:
        return driver.names()
    except driver.nvml.NVMLError:
        return {}


def visible_gpus(found: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES; like CUDA, stop at a name that is no GPU."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return tuple(found)

    def is_device(name: str) -> bool:
        is_uuid = name.startswith(("GPU-", "MIG-"))  # CUDA also accepts a prefix of it
        return any(uuid.startswith(name) for uuid in found.values()) if is_uuid else name in found

    return tuple(itertools.takewhile(is_device, (name.strip() for name in listed.split(","))))


# The script: it exists, can be read and is valid Python


def read_script(resolved: Resolved) -> bytes | None:
    """Return the script's source; None for an archive or a module elsewhere. Raises UsageError."""
    spec = resolved.spec
    if spec.script is None:
        return _module_source(resolved.cwd, spec.module) if spec.module else None
    where = resolved.origins["script"].where
    source = named_file(spec.script, resolved.cwd, "script", where)
    if source.startswith(_ARCHIVE):
        return None
    if problem := _why_not_python(source):
        text = f"'{spec.script}' is not a Python script: {problem}"
        raise UsageError(text, hint="name the Python training script", where=where)
    return source


def syntax_problem(
    resolved: Resolved, source: bytes, interpreter: Interpreter
) -> UsageError | None:
    """Return the script's syntax error; None if the job's Python is of another version."""
    name = resolved.spec.script or resolved.spec.module or ""
    if interpreter.version not in (None, sys.version_info[:2]):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        # `lineno` counts from 1, and may be None or behind the last line.
        line, lines = error.lineno or 0, ["", *source.decode(errors="replace").splitlines()]
        text = lines[line].strip() if line < len(lines) else ""
        hint = f"correct this line: {text[:80]}" if text else "correct the script"
        return UsageError(f"{name}:{line}: {error.msg} (SyntaxError)", hint=hint)
    except (ValueError, RecursionError, MemoryError):  # too deep here, perhaps not in the rank
        pass
    return None


def _why_not_python(source: bytes) -> str:
    """Return why a file is not Python source; "" if it may be."""
    if b"\0" in source[:1024]:
        return "it is a binary file"
    first = source.split(b"\n", 1)[0]
    if first.startswith(b"#!") and b"python" not in first and b"uv" not in first:
        return f"it begins with {first.decode(errors='replace').strip()}"
    return ""


def _module_source(cwd: Path, module: str) -> bytes | None:
    """Return the source of a module of the working directory; None if it is elsewhere."""
    path = cwd.joinpath(*module.split("."))
    for file in (path.with_name(f"{path.name}.py"), path / "__main__.py"):
        try:
            return file.read_bytes()
        except (OSError, ValueError):
            continue
    return None
