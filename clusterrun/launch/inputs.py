"""Check before a job is queued what it reads: paths, environments and the interpreter."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from clusterrun.config.choices import Cluster, Strategy
from clusterrun.config.environments import Tool, read_step
from clusterrun.errors import UsageError
from clusterrun.launch.facts import Facts, Interpreter
from clusterrun.rundir.paths import PLACES_OF_ONE_MACHINE
from clusterrun.shared.wording import dotted, missing_text, parse_version

if TYPE_CHECKING:
    from clusterrun.config.spec import JobSpec


# Words in flags of paths that the script reads, writes, or reads although it once wrote them.
_READ: Final = (
    r"\b(adapter|conf|config|corpus|data|dataset|deepspeed|dev|eval|file|image|input|lora|manifest|"
    r"model|source|test|text|tokenizer|train|training|val|valid|validation|vocab|weight)s?\b"
)
_WRITTEN: Final = (
    r"\b(artifact|cache|checkpoint|ckpt|dest|download|dump|exp|experiment|export|lock|log|logdir|"
    r"logging|metric|model dir|nvme|offload|out|outdir|output|pid|plot|profile|record|report|"
    r"result|run|save|saved|snapshot|summary|swap|target|tb|temp|tensorboard|tmp|trace|wandb|work|"
    r"workdir|write)s?\b"
)
_READ_AGAIN: Final = r"\b(from|init|load|pretrain|pretrained|resume)\b"
_SUFFIX: Final = (
    r"(?i)\.(arrow|bin|ckpt|conf|csv|h5|hdf5|ini|jsonl?|model|np[yz]|parquet|pkl|pth?|safetensors|"
    r"tar|toml|tsv|txt|ya?ml|zip|zst|gz)\Z"
)
_NO_PATH: Final = r"[*?\[\]{}$%:,;|<>~\x00-\x1f]"
_ASSIGNED: Final = r"(?s)(-{1,2}|\+{0,2})([A-Za-z_][\w.-]*)=(.*)\Z"


def paths_to_look_for(spec: JobSpec) -> list[str]:
    """Return the paths that `Facts.missing` may contain, as written."""
    return [*_activated(spec.setup).values(), *(path for _, path in inputs(spec.args))]


def check_environments(setup: Sequence[str], facts: Facts) -> None:
    """Refuse a virtual environment that does not exist. Raises UsageError."""
    for directory, script in _activated(setup).items():
        if script in facts.missing:
            raise UsageError(
                f"setup: {directory} is not a virtual environment: it has no bin/activate",
                hint=(
                    "name an existing directory; $NAME and * are not expanded there",
                    f"if only the nodes have it, write the line 'source {script}'",
                ),
            )


def runs_in_container(spec: JobSpec) -> bool:
    """Return whether the nodes run an image, which has its own interpreter and paths."""
    return any(option.startswith("--container") for option in spec.srun_args)


def is_of_one_machine(path: str, cluster: Cluster) -> bool:
    """Return whether a path is on each node's local disk, which can't be checked from here."""
    places = tuple(f"{place}/" for place in PLACES_OF_ONE_MACHINE)
    return not cluster.scheduler.is_this_machine and path.startswith(places)


def input_notes(spec: JobSpec, facts: Facts) -> Iterator[str]:
    """Yield a note for each argument whose path is missing here and not local to a node."""
    if runs_in_container(spec):
        return  # the script reads paths of the image and its mounts
    for flag, path in inputs(spec.args):
        if path in facts.missing and not is_of_one_machine(path, facts.cluster):
            yield f"{flag}: {path} does not exist here"


def inputs(args: Sequence[str]) -> list[tuple[str, str]]:
    """Return the paths that a script seems to read, with their flags, without what it writes.

    >>> inputs(["--config", "a.yaml", "--output", "/out", "--model", "meta-llama/Llama-3.1-8B"])
    [('--config', 'a.yaml')]
    """
    pairs = list(_pairs(args))
    written = {value for flag, value in pairs if _is_written(flag)}
    return [pair for pair in pairs if pair[1] not in written and _is_input(*pair)]


def _pairs(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each value with its flag: `--flag value ...`, `--flag=value`, Hydra's `key=value`."""
    flag = ""
    for word in args:
        if assigned := re.match(_ASSIGNED, word):
            flag = ""
            yield assigned[1] + assigned[2], assigned[3]
        elif word.startswith("-"):
            flag = word
        elif flag:
            yield flag, word


