"""Jobs on simulated nodes that leave nothing behind, whatever a test does."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.node.jobs import AgentJob, make_job
from tests.patience import patience


@pytest.fixture
def stub_job(tmp_path: Path) -> Iterator[Callable[..., AgentJob]]:
    """Make jobs whose launcher is the stub; without a world contract unless asked for."""
    yield from _maker(tmp_path, is_stub=True, world_contract=False)


@pytest.fixture
def torch_job(tmp_path: Path) -> Iterator[Callable[..., AgentJob]]:
    """Make jobs with the real accelerate and torch."""
    yield from _maker(tmp_path)


def _maker(tmp_path: Path, **defaults: Any) -> Iterator[Callable[..., AgentJob]]:
    jobs: list[AgentJob] = []

    def make(script: str | Path, *args: str, **asked: Any) -> AgentJob:
        path = tmp_path / f"job{len(jobs)}"
        path.mkdir()
        jobs.append(make_job(path, script, *args, **{**defaults, **asked}))
        return jobs[-1]

    yield make
    for job in jobs:
        job.kill()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test in an event loop of its own, and end one that hangs."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    given = {name: pyfuncitem.funcargs[name] for name in names}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), 30 * patience()))
    return True
