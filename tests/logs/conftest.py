"""Share the runs that the command line is tested on."""

from __future__ import annotations

from tests.logs.runs import ended, here
from tests.logs.sampled import run

__all__ = ["ended", "here", "run"]
