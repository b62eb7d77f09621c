"""Share the runs that the command line is tested on."""

from __future__ import annotations

from tests.logs.runs import ended, here, run  # noqa: F401
