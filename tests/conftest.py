"""What all tests share: the programs on PATH, byte code, patience, and what runs beside what.

The environment's own programs come first, as in an activated one: another ninja on the machine
would build DeepSpeed's extensions anew each time that it takes turns with the environment's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests import builds
from tests.patience import PATIENCE

os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
builds.share()

# Without byte code, each of the thousand processes that tests start compiles the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A property has all the time it needs; `make test` tries the same examples each time.
settings.register_profile("patient", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "patient"))

# What takes longest starts first, so that no worker is left alone with it.
FIRST = ("tests/chaos", "tests/slurm", "tests/examples", "tests/cluster")


def pytest_runtest_setup() -> None:
    """Let no test wait for a build that was killed in an earlier one."""
    builds.remove_abandoned_locks()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Scale the time limits, keep together what shares a fixture, and begin with what is long."""
    limit = float(config.getini("timeout"))
    for item in items:
        own = item.get_closest_marker("timeout")
        limited = pytest.mark.timeout((own.args[0] if own else limit) * PATIENCE)
        item.add_marker(limited, append=False)
        if item.get_closest_marker("xdist_group") is None and _shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))
    items.sort(key=_turn)


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Say whether a fixture of the item's module is made once for several of its tests."""
    made_by = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    return any(maker.scope == "module" for makers in made_by.values() for maker in makers)


def _turn(item: pytest.Item) -> int:
    folder = item.nodeid.split("::")[0]
    return next((n for n, begin in enumerate(FIRST) if folder.startswith(begin)), len(FIRST))
