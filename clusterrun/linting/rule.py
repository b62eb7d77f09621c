"""What a pitfall is: an id, the reason, the fix, and how it is found in a script and its launch.

A rule is silent if it is unsure. A finding that is false costs more trust than a missed one.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from clusterrun.linting.source import Script


class Launch(NamedTuple):
    """What the job gives the script; `cpus_per_node` is 0 if it is not known.

    `gpu_without_bf16` is the GPU type if it has no bf16 units. `is_sized` is False if nodes and
    ranks are an assumption. `is_simulated`: all nodes are this machine. `shared_port` is the port
    that the user chose, 0 if no other job can be on its nodes. `args` are the script's arguments,
    None if they are not known. `env` are the variables that the user sets for the job, `inherited`
    those of the shell; `setup` are the lines of bash that run before. `deepspeed` and `accelerate`
    are what the user's own files contain; `missing` are those that do not exist. `read` returns
    what another JSON file contains: {} if that is not known, None if there is no such file.
    """

    nodes: int = 2
    ranks_per_node: int = 2
    cpus_per_node: int = 0
    has_gpus: bool = True
    gpu_without_bf16: str = ""
    is_sized: bool = True
    is_simulated: bool = False
    strategy: str = "ddp"
    max_restarts: int = 0
    shared_port: int = 0
    args: tuple[str, ...] | None = None
    env: Mapping[str, str] = MappingProxyType({})
    inherited: Mapping[str, str] = MappingProxyType({})
    setup: tuple[str, ...] = ()
    deepspeed: Mapping[str, Any] = MappingProxyType({})
    accelerate: Mapping[str, Any] = MappingProxyType({})
    missing: tuple[str, ...] = ()
    read: Callable[[str], Mapping[str, Any] | None] = lambda path: {}
    has_wandb_key: bool = True

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def is_sharded(self) -> bool:
        """Return whether the strategy splits the model or its optimizer, so that all ranks save."""
        return self.strategy not in ("none", "ddp")

    @property
    def splits_weights(self) -> bool:
        """Return whether no rank has all weights."""
        return self.strategy.startswith(("zero3", "fsdp"))


Found = tuple[ast.AST | None, str]
"""Where, and what; None stands for the job's settings."""
Look = Callable[[Script, Launch], Iterator[Found]]


class Rule(NamedTuple):
    """A pitfall: why it harms, what to do, and how it is found."""

    id: str
    reason: str
    fix: str
    look: Look


RULES: Final[dict[str, Rule]] = {}


def rule(name: str, reason: str, fix: str) -> Callable[[Look], Look]:
    """Add a rule; `name` is its id."""

    def register(look: Look) -> Look:
        RULES[name] = Rule(id=name, reason=reason, fix=fix, look=look)
        return look

    return register
