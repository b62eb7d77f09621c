"""The names of settings, and suggestions for unknown names."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

from clusterrun.config.fields import Field
from clusterrun.config.spec import FIELDS
from clusterrun.shared.wording import nearest

BY_KEY: Final[Mapping[str, Field]] = {field.key: field for field in FIELDS}
BY_NAME: Final[Mapping[str, Field]] = {field.name: field for field in FIELDS}
BY_ENV: Final[Mapping[str, Field]] = {field.env: field for field in FIELDS}
SECTIONS: Final = tuple(
    dict.fromkeys(key.partition(".")[0] for key in BY_KEY if "." in key)
)  # slurm, launch, network, logs, training
FORMER: Final[Mapping[str, Field]] = {
    option: field for field in FIELDS for flag in field.former for option in flag.split("/")
}
# The names in other tools.
_ALIASES: Final = {
    **dict.fromkeys(("gpus", "gres", "num_gpus", "n_gpus"), "slurm.gpus_per_node"),
    **dict.fromkeys(("num_nodes", "nnodes", "num_machines"), "slurm.nodes"),
    **dict.fromkeys(
        ("ntasks_per_node", "tasks_per_node", "num_processes"), "launch.nproc_per_node"
    ),
    **dict.fromkeys(("precision", "dtype", "amp"), "launch.mixed_precision"),
    **{"memory": "slurm.mem", "walltime": "slurm.time", "features": "slurm.constraint"},
    **dict.fromkeys(("tp", "tp_size"), "launch.tensor_parallel"),
    **dict.fromkeys(("cp", "cp_size"), "launch.context_parallel"),
    **dict.fromkeys(("sp", "sp_size", "ulysses"), "launch.sequence_parallel"),
    **{"dp_shard_size": "launch.data_parallel_shard"},
    **{"dp_replicate_size": "launch.data_parallel_replicate"},
    **{"distributed_type": "launch.strategy", "command": "script"},
    **dict.fromkeys(("nodefile", "host_file", "machinefile"), "hostfile"),
}


def keys_in(section: str) -> list[str]:
    """Return the keys of a section without its name; "" is the top level."""
    if not section:
        return [key for key in BY_KEY if "." not in key] + [*SECTIONS, "profile", "profiles"]
    return [key.partition(".")[2] for key in BY_KEY if key.startswith(section + ".")]


def hint_for_key(name: str, section: str) -> str:
    """Return a hint for an unknown key of a section ("": the top level)."""
    plain, known = name.replace("-", "_").removeprefix(f"{section}."), keys_in(section)
    if plain in ("conda", "conda_env", "modules", "uv", "venv"):
        return f"write it under 'launch:' as setup: {{{plain.removesuffix('_env')}: ...}}"
    key = words().get(plain) if plain not in known else None
    if key is None and (near := nearest(plain, known)):
        return f"use '{near}'"
    key = key or words().get(nearest(plain, words()) or "", "")
    home, _, leaf = key.rpartition(".")
    if home == section:
        return f"use '{leaf}'" if leaf else f"use one of: {', '.join(known)}"
    where = f"under '{home}:'" if home else "at the top level"
    return f"write '{leaf}' {where}" if leaf else f"use one of: {', '.join(known)}"


@functools.cache
def words() -> dict[str, str]:
    """Map words to the keys that they name: whole keys, their last parts, long options."""
    found = dict(_ALIASES)
    for field in FIELDS:
        flags = (flag for flag in (*field.flags, *field.former) if flag[:2] == "--")
        options = [flag.lstrip("-").replace("-", "_") for flag in flags]
        for word in (*options, field.name, field.key.rpartition(".")[2], field.key):
            found[word] = field.key
    return found
