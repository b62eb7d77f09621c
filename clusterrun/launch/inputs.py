"""What a job reads, checked before it is queued: arguments, paths, environments, interpreter."""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from clusterrun.config.choices import Cluster, Strategy
from clusterrun.config.environments import Tool, read_step
from clusterrun.errors import ConfigError, UsageError
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
    return [*_activation_scripts(spec.setup).values(), *(path for _, path in inputs(spec.args))]


def check_environments(setup: Sequence[str], facts: Facts) -> None:
    """Refuse a virtual environment that does not exist. Raises UsageError."""
    for directory, script in _activation_scripts(setup).items():
        if script in facts.missing:
            text = f"setup: {directory} is not a virtual environment: it has no bin/activate"
            exists = "name an existing directory; $NAME and * are not expanded in it"
            on_nodes = f"if only the nodes have it, write the line 'source {script}'"
            raise UsageError(text, hint=(exists, on_nodes))


def runs_in_container(spec: JobSpec) -> bool:
    """Return whether the nodes run an image, which has its own interpreter and paths."""
    return any(option.startswith("--container") for option in spec.srun_args)


def is_of_one_machine(path: str, cluster: Cluster) -> bool:
    """Return whether a path is on each node's local disk, which can't be checked from here."""
    return not cluster.scheduler.is_this_machine and path.startswith(PLACES_OF_ONE_MACHINE)


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
    found = list(pairs(args))
    written = {value for flag, value in found if _is_written(flag)}
    return [(flag, path) for flag, path in found if path not in written and _is_input(flag, path)]


def pairs(args: Sequence[str]) -> Iterator[tuple[str, str]]:
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
    """Return whether a value seems to be a path that the script reads, as any absolute one does."""
    if not value or re.search(_NO_PATH, value):
        return False
    if value.startswith("/"):
        return True
    is_path = value.startswith(("./", "../")) or bool(re.search(_SUFFIX, value))
    words = _words(flag)
    is_read = re.search(_READ, words) or re.search(_READ_AGAIN, words)
    is_name = re.search(r"\bname\b(?! or path)", words)  # not --model_name_or_path
    return is_path and bool(is_read) and not is_name


def _activation_scripts(setup: Sequence[str]) -> dict[str, str]:
    """Return the virtual environments of `setup`, each with the script that activates it."""
    steps = [step for step in map(read_step, setup) if step.tool is Tool.VENV]
    return {step.names[0]: posixpath.join(step.names[0], "bin/activate") for step in steps}


_OTHER = "or name another interpreter with --python"


def interpreter_problem(spec: JobSpec, facts: Facts, strategy: Strategy) -> UsageError | None:
    """Return why the job can't run with its interpreter; None if no reason is known."""
    found = facts.interpreter
    if runs_in_container(spec):
        return None  # the image has its own interpreter
    if not found.path:
        comes_with_setup = "/" not in facts.python and spec.setup  # which may put it on PATH
        if comes_with_setup or facts.cluster.scheduler.has_hosts:  # they have their own
            return None
        hint = "name one with --python, or leave it out to use the interpreter that runs clusterrun"
        return UsageError(f"there is no interpreter '{facts.python}' on this machine", hint=hint)
    for name in ("python", *found.packages):
        if too_old := too_old_text(found, facts.oldest, name):
            return UsageError(too_old, hint=f"upgrade it, {_OTHER}")
    missing = [name for name in strategy.packages if not found.packages.get(name)]
    if not found.is_known or not missing:  # not known: they may still be installed
        return None
    needed_by = f"strategy {strategy.value}" if missing == ["deepspeed"] else ""
    hint = f"run {found.path} -m pip install '.[train]' in a clone of clusterrun, {_OTHER}"
    return UsageError(missing_text(found.path, missing, needed_by), hint=hint)


def is_certain(spec: JobSpec, facts: Facts) -> bool:
    """Return whether nodes surely have the interpreter as it is here: setup may choose another."""
    if facts.cluster.scheduler.has_hosts:
        return False  # they have disks of their own
    steps = [read_step(line) for line in spec.setup]
    is_plain = all(step.tool in (Tool.VENV, Tool.CONDA) for step in steps)  # not bash or modules
    # If it is not found here, that is certain only for a job on this machine.
    is_here = bool(facts.interpreter.path) or bool(facts.cluster.scheduler.is_this_machine)
    return is_plain and is_here and "PYTHONPATH" not in spec.env


def too_old_text(python: Interpreter, oldest: Mapping[str, tuple[int, int]], name: str) -> str:
    """Say that an interpreter, or its package of this name, is too old; "" if it is not."""
    text = python.packages.get(name, "") if python.is_known else ""
    version = python.version if name == "python" else parse_version(text)
    least = oldest.get(name)
    if not version or not least or version >= least:
        return ""
    what = f"is Python {dotted(version)}" if name == "python" else f"has {name} {text}"
    return f"{python.path} {what}; clusterrun needs {dotted(least)} or newer"


# What the script's arguments say of the launch: a DeepSpeed JSON, and batch numbers

