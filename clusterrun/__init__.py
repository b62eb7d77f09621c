"""clusterrun: one command takes a training script to N nodes and proves that they are one world.

From Python, the verbs of the command line:

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
    from clusterrun.verbs.api import list_jobs, load_spec, read_logs, render, status, submit, wait
    from clusterrun.verbs.cancel import cancel
    from clusterrun.verbs.job import Job, find_job
    from clusterrun.verbs.resume import resubmit, resume

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

_HOMES = {
    "ClusterrunError": "clusterrun.errors",
    "Job": "clusterrun.verbs.job",
    "JobSpec": "clusterrun.config.spec",
    "cancel": "clusterrun.verbs.cancel",
    "find_job": "clusterrun.verbs.job",
    "resubmit": "clusterrun.verbs.resume",
    "resume": "clusterrun.verbs.resume",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: a training script pays for none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "clusterrun.verbs.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
