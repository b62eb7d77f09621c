"""Share the runs that the command line is tried on."""

from __future__ import annotations

from tests.logs.test_command import ended, here
from tests.logs.test_flags import run

__all__ = ["ended", "here", "run"]
