"""What all tests share: the programs on PATH, byte code, patience, and what runs beside what.

The environment's own programs come first, as in an activated one: another ninja on the machine
would build DeepSpeed's extensions anew each time that it takes turns with the environment's.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings

from tests import builds, gpus, side_by_side
from tests.patience import patience

os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
builds.share()

# Under this switch of CI, a skip is a failure, unless only a GPU is missing.
REQUIRE = "CLUSTERRUN_REQUIRE_ALL"
FAST = "not slurm and not torch and not agents and not ssh and not install and not long"
PARTS = {"fast": FAST, "slow": f"not ({FAST}) and not long", "slow-and-long": f"not ({FAST})"}
OF_TORCH = re.compile(r"^pytestmark = .*pytest\.mark\.torch\b", re.MULTILINE)

# Without byte code, each of the thousand processes that tests start compiles the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell without job control has what it starts in the background ignore SIGINT, and all below it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A property has all the time it needs; `make test` tries the same few examples each time.
settings.register_profile("patient", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True, max_examples=10)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "patient"))


# The tests themselves stay until the end: no collection of garbage visits them.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=PARTS, help="the tests of `make check`, or the others")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the tests of a part by their markers."""
    if part := config.getoption("part"):
        config.option.markexpr = PARTS[part]


def pytest_collection_finish() -> None:
    """Collect garbage from now on, and only what the tests make."""
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module of torch tests in `make check`: torch takes seconds to import."""
    if config.getoption("part") != "fast" or collection_path.suffix != ".py":
        return None
    return OF_TORCH.search(collection_path.read_text()) is not None or None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let no test go without a word that CI means to run."""
    report = yield
    return report if item.get_closest_marker("gpu") else _required(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let no module go either."""
    return _required((yield))


Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def _required(report: Report) -> Report:
    if report.skipped and os.environ.get(REQUIRE) and not hasattr(report, "wasxfail"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"{reason} ({REQUIRE} makes a skip a failure)"
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let no test wait for a build that was killed in an earlier one, or for a missing GPU."""
    if item.get_closest_marker("gpu") and not gpus.has_gpu():
        pytest.skip("this machine has no NVIDIA GPU")
    builds.remove_abandoned_locks()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long."""
    items.sort(key=lambda item: side_by_side.turn(item.nodeid))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Scale the time limit by the load of now."""
    own = item.get_closest_marker("timeout")
    seconds = float(own.args[0] if own else item.config.getini("timeout"))
    item.add_marker(pytest.mark.timeout(seconds * patience()), append=False)
    return (yield)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> side_by_side.InGroups | None:
    """Keep together what shares something, where that was asked for."""
    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False
    return side_by_side.InGroups(config, log)
