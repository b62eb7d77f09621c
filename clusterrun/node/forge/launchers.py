"""What accelerate's and torch's launchers do for the ranks of a node.

They start ranks, or only give them an environment, and they host the ranks' store. What the forge
imports with this module, a script cannot replace by its own: so it imports little. An agent starts
this module as `AGENT_PID accelerate FAILURES.json ARGS…` or `AGENT_PID store ADDRESS PORT …`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from clusterrun.node.base.processes import die_with_parent
from clusterrun.node.forge.ranks import leave_to_agent
from clusterrun.shared.files import write_whole

# What differs between the ranks of a node; a node fills in its own values (of_rank).
OF_RANK = frozenset({"RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE"})


def main(argv: Sequence[str]) -> int:
    """Do what an agent has started this process for, and leave signals to the agent."""
    agent, what, *words = argv
    die_with_parent(int(agent))
    leave_to_agent()
    if what == "store":
        address, port, nodes, timeout_s = words
        host_store(address, int(port), int(nodes), int(timeout_s), lambda: None)
    return accelerate_launch(Path(words[0]), words[1:])


def accelerate_launch(failures_file: Path, arguments: Sequence[str]) -> int:
    """Launch the ranks and wait; return 1 if any failed, and write which: accelerate does not."""
    os.environ["CLUSTERRUN_LAUNCHER_PID"] = str(os.getpid())
    _keep_torch_quiet()
    import subprocess

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(launch_command_parser().parse_args(list(arguments)))
        return 0
    except ChildFailedError as error:
        failures = error.failures.items()
        entries = [{"rank": rank, "exitcode": failure.exitcode} for rank, failure in failures]
        write_whole(failures_file, json.dumps(entries))
    except subprocess.CalledProcessError as error:  # from its launcher for one process
        write_whole(failures_file, json.dumps([{"rank": 0, "exitcode": error.returncode}]))
    except SignalException as error:
        print(error, file=sys.stderr)  # noqa: T201 - into the launcher's stream
    return 1


def _keep_torch_quiet() -> None:
    """Silence torch's launcher: it names only this node's failure, and warns of others' exits."""
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        os.environ["CLUSTERRUN_QUIET_LAUNCHER"] = "1"  # the ranks remove both
    import logging

    import torch.distributed.run  # noqa: F401 - creates the loggers to silence

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def common(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the first rank's variables; raise ValueError if others differ in more than OF_RANK."""
    first = ranks[0]
    for other in ranks[1:]:
        if names := {n for n in {*first, *other} - OF_RANK if first.get(n) != other.get(n)}:
            raise ValueError(f"the ranks differ in the variables {', '.join(sorted(names))}")
    return dict(first)


def capture(
    arguments: Sequence[str],
    before: Mapping[str, str],
    answer: Callable[[list[dict[str, str]]], NoReturn],
) -> NoReturn:
    """Call `answer` with what `accelerate launch` adds to `before` for each rank of this node.

    The launchers run as usual, but start nothing and meet no other node.
    """

    def answer_instead(*_: Any, **options: Any) -> NoReturn:
        if options.get("numa_options") is not None:
            raise ValueError("torch binds the ranks to NUMA nodes")
        if (envs := options.get("envs")) is None:  # accelerate's launcher for one process
            answer([_added(options["env"], before)])
        options["logs_specs"].reify(envs)  # adds the error files
        answer([_added({**os.environ, **envs[local]}, before) for local in sorted(envs)])

    from accelerate.commands import launch
    from torch.distributed.elastic.agent.server import local_elastic_agent

    local_elastic_agent.LocalElasticAgent._rendezvous = _assign_ranks
    local_elastic_agent.start_processes = answer_instead
    launch.subprocess = SimpleNamespace(Popen=answer_instead)
    launch.launch_command(launch.launch_command_parser().parse_args(list(arguments)))
    raise ValueError("accelerate launch started no rank")


def _added(of_rank: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in of_rank.items() if before.get(name) != value}


def _assign_ranks(_: Any, group: Any) -> None:
    """Assign this node's ranks as torch's rendezvous does, which would wait for the other nodes."""
    from torch.distributed.elastic.agent.server import Worker

    spec = group.spec
    static, size = spec.rdzv_handler, spec.local_world_size
    group.store = object()
    group.group_rank, group.group_world_size = static.rank, static.world_size
    group.master_addr, group.master_port = static.master_addr, static.master_port
    first, world = static.rank * size, static.world_size * size
    group.workers = [Worker(n, first + n, first + n, world, world) for n in range(size)]


def host_store(
    address: str, port: int, nodes: int, timeout_s: int, report_open: Callable[[], None]
) -> NoReturn:
    """Host the ranks' store until killed, as torch's static rendezvous would on the first node."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(address, port, nodes, True, timeout, wait_for_workers=False, multi_tenant=True)
    report_open()
    while store:  # this reference keeps it open
        signal.pause()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