# The Trainer's option, and that of DeepSpeed's add_config_arguments().
_DEEPSPEED = ("--deepspeed", "--deepspeed_config", "--deepspeed-config")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_MODEL_PARALLEL = ("sequence_parallel_size", "tensor_parallel", "pipeline")  # in a JSON


def named_json(args: Sequence[str]) -> str | None:
    """Return the DeepSpeed JSON file that the arguments name; None without one.

    >>> named_json(["--deepspeed", "--deepspeed_config=ds.json"]), named_json(["--deepspeed"])
    ('ds.json', None)
    """
    values = (value for name in _DEEPSPEED for value in values_of(args, name))
    return next((value for value in values if value.lower().endswith(".json")), None)


def values_of(args: Sequence[str], name: str) -> list[str]:
    """Return all values of an option, without empty ones.

    >>> values_of(["--data", "a", "b c", "--lr", "1", "--data=d"], "--data")
    ['a', 'b c', 'd']
    """
    return [value for flag, value in pairs(args) if flag == name and value]


def check_batch_numbers(args: Sequence[str], text: str, where: str, ranks: int) -> None:
    """Refuse a DeepSpeed JSON with batch numbers below 1 or a wrong product. Raises ConfigError.

    `where` names the JSON; `ranks` is the data-parallel size. DeepSpeed checks divided models.
    """
    config: dict[str, Any] = json.loads(text or "{}")
    numbers: dict[str, int] = {key: config[key] for key in _BATCH if type(config.get(key)) is int}
    divides_model = any(map(config.get, _MODEL_PARALLEL)) or any(
        word.startswith("--") and "parallel" in word for word in args
    )
    if "train_batch_size" not in numbers or divides_model:
        return
    hint = 'set it to "auto", or to the value for these nodes and ranks'
    for key, value in numbers.items():
        if value < 1:
            raise ConfigError(f"{key} must be above 0, not {value}", where=where, hint=hint)
    total = numbers.pop("train_batch_size")
    product = math.prod([ranks, *numbers.values()])
    has_all = len(numbers) == len(_BATCH) - 1  # otherwise, a multiple is enough
    if total != product and (has_all or total % product):
        parts = [*(f"{value} ({key})" for key, value in numbers.items()), f"{ranks} ranks"]
        relation = "is not" if has_all else "is not a multiple of"
        message = f"train_batch_size {total} {relation} {' x '.join(parts)}"
        raise ConfigError(message, where=where, hint=hint)


# The Trainer's options first; others have names that scripts commonly use, with _ or -.
_MICRO = (
    *("--per_device_train_batch_size", "--micro_batch_size"),
    *("--batch_size", "--batch_size_per_gpu", "--per_gpu_train_batch_size"),
    *("--per_device_batch_size", "--batch_size_per_device", "--device_batch_size"),
    *("--micro_train_batch_size", "--train_batch_size"),
)
_ACCUMULATION = (
    *("--gradient_accumulation_steps", "--accumulation", "--grad_accum", "--accum_steps"),
    *("--gradient_accumulation", "--accumulation_steps", "--accumulate_grad_batches"),
    *("--grad_accum_steps", "--accum_iter", "--accum_freq", "--update_freq"),
)


def _spelled(names: Sequence[str]) -> list[str]:
    return [each for name in names for each in (name, f"--{name[2:].replace('_', '-')}")]


def number_in(args: Sequence[str], names: Sequence[str]) -> tuple[str, int] | None:
    """Return the first option that is given with a number, as it is written in the arguments.

    >>> number_in(["--lr", "1", "--batch-size=8"], ("--batch_size",))
    ('--batch-size', 8)
    """
    for name in _spelled(names):
        values = values_of(args, name)
        if len(values) == 1 and values[0].isdecimal():
            return name, int(values[0])
    return None


def batch_of(args: Sequence[str]) -> tuple[tuple[str, int], tuple[str, int]] | None:
    """Return the options of the micro-batch and the accumulation; None unless both are known.

    >>> batch_of(["--per_device_train_batch_size", "8"])
    (('--per_device_train_batch_size', 8), ('--gradient_accumulation_steps', 1))
    """
    micro = number_in(args, _MICRO)
    accumulation = number_in(args, _ACCUMULATION)
    is_given = any(values_of(args, name) for name in _spelled(_ACCUMULATION))
    if micro and micro[0] == _MICRO[0] and not is_given:
        accumulation = (_ACCUMULATION[0], 1)  # the Trainer's default
    return (micro, accumulation) if micro and accumulation else None


def with_number(args: Sequence[str], name: str, value: int) -> tuple[str, ...]:
    """Return the arguments with this number for an option, which is added if it is missing.

    >>> with_number(["--a", "1", "--b=2"], "--a", 5), with_number(["--b=2"], "--b", 3)
    (('--a', '5', '--b=2'), ('--b=3',))
    """
    words = [f"{name}={value}" if word.startswith(f"{name}=") else word for word in args]
    if name in words:
        words[words.index(name) + 1] = str(value)
    elif not any(word.startswith(f"{name}=") for word in words):
        words += [name, str(value)]
    return tuple(words)
