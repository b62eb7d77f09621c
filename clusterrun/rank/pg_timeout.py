"""The timeout of the process group: the job's `--timeout` replaces the script's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from clusterrun.rank.emit import rank, say_once


def with_timeout(
    init_process_group: Callable[..., Any], args: Any, kwargs: Any, timeout_s: int
) -> tuple[Any, Any]:
    """Return the arguments of a call with the job's timeout; rank 0 reports a different one."""
    try:
        bound = inspect.signature(init_process_group).bind(*args, **kwargs)
    except TypeError:
        return args, kwargs  # let torch itself refuse the call
    timeout = timedelta(seconds=timeout_s)
    given = bound.arguments.get("timeout")
    if given not in (None, timeout) and rank() == 0:
        say_once(f"--timeout {timeout_s} s holds, not the {given} that the script asks for")
    bound.arguments["timeout"] = timeout
    return bound.args, bound.kwargs
