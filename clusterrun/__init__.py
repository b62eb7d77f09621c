"""clusterrun: train a script on N nodes with one command, checked to be one world.

The verbs of the command line from Python:

    from clusterrun import JobSpec, submit

    job = submit(JobSpec(script="train.py", nodes=2, gpus_per_node=4))
    print(job.status().state)
    ended = job.wait()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterrun.config.spec import JobSpec
    from clusterrun.errors import ClusterrunError
    from clusterrun.verbs.cancel import cancel
    from clusterrun.verbs.job import Job, find_job
    from clusterrun.verbs.logs import read_logs
    from clusterrun.verbs.render import load_spec, render
    from clusterrun.verbs.resume import resubmit, resume
    from clusterrun.verbs.status import list_jobs, status, wait
    from clusterrun.verbs.submit import submit

__version__ = "0.1.0"

__all__ = [
    "ClusterrunError",
    "Job",
    "JobSpec",
    "__version__",
    "cancel",
    "find_job",
    "list_jobs",
    "load_spec",
    "read_logs",
    "render",
    "resubmit",
    "resume",
    "status",
    "submit",
    "wait",
]

_HOMES = {  # all others are in the module of their name in `verbs`
    "ClusterrunError": "errors",
    "Job": "verbs.job",
    "JobSpec": "config.spec",
    "find_job": "verbs.job",
    "list_jobs": "verbs.status",
    "load_spec": "verbs.render",
    "read_logs": "verbs.logs",
    "resubmit": "verbs.resume",
    "wait": "verbs.status",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: a training script needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, f"verbs.{name}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
