"""Read what the script's arguments say of the launch: a DeepSpeed JSON, and batch numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from clusterrun.errors import ConfigError

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
    """Return the values of an option, up to the next option.

    >>> values_of(["--fsdp", "full_shard auto_wrap", "--bf16"], "--fsdp")
    ['full_shard auto_wrap']
    """
    found: list[str] = []
    is_open = False
    for word in args:
        if word.startswith("-"):
            option, _, value = word.partition("=")
            is_open = option == name
            found += [value] if is_open and value else []
        elif is_open:
            found.append(word)
    return found


def check_batch_numbers(args: Sequence[str], text: str, where: str, ranks: int) -> None:
    """Refuse a DeepSpeed JSON whose batch numbers don't multiply. Raises ConfigError.

    `ranks` is the data-parallel size. If the script or the JSON divides the model, DeepSpeed checks
    the numbers.
    """
    config: dict[str, Any] = json.loads(text or "{}")
    numbers: dict[str, int] = {key: config[key] for key in _BATCH if type(config.get(key)) is int}
    total = numbers.pop("train_batch_size", None)
    words = (word for word in args if word.startswith("--") and "parallel" in word)
    if total is None or any(map(config.get, _MODEL_PARALLEL)) or any(words):
        return
    known, is_whole = math.prod([ranks, *numbers.values()]), len(numbers) == len(_BATCH) - 1
    if total != known and (is_whole or total % known):
        parts = [*(f"{value} ({key})" for key, value in numbers.items()), f"{ranks} ranks"]
        relation = "is not" if is_whole else "is not a multiple of"
        raise ConfigError(
            f"train_batch_size {total} {relation} {' x '.join(parts)}",
            where=where,
            hint='write "auto", or the number for these nodes and ranks',
        )


# The Trainer's options first; others have names that scripts commonly use, with _ or -.
_MICRO = ("--per_device_train_batch_size", "--micro_batch_size")
_MICRO_OF_SCRIPTS = (
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
    found = ((name, values_of(args, name)) for name in _spelled(names))
    return next(((n, int(v[0])) for n, v in found if len(v) == 1 and v[0].isdecimal()), None)


def batch_of(args: Sequence[str]) -> tuple[tuple[str, int], tuple[str, int]] | None:
    """Return the options of the micro-batch and the accumulation; None unless both are known.

    >>> batch_of(["--per_device_train_batch_size", "8"])
    (('--per_device_train_batch_size', 8), ('--gradient_accumulation_steps', 1))
    """
    micro = number_in(args, (*_MICRO, *_MICRO_OF_SCRIPTS))
    accumulation = number_in(args, _ACCUMULATION)
    is_given = any(values_of(args, name) for name in _spelled(_ACCUMULATION))
    if micro and micro[0] == _MICRO[0] and not is_given:
        accumulation = (_ACCUMULATION[0], 1)  # the Trainer's default
    return (micro, accumulation) if micro and accumulation else None


def with_number(args: Sequence[str], name: str, value: int) -> tuple[str, ...]:
    """Return the arguments with another number for an option.

    >>> with_number(["--a", "1", "--b=2"], "--a", 5), with_number(["--b=2"], "--b", 3)
    (('--a', '5', '--b=2'), ('--b=3',))
    """
    words = [f"{name}={value}" if word.startswith(f"{name}=") else word for word in args]
    if name in words:
        words[words.index(name) + 1] = str(value)
    elif not any(word.startswith(f"{name}=") for word in words):
        words += [name, str(value)]
    return tuple(words)
