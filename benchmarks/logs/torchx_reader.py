"""Run `torchx log` on the files of a job that has ended; this needs torchx, not clusterrun.

Called in the directory of the files as `python torchx_reader.py REPLICAS [REGEX]`. Only the
queries to a scheduler (does it exist, has it ended, how many replicas) are answered here.
"""

from __future__ import annotations

import sys

from torchx.cli.cmd_log import get_logs
from torchx.runner import Runner
from torchx.schedulers.api import DescribeAppResponse, Stream
from torchx.schedulers.slurm_scheduler import SlurmScheduler
from torchx.specs import AppState, Role


class EndedJob(SlurmScheduler):  # type: ignore[misc]  # torchx has a separate environment
    """Slurm after the end of the job: squeue is not called."""

    def describe(self, app_id: str) -> DescribeAppResponse:
        role = Role(name="train", image="", num_replicas=int(sys.argv[1]))
        return DescribeAppResponse(app_id=app_id, state=AppState.SUCCEEDED, roles=[role])


if __name__ == "__main__":
    runner = Runner("bench", {"slurm": lambda session_name, **_: EndedJob(session_name)})
    regex = sys.argv[2] if len(sys.argv) > 2 else None
    get_logs(sys.stdout, "slurm://bench/1", regex, runner=runner, streams=Stream.STDERR)
