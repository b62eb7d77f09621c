"""Replace the script's process-group timeout with the job's `--timeout`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from clusterrun.rank.emit import rank, say_once


def with_timeout(
    init_process_group: Callable[..., Any], args: Any, kwargs: Any, timeout_s: int
) -> tuple[Any, Any]:
    """Return a call's arguments with the job's timeout; rank 0 reports the replaced one."""
    try:
        bound = inspect.signature(init_process_group).bind(*args, **kwargs)
    except TypeError:
        return args, kwargs  # let torch itself refuse the call
    timeout = timedelta(seconds=timeout_s)
    given = bound.arguments.get("timeout")
    if given not in (None, timeout) and rank() == 0:
        say_once(f"--timeout {timeout_s} s replaces the script's {given}")
    bound.arguments["timeout"] = timeout
    return bound.args, bound.kwargs