def _words(flag: str) -> str:
    return re.sub(r"[-_.+]+", " ", flag.lower())


def _is_written(flag: str) -> bool:
    words = _words(flag)
    return bool(re.search(_WRITTEN, words) and not re.search(_READ_AGAIN, words))


def _is_input(flag: str, value: str) -> bool:
    if not value or re.search(_NO_PATH, value) or _is_written(flag):
        return False
    if value.startswith("/"):
        return True
    is_path = value.startswith(("./", "../")) or bool(re.search(_SUFFIX, value))
    words = _words(flag)
    is_read = re.search(_READ, words) or re.search(_READ_AGAIN, words)
    return is_path and bool(is_read) and not re.search(r"\bname\b(?! or path)", words)


def _activated(setup: Sequence[str]) -> dict[str, str]:
    """Return the virtual environments of `setup`, each with the script that activates it."""
    steps = [step for step in map(read_step, setup) if step.tool is Tool.VENV]
    return {step.names[0]: posixpath.join(step.names[0], "bin/activate") for step in steps}


_OTHER = "or name another interpreter with --python"


def interpreter_problem(spec: JobSpec, facts: Facts, strategy: Strategy) -> UsageError | None:
    """Return why the job can't run with its interpreter; None if no reason is known."""
    found = facts.interpreter
    if runs_in_container(spec):
        return None
    if not found.path:
        return None if facts.cluster.scheduler.has_hosts else _absent(spec, facts)
    texts = (too_old_text(found, facts.oldest, name) for name in ("python", *found.packages))
    if too_old := next(filter(None, texts), ""):
        return UsageError(too_old, hint=f"upgrade it, {_OTHER}")
    missing = [name for name in strategy.packages if not found.packages.get(name)]
    if not found.is_known or not missing:
        return None
    needed_by = f"strategy {strategy.value}" if missing == ["deepspeed"] else ""
    return UsageError(
        missing_text(found.path, missing, needed_by),
        hint=f"run {found.path} -m pip install '.[train]' in a clone of clusterrun, {_OTHER}",
    )


def is_certain(spec: JobSpec, facts: Facts) -> bool:
    """Return whether the nodes will find the same: bash or a module may add packages."""
    if facts.cluster.scheduler.has_hosts:
        return False  # they have disks of their own
    steps = [read_step(line) for line in spec.setup]
    is_plain = all(step.tool in (Tool.VENV, Tool.CONDA) for step in steps)
    is_here = bool(facts.interpreter.path) or bool(facts.cluster.scheduler.is_this_machine)
    return is_plain and is_here and "PYTHONPATH" not in spec.env


def _absent(spec: JobSpec, facts: Facts) -> UsageError | None:
    if "/" not in facts.python and spec.setup:
        return None  # the setup lines provide it
    return UsageError(
        f"there is no interpreter '{facts.python}' on this machine",
        hint="name one with --python, or omit it to use the interpreter that runs clusterrun",
    )


def too_old_text(python: Interpreter, oldest: Mapping[str, tuple[int, int]], name: str) -> str:
    """Say that an interpreter, or its package of this name, is too old; empty if it is not."""
    text, least = python.packages.get(name, "") if python.is_known else "", oldest.get(name)
    found = python.version if name == "python" else parse_version(text)
    if not found or not least or found >= least:
        return ""
    what = f"is Python {dotted(found)}" if name == "python" else f"has {name} {text}"
    return f"{python.path} {what}; clusterrun needs {dotted(least)} or newer"
