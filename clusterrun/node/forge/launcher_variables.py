"""Ask accelerate and torch for the environment that `accelerate launch` gives each rank.

Their launchers run as usual, but start nothing and meet no other node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

# What differs between the ranks of a node; a node fills in its own values (of_rank).
OF_RANK = frozenset({"RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE"})
Variables = dict[str, str]


def common(ranks: Sequence[Mapping[str, str]]) -> Variables:
    """Return the variables of a node's first rank, if the others differ only in their numbers.

    Raises ValueError if another variable differs.
    """
    first = ranks[0]
    for other in ranks[1:]:
        names = {n for n in {*first, *other} - OF_RANK if first.get(n) != other.get(n)}
        if names:
            raise ValueError(f"the ranks differ in {', '.join(sorted(names))}")
    return dict(first)


def capture(
    arguments: Sequence[str],
    before: Mapping[str, str],
    answer: Callable[[list[Variables]], NoReturn],
) -> NoReturn:
    """Call `answer` with what the launchers add to `before` for each rank of this node."""

    def show(
        *_: Any,
        env: Any = None,
        envs: Any = None,
        logs_specs: Any = None,
        numa_options: Any = None,
        **__: Any,
    ) -> NoReturn:
        if numa_options is not None:
            raise ValueError("torch binds the ranks to NUMA nodes")
        if envs is None:  # accelerate's launcher for one process
            answer([_new(env, before)])
        logs_specs.reify(envs)
        answer([_new({**os.environ, **envs[local]}, before) for local in sorted(envs)])

    from accelerate.commands import launch
    from torch.distributed.elastic.agent.server import local_elastic_agent

    local_elastic_agent.LocalElasticAgent._rendezvous = _number
    local_elastic_agent.start_processes = show
    launch.subprocess = SimpleNamespace(Popen=show)
    launch.launch_command(launch.launch_command_parser().parse_args(list(arguments)))
    raise ValueError("accelerate launch started no rank")


def _new(of_rank: Mapping[str, str], before: Mapping[str, str]) -> Variables:
    return {name: value for name, value in of_rank.items() if before.get(name) != value}


def _number(_: Any, group: Any) -> None:
    """Number the ranks of this node as torch's rendezvous does, which would wait for the others."""
    from torch.distributed.elastic.agent.server import Worker

    spec = group.spec
    known, size = spec.rdzv_handler, spec.local_world_size
    group.store = object()
    group.group_rank, group.group_world_size = known.rank, known.world_size
    group.master_addr, group.master_port = known.master_addr, known.master_port
    first, world = known.rank * size, known.world_size * size
    group.workers = [Worker(n, first + n, first + n, world, world) for n in range(size)]
