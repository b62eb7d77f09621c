"""Run accelerate's launcher: `clusterrun.node.agent.accelerate_main FAILURES.json ARGS…`.

It dies with the agent, leaves signals to the agent, and records which ranks failed: accelerate
itself exits with 1 for any failure.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from clusterrun.node.base.processes import die_with_parent
from clusterrun.node.forge.ranks import leave_to_agent
from clusterrun.shared.files import write_whole


def main(argv: Sequence[str]) -> int:
    """Launch the ranks and wait for them; return 0 if all succeeded, else 1."""
    failures_file, arguments = Path(argv[0]), list(argv[1:])
    die_with_parent(int(os.environ["CLUSTERRUN_AGENT_PID"]))
    os.environ["CLUSTERRUN_LAUNCHER_PID"] = str(os.getpid())
    leave_to_agent()

    _keep_torch_quiet()
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(launch_command_parser().parse_args(arguments))
        return 0
    except ChildFailedError as error:
        failures = error.failures.items()
        entries = [{"rank": rank, "exitcode": each.exitcode} for rank, each in failures]
        write_whole(failures_file, json.dumps(entries))
    except subprocess.CalledProcessError as error:  # from its launcher for one process
        write_whole(failures_file, json.dumps([{"rank": 0, "exitcode": error.returncode}]))
    except SignalException as error:
        print(error, file=sys.stderr)  # noqa: T201 - into the launcher's stream
    return 1


def _keep_torch_quiet() -> None:
    """Silence torch's launcher: the agents know which rank failed first.

    torch's table names only this node's first failure. After a successful run, a launcher warns
    if another one exits first.
    """
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        os.environ["CLUSTERRUN_QUIET_LAUNCHER"] = "1"  # the ranks remove both
    import torch.distributed.run  # noqa: F401 - creates the loggers to silence

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
