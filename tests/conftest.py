"""What all tests share: the environment's own programs come first, as in an activated one.

Another ninja on the machine would build DeepSpeed's extensions anew each time that it takes turns
with the environment's. Property tests have no deadline: a busy machine is not a fault.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import settings

from tests import builds

os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
builds.share()
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_runtest_setup() -> None:
    """Let no test wait for a build that was killed in an earlier one."""
    builds.remove_abandoned_locks()
