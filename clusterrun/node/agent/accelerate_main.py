"""Run accelerate's launcher: `clusterrun.node.agent.accelerate_main FAILURES.json ARGS…`.

It dies with the agent, ignores the signals that are meant for ranks, and leaves a list of the
ranks that failed, since accelerate itself exits with 1 whatever happened.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterrun.node.agent.launcher import WARNINGS
from clusterrun.node.agent.processes import die_with_parent
from clusterrun.shared.files import write_whole


def main(argv: Sequence[str]) -> int:
    """Launch the ranks and wait for them; return 0 when all ended well."""
    failures_file, arguments = Path(argv[0]), list(argv[1:])
    die_with_parent(int(os.environ["CLUSTERRUN_AGENT_PID"]))
    os.environ["CLUSTERRUN_LAUNCHER_PID"] = str(os.getpid())
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN)  # so do the ranks, which inherit it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)
    # Slurm's SIGTERM may reach every process of a step: what it means is for the agent to say. A
    # handler, since the ranks would inherit that it is ignored; and torch's own would end them.
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"

    _keep_torch_quiet()
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(launch_command_parser().parse_args(arguments))
    except ChildFailedError as error:
        _write(failures_file, [_entry(rank, f) for rank, f in error.failures.items()])
        return 1
    except subprocess.CalledProcessError as error:  # its launcher for one process
        _write(failures_file, [_single(error.returncode)])
        return 1
    except SignalException as error:
        print(error, file=sys.stderr)  # noqa: T201 - into the launcher's stream
        return 1
    return 0


def _keep_torch_quiet() -> None:
    """Leave it to the agents to say which rank failed first.

    torch's table names the first failure that this node noticed, by whole seconds, and its
    launchers complain of each other when one leaves first after a perfect run.
    """
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        os.environ["CLUSTERRUN_QUIET_LAUNCHER"] = "1"  # the ranks take both away again
    import torch.distributed.run  # noqa: F401 - it makes the loggers that are to be quiet

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _entry(rank: int, failure: Any) -> dict[str, Any]:
    return {
        "rank": int(rank),
        "local_rank": int(failure.local_rank),
        "exitcode": int(failure.exitcode),
        "signal": max(0, -int(failure.exitcode)),
        "error_file": str(failure.error_file),
    }


def _single(code: int) -> dict[str, Any]:
    return {
        "rank": 0,
        "local_rank": 0,
        "exitcode": code,
        "signal": max(0, -code),
        "error_file": "",
    }


def _write(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    write_whole(path, json.dumps(list(entries)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
