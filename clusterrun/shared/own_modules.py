"""The commands that run our own modules. An agent's first act imports this: it must stay light."""

from __future__ import annotations

WORKER_MODULE = "clusterrun.rank.worker"

# Runs a module as `python -m` does, but without the working directory on sys.path: a project's
# secrets.py or logging/ must not shadow the standard library's (`python -P` needs 3.11).
RUN_MODULE = (
    "import sys; sys.path[:] = filter(None, sys.path); del sys.argv[0]; "
    "import runpy; runpy._run_module_as_main(sys.argv[0])"
)


def module_argv(python: str, module: str, *words: str) -> tuple[str, ...]:
    """Return the command that runs one of our modules in any working directory."""
    return (python, "-c", RUN_MODULE, module, *words)
