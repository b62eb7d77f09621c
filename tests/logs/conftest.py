"""Share the runs that the command line is tried on; property tests have all the time they need."""

from __future__ import annotations

from hypothesis import settings

from tests.logs.test_command import ended, here
from tests.logs.test_flags import run

__all__ = ["ended", "here", "run"]

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
