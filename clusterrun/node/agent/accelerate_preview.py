"""Print the environment that `accelerate launch` gives a rank: `accelerate_preview LOCAL ARGS…`.

It runs the launchers of accelerate and torch, which start nothing and meet no other node here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any


def main(argv: Sequence[str]) -> None:
    """Print the new and changed variables as JSON."""
    before, local_rank = dict(os.environ), int(argv[0])

    def show(*_: Any, env: Any = None, envs: Any = None, logs_specs: Any = None, **__: Any) -> None:
        if envs is not None:  # of torch's launcher; accelerate's launcher for one process has `env`
            logs_specs.reify(envs)
        of_rank: Mapping[str, str] = env or {**os.environ, **envs[local_rank]}
        new = {name: value for name, value in of_rank.items() if before.get(name) != value}
        print(json.dumps(new))  # noqa: T201 - the answer
        sys.stdout.flush()
        os._exit(0)

    from accelerate.commands import launch
    from torch.distributed.elastic.agent.server import local_elastic_agent

    local_elastic_agent.LocalElasticAgent._rendezvous = _number
    local_elastic_agent.start_processes = show
    launch.subprocess = SimpleNamespace(Popen=show)
    launch.launch_command(launch.launch_command_parser().parse_args(list(argv[1:])))


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


if __name__ == "__main__":
    main(sys.argv[1:])
